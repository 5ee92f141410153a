#define DUSTIN_ISA avx512
#include "vec_avx512.h"

#include "isa_table.h"

namespace dustin {
extern const Isa kAvx512;
const Isa kAvx512 = avx512::make_isa<avx512::PlainMath<Bfloat16>>("avx512");
}  // namespace dustin

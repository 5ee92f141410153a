#define DUSTIN_ISA avx2
#include "vec_avx2.h"

#include "isa_table.h"

namespace dustin {
extern const Isa kAvx2;
const Isa kAvx2 = avx2::make_isa<avx2::PlainMath<Bfloat16>>("avx2");
}  // namespace dustin

#define DUSTIN_ISA avx512_bf16
#include "vec_avx512.h"

#include "isa_table.h"
#include "math_bf16.h"

namespace dustin {
extern const Isa kAvx512Bf16;
const Isa kAvx512Bf16 = avx512_bf16::make_isa<avx512_bf16::PairMath>("avx512_bf16");
}  // namespace dustin

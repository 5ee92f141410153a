#define DUSTIN_ISA amx
#include "vec_avx512.h"

#include "isa_table.h"
#include "math_amx.h"

namespace dustin {
extern const Isa kAmx;
const Isa kAmx = amx::make_isa<amx::TileMath>("amx");
}  // namespace dustin

// Fills the table of an instruction set. Included once by each isa_*.cpp.
#pragma once

#include "kernels_body.h"
#include "layers_body.h"

namespace dustin::DUSTIN_ISA {

template <class BfloatMath>
constexpr Isa make_isa(const char* name) {
  return {name,
          BfloatMath::kRowPad > kLanes ? BfloatMath::kRowPad : kLanes,
          kLanes,
          {attend<PlainMath<float>>, attend<PlainMath<Half>>, attend<BfloatMath>},
          {score<PlainMath<float>>, score<PlainMath<Half>>, score<BfloatMath>},
          {store_row<float>, store_row<Half>, store_row<Bfloat16>},
          merge,
          weigh,
          {rms_norm<float>, rms_norm<Half>, rms_norm<Bfloat16>},
          {rotate<float>, rotate<Half>, rotate<Bfloat16>},
          {silu_mul<float>, silu_mul<Half>, silu_mul<Bfloat16>}};
}

}  // namespace dustin::DUSTIN_ISA

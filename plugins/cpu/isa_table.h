// Fills the table of an instruction set. Included once by each isa_*.cpp.
#pragma once

#include "kernels_body.h"

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
          weigh};
}

}  // namespace dustin::DUSTIN_ISA

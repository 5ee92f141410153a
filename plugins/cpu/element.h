// Element types of the cache, and what every instruction set shares.
#pragma once

#include <cstdint>

namespace dustin {

struct Half {
  uint16_t bits;
};

struct Bfloat16 {
  uint16_t bits;
};

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

[[gnu::always_inline]] constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace dustin

// The dtypes of the C ABI, one element at a time.
#ifndef DUSTIN_TESTS_NUMBER_H_
#define DUSTIN_TESTS_NUMBER_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "dustin/kernels.h"

inline int size_of(int32_t dtype) { return dtype == DUSTIN_FLOAT32 ? 4 : 2; }

inline const char* name_of(int32_t dtype) {
  return dtype == DUSTIN_FLOAT32 ? "f32" : dtype == DUSTIN_FLOAT16 ? "f16" : "bf16";
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Both round to nearest, ties to even.
inline uint16_t half_of(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u, bits = bits_of(x) & 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7e00u;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // beyond the largest half: infinite
  if (bits < 0x38800000u)                          // subnormal: 0.5 has its unit in the last place
    return sign | (bits_of(float_of(bits) + 0.5f) - bits_of(0.5f));
  return sign | (bits + 0xfffu + (bits >> 13 & 1u) - 0x38000000u) >> 13;
}

inline uint16_t bfloat16_of(float x) {
  const uint32_t bits = bits_of(x);
  if (std::isnan(x)) return 0x7fc0u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

inline double value_of_half(uint16_t half) {
  const uint32_t size = half & 0x7fffu;
  const float scaled = float_of(size << 13) * 0x1p112f;  // the exponents' biases differ by 112
  const float value = size < 0x7c00u ? scaled : size == 0x7c00u ? INFINITY : NAN;
  return half & 0x8000u ? -value : value;
}

inline double load(const void* base, int64_t i, int32_t dtype) {
  if (dtype == DUSTIN_FLOAT32) return static_cast<const float*>(base)[i];
  const uint16_t bits = static_cast<const uint16_t*>(base)[i];
  return dtype == DUSTIN_FLOAT16 ? value_of_half(bits) : float_of(uint32_t{bits} << 16);
}

inline void store(void* base, int64_t i, int32_t dtype, float x) {
  if (dtype == DUSTIN_FLOAT32)
    static_cast<float*>(base)[i] = x;
  else
    static_cast<uint16_t*>(base)[i] = dtype == DUSTIN_FLOAT16 ? half_of(x) : bfloat16_of(x);
}

#endif  // DUSTIN_TESTS_NUMBER_H_

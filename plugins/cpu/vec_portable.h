// Four floats a vector in plain C++, which compilers turn into SSE2 or NEON where they can.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "element.h"

namespace dustin::DUSTIN_ISA {

constexpr int kLanes = 4;

struct Vec {
  float v[kLanes];
};

template <class F>
inline Vec each(F f) {
  Vec x;
  for (int i = 0; i < kLanes; i++) x.v[i] = f(i);
  return x;
}

inline Vec splat(float x) {
  return each([=](int) { return x; });
}
inline Vec zero() { return splat(0.f); }
inline Vec operator+(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
// A NaN in b comes through.
inline Vec max(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(Bfloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu, mantissa = x.bits & 0x3ffu;
  // Subnormals: mantissa * 2^-24, exact in a float.
  if (exponent == 0) return from_bits(to_bits(static_cast<float>(mantissa) * 0x1p-24f) | sign);
  if (exponent == 31) return from_bits(sign | 0x7f800000u | (mantissa << 13));
  return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline void from_float(float x, float* p) { *p = x; }
inline void from_float(float x, Bfloat16* p) {
  const uint32_t bits = to_bits(x);
  // To nearest, ties to even; NaN keeps a set mantissa bit.
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  p->bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded >> 16);
}
inline void from_float(float x, Half* p) {
  const uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 puts the last bit of a subnormal half at the float's last bit.
    half = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  } else {
    // To nearest, ties to even; what rounds past 65504 is infinite.
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    half = rounded >= 0x47800000u ? 0x7c00u : (rounded >> 13) - (112u << 10);
  }
  p->bits = static_cast<uint16_t>(sign | half);
}

template <class T>
inline Vec load(const T* p) {
  return each([&](int i) { return to_float(p[i]); });
}
template <class T>
inline void store(T* p, Vec x) {
  for (int i = 0; i < kLanes; i++) from_float(x.v[i], p + i);
}

inline float reduce_add(Vec x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }
inline float reduce_max(Vec x) {
  float m = x.v[0];
  for (int i = 1; i < kLanes; i++) m = m > x.v[i] ? m : x.v[i];
  return m;
}

// Lanes below `first` become `filler`.
inline Vec fill_below(Vec x, int first, float filler) {
  return each([&](int i) { return i < first ? filler : x.v[i]; });
}

// 2^x for x <= 0, to 1e-7; 0 below 2^-126, NaN for NaN.
inline Vec exp2(Vec x) {
  return each([&](int i) {
    if (x.v[i] < -126.f) return 0.f;
    if (x.v[i] != x.v[i]) return x.v[i];
    const float n = std::nearbyint(x.v[i]), f = x.v[i] - n;
    float p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return p * from_bits(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  });
}

// dst[c * dst_stride + r] = src[r * src_stride + c] for 4 x 4 words; moves bits, computes nothing.
inline void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  for (int r = 0; r < kLanes; r++)
    for (int c = 0; c < kLanes; c++)
      std::memcpy(dst + c * dst_stride + r, src + r * src_stride + c, sizeof(float));
}

}  // namespace dustin::DUSTIN_ISA

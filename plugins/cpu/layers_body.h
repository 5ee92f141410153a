// What lies between a layer's matrix products, one row at a time.
#pragma once

#include "math_plain.h"

namespace dustin::DUSTIN_ISA {

// Calls body(first, lanes) over 0 ... count: whole vectors, then the rest.
template <class Body>
inline void each_vector(int count, const Body& body) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, kLanes);
  if (i < count) body(i, count - i);
}

template <class T>
inline Vec load_some(const T* p, int lanes) {
  if (lanes == kLanes) return load(p);
  T rest[kLanes] = {};
  std::memcpy(rest, p, lanes * sizeof(T));
  return load(rest);
}

template <class T>
inline void store_some(T* p, Vec x, int lanes) {
  if (lanes == kLanes) return store(p, x);
  T rest[kLanes];
  store(rest, x);
  std::memcpy(p, rest, lanes * sizeof(T));
}

template <class T>
void rms_norm(const void* px, const void* pw, float eps, int dim, void* pout) {
  const T *x = static_cast<const T*>(px), *w = static_cast<const T*>(pw);
  T* out = static_cast<T*>(pout);
  Vec squares = zero();
  each_vector(dim, [&](int i, int lanes) {
    const Vec v = load_some(x + i, lanes);
    squares = fma(v, v, squares);
  });
  const Vec scale = splat(1.f / std::sqrt(reduce_add(squares) / dim + eps));
  each_vector(dim, [&](int i, int lanes) {
    store_some(out + i, load_some(x + i, lanes) * scale * load_some(w + i, lanes), lanes);
  });
}

template <class T>
void rotate(void* px, const void* pcos, const void* psin, int dim) {
  T* x = static_cast<T*>(px);
  const T *c = static_cast<const T*>(pcos), *s = static_cast<const T*>(psin);
  const int half = dim / 2;
  each_vector(half, [&](int i, int lanes) {
    const Vec a = load_some(x + i, lanes), b = load_some(x + half + i, lanes);
    const Vec low = a * load_some(c + i, lanes) - b * load_some(s + i, lanes);
    const Vec high = b * load_some(c + half + i, lanes) + a * load_some(s + half + i, lanes);
    store_some(x + i, low, lanes);
    store_some(x + half + i, high, lanes);
  });
}

template <class T>
void silu_mul(const void* px, int dim, void* pout) {
  const T* x = static_cast<const T*>(px);
  T* out = static_cast<T*>(pout);
  const Vec log2e = splat(kLog2E), one = splat(1.f);
  each_vector(dim, [&](int i, int lanes) {
    const Vec v = load_some(x + i, lanes), minus = zero() - v;
    // sigmoid(v) = e^min(v, 0) / (1 + e^-|v|): nothing overflows.
    const Vec sigmoid = exp2((zero() - max(zero(), minus)) * log2e) /
                        (one + exp2((zero() - max(minus, v)) * log2e));
    store_some(out + i, v * sigmoid * load_some(x + dim + i, lanes), lanes);
  });
}

}  // namespace dustin::DUSTIN_ISA

// Products in fp32 on any vector unit. Keys and values are brought to fp32 a block at a time: a
// block stays in the first- or second-level cache, and the loads that miss are long and many.
#pragma once

#include <algorithm>

#include "pool.h"
#include "tasks.h"

namespace dustin::DUSTIN_ISA {

// `count` elements to fp32, and zeros up to a multiple of kLanes.
template <class T>
inline void load_row(const T* src, int count, float* dst) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(dst + i, load(src + i));
  if (i < count) {
    T rest[kLanes] = {};
    std::memcpy(rest, src + i, (count - i) * sizeof(T));
    store(dst + i, load(rest));
  }
}

// The reverse, times `factor`; nothing past `count` is written.
template <class T>
inline void store_row(const float* src, float factor, int count, void* out) {
  T* dst = static_cast<T*>(out);
  const Vec f = splat(factor);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(dst + i, load(src + i) * f);
  if (i < count) {
    T rest[kLanes];
    store(rest, load(src + i) * f);
    std::memcpy(dst + i, rest, (count - i) * sizeof(T));
  }
}

// Rows that will be read next, fetched a few cache lines at a time: a core has some 16 misses in
// flight and stands still at the next one, so that a burst would leave nothing to overlap with.
class Ahead {
 public:
  explicit Ahead(size_t row_bytes) : lines_a_row_(static_cast<int>((row_bytes + 63) / 64)) {}

  // The keys at `places`, elements of `size` bytes, and their values unless null.
  void aim(const void* keys, const void* values, size_t size, const int64_t* places, int count) {
    base_[0] = static_cast<const char*>(keys);
    base_[1] = static_cast<const char*>(values);
    size_ = static_cast<int64_t>(size);
    places_ = places;
    rows_a_place_ = values ? 2 : 1;
    rows_ = count * rows_a_place_;
    left_ = rows_ * lines_a_row_;
    if (left_ > 0) start_row();
  }

  // The steps to come fetch this share of what is left.
  void share(float part) { share_ = static_cast<int>(part * left_); }

  // One of `steps` equal steps.
  void step(int steps) {
    due_ += share_;
    if (due_ < steps) return;
    fetch(due_ / steps);
    due_ %= steps;
  }

  // All that is left.
  void rest() { fetch(left_); }

 private:
  void start_row() {
    line_ = base_[row_ % rows_a_place_] + places_[row_ / rows_a_place_] * size_;
    lines_ = lines_a_row_;
  }

  void fetch(int lines) {
    lines = std::min(lines, left_);
    left_ -= lines;
    for (; lines > 0; lines--) {
      __builtin_prefetch(line_, 0, 2);
      line_ += 64;
      if (--lines_ == 0 && ++row_ < rows_) start_row();
    }
  }

  const char* base_[2] = {};
  const int64_t* places_ = nullptr;
  const char* line_ = nullptr;
  int64_t size_ = 0;
  const int lines_a_row_;
  int rows_a_place_ = 1, rows_ = 0, row_ = 0, lines_ = 0;
  int left_ = 0, share_ = 0, due_ = 0;  // lines
};

// How a step multiplies and adds: fp32 numbers here, bfloat16 pairs in math_bf16.h. The loops around
// it are inlined always: called with every size in a register they were up to 5 % slower.
struct Singles {
  static Vec madd(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
};

// s[key * mp + row] = k[key] . q[row] for NK keys and NV vectors of rows.
template <class Product, int NV, int NK>
[[gnu::always_inline]] inline void dots(const float* q, int mp, const float* k, int k_stride,
                                        int words, float* s) {
  Vec acc[NK][NV];
  for (int i = 0; i < NK; i++)
    for (int v = 0; v < NV; v++) acc[i][v] = zero();
  for (int c = 0; c < words; c++) {
    Vec x[NV];
    for (int v = 0; v < NV; v++) x[v] = load(q + c * mp + v * kLanes);
    for (int i = 0; i < NK; i++) {
      const Vec y = splat(k[i * k_stride + c]);
      for (int v = 0; v < NV; v++) acc[i][v] = Product::madd(y, x[v], acc[i][v]);
    }
  }
  for (int i = 0; i < NK; i++)
    for (int v = 0; v < NV; v++) store(s + i * mp + v * kLanes, acc[i][v]);
}

template <class Product, int NV, int NK>
[[gnu::always_inline]] inline void eight_dots(const float* q, int mp, const float* k, int k_stride,
                                              int words, float* s) {
  for (int j = 0; j < 8; j += NK)
    dots<Product, NV, NK>(q, mp, k + j * k_stride, k_stride, words, s + j * mp);
}

// s[j * mp + r] for all keys and rows, and nonsense in what rounds `keys` up to a multiple of 8.
// Fetches what comes next as it goes.
template <class Product>
inline void all_dots(const float* q, int mp, const float* k, int k_stride, int words, int keys,
                     float* s, Ahead& ahead) {
  for (int j = 0; j < keys; j += 8, k += 8 * k_stride, s += 8 * mp) {
    ahead.step((keys + 7) / 8);
    int r = 0;
    for (; r + 3 * kLanes <= mp; r += 3 * kLanes)
      eight_dots<Product, 3, 4>(q + r, mp, k, k_stride, words, s + r);
    if (r + 2 * kLanes <= mp) {
      eight_dots<Product, 2, 4>(q + r, mp, k, k_stride, words, s + r);
      r += 2 * kLanes;
    }
    if (r < mp) eight_dots<Product, 1, 8>(q + r, mp, k, k_stride, words, s + r);
  }
}

// Rows i of o = o * alpha[i] + sum over keys j of p[j * mp + i] * v[j], R rows by C vectors.
template <class Product, int R, int C>
[[gnu::always_inline]] inline void accumulate(const float* p, int mp, const float* v, int dp,
                                              int keys, const float* alpha, float* o) {
  Vec acc[R][C];
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) acc[i][c] = load(o + i * dp + c * kLanes) * splat(alpha[i]);
  for (int j = 0; j < keys; j++) {
    Vec x[C];
    for (int c = 0; c < C; c++) x[c] = load(v + j * dp + c * kLanes);
    for (int i = 0; i < R; i++) {
      const Vec w = splat(p[j * mp + i]);
      for (int c = 0; c < C; c++) acc[i][c] = Product::madd(w, x[c], acc[i][c]);
    }
  }
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) store(o + i * dp + c * kLanes, acc[i][c]);
}

// R rows over the whole head; fewer where `rows` says so.
template <class Product, int R>
inline void accumulate_rows(int rows, const float* p, int mp, const float* v, int dp, int keys,
                            const float* alpha, float* o) {
  if (rows == R) {
    constexpr int C = kLanes == 16 ? 4 : 2;
    int c = 0;
    for (; c + C * kLanes <= dp; c += C * kLanes)
      accumulate<Product, R, C>(p, mp, v + c, dp, keys, alpha, o + c);
    for (; c < dp; c += kLanes) accumulate<Product, R, 1>(p, mp, v + c, dp, keys, alpha, o + c);
  } else if constexpr (R > 1) {
    accumulate_rows<Product, R - 1>(rows, p, mp, v, dp, keys, alpha, o);
  }
}

// The same for all rows. Fetches what comes next as it goes.
template <class Product>
inline void accumulate_all(int rows, const float* p, int mp, const float* v, int dp, int keys,
                           const float* alpha, float* o, Ahead& ahead) {
  constexpr int R = 6;
  for (int r = 0; r < rows; r += R) {
    if (r + R <= rows) ahead.step(rows / R);
    accumulate_rows<Product, R>(std::min(R, rows - r), p + r, mp, v, dp, keys, alpha + r,
                                o + r * dp);
  }
}

template <class T>
class PlainMath {
 public:
  using Element = T;
  static constexpr int kBlock = 64;  // keys
  static constexpr int kMostKeys = kBlock + 16;
  static constexpr int kRowPad = kLanes;

  PlainMath(Arena& arena, int mp, int dim)
      : mp_(mp),
        dim_(dim),
        dp_(round_up(dim, kLanes)),
        qt_(arena.take<float>(static_cast<size_t>(dp_) * mp)),
        k_(arena.take<float>(static_cast<size_t>(kMostKeys) * dp_)),
        v_(arena.take<float>(static_cast<size_t>(kMostKeys) * dp_)) {}

  static size_t room(int mp, int dim) {
    const size_t dp = round_up(dim, kLanes);
    return Arena::room<float>(dp * mp) + 2 * Arena::room<float>(kMostKeys * dp);
  }

  // Query r lies at row(r), for r < rows; the others, up to mp, are zeros.
  template <class Row>
  void take_queries(int rows, const Row& row) {
    float* block = k_;  // free until the first keys come
    for (int r0 = 0; r0 < mp_; r0 += kLanes) {
      for (int r = 0; r < kLanes; r++) {
        if (r0 + r < rows)
          load_row(static_cast<const T*>(row(r0 + r)), dim_, block + r * dp_);
        else
          std::fill_n(block + r * dp_, dp_, 0.f);
      }
      for (int c = 0; c < dp_; c += kLanes)
        transpose(block + c, dp_, qt_ + static_cast<int64_t>(c) * mp_ + r0, mp_);
    }
  }

  void stage_key(int j, const void* row) {
    load_row(static_cast<const T*>(row), dim_, k_ + j * dp_);
  }
  // These products need the keys staged; TileMath's do not.
  bool view_keys(const void*, int64_t, int) { return false; }

  // The logits s[j * mp + r]; see all_dots.
  void logits(int keys, float* s, Ahead& ahead) const {
    all_dots<Singles>(qt_, mp_, k_, dp_, dim_, keys, s, ahead);
  }

  // o = o * alpha + p v; p[j * mp + r] are the weights that took the logits' place, value(j) is
  // where key j's value lies.
  template <class Value>
  void add_values(int keys, int rows, const Value& value, const float* p, const float* alpha,
                  float* o, Ahead& ahead) const {
    for (int j = 0; j < keys; j++) load_row(static_cast<const T*>(value(j)), dim_, v_ + j * dp_);
    accumulate_all<Singles>(rows, p, mp_, v_, dp_, keys, alpha, o, ahead);
  }

 private:
  const int mp_, dim_, dp_;  // padded rows, head size, padded head size
  float* const qt_;          // [dp, mp]
  float* const k_;           // [kMostKeys, dp]
  float* const v_;           // [kMostKeys, dp]
};

}  // namespace dustin::DUSTIN_ISA

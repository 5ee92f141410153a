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

// s[key * mp + row] = k[key] . q[row] for NK keys and NV vectors of rows.
template <int NV, int NK>
inline void dots(const float* qt, int mp, const float* k, int dp, int dim, float* s) {
  Vec acc[NK][NV];
  for (int i = 0; i < NK; i++)
    for (int v = 0; v < NV; v++) acc[i][v] = zero();
  for (int c = 0; c < dim; c++) {
    Vec q[NV];
    for (int v = 0; v < NV; v++) q[v] = load(qt + c * mp + v * kLanes);
    for (int i = 0; i < NK; i++) {
      const Vec x = splat(k[i * dp + c]);
      for (int v = 0; v < NV; v++) acc[i][v] = fma(x, q[v], acc[i][v]);
    }
  }
  for (int i = 0; i < NK; i++)
    for (int v = 0; v < NV; v++) store(s + i * mp + v * kLanes, acc[i][v]);
}

// Rows i of o = o * alpha[i] + sum over keys j of p[j * mp + i] * v[j], R rows by C vectors.
template <int R, int C>
inline void accumulate(const float* p, int mp, const float* v, int dp, int keys, const float* alpha,
                       float* o) {
  Vec acc[R][C];
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) acc[i][c] = load(o + i * dp + c * kLanes) * splat(alpha[i]);
  for (int j = 0; j < keys; j++) {
    Vec x[C];
    for (int c = 0; c < C; c++) x[c] = load(v + j * dp + c * kLanes);
    for (int i = 0; i < R; i++) {
      const Vec w = splat(p[j * mp + i]);
      for (int c = 0; c < C; c++) acc[i][c] = fma(w, x[c], acc[i][c]);
    }
  }
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) store(o + i * dp + c * kLanes, acc[i][c]);
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

  // s[j * mp + r], and nonsense in what rounds `keys` up to a multiple of 8. Fetches
  // what comes next as it goes.
  void logits(int keys, float* s, Ahead& ahead) const {
    for (int j = 0; j < keys; j += 8) {
      ahead.step((keys + 7) / 8);
      const float* k = k_ + j * dp_;
      float* d = s + j * mp_;
      int r = 0;
      for (; r + 3 * kLanes <= mp_; r += 3 * kLanes) eight_keys<3, 4>(k, r, d);
      if (r + 2 * kLanes <= mp_) eight_keys<2, 4>(k, r, d), r += 2 * kLanes;
      if (r < mp_) eight_keys<1, 8>(k, r, d);
    }
  }

  // o = o * alpha + p v; p[j * mp + r] are the weights that took the logits' place, value(j) is
  // where key j's value lies.
  template <class Value>
  void add_values(int keys, int rows, const Value& value, const float* p, const float* alpha,
                  float* o, Ahead& ahead) const {
    for (int j = 0; j < keys; j++) load_row(static_cast<const T*>(value(j)), dim_, v_ + j * dp_);
    constexpr int R = 6, C = kLanes == 16 ? 4 : 2;
    int r = 0;
    for (; r + R <= rows; r += R) {
      ahead.step(rows / R);
      row_group<R, C>(keys, r, p, alpha, o);
    }
    switch (rows - r) {
      case 5:
        return row_group<5, C>(keys, r, p, alpha, o);
      case 4:
        return row_group<4, C>(keys, r, p, alpha, o);
      case 3:
        return row_group<3, C>(keys, r, p, alpha, o);
      case 2:
        return row_group<2, C>(keys, r, p, alpha, o);
      case 1:
        return row_group<1, C>(keys, r, p, alpha, o);
      default:
        return;
    }
  }

 private:
  template <int NV, int NK>
  void eight_keys(const float* k, int r, float* s) const {
    for (int j = 0; j < 8; j += NK)
      dots<NV, NK>(qt_ + r, mp_, k + j * dp_, dp_, dim_, s + j * mp_ + r);
  }

  template <int R, int C>
  void row_group(int keys, int r, const float* p, const float* alpha, float* o) const {
    int c = 0;
    for (; c + C * kLanes <= dp_; c += C * kLanes)
      accumulate<R, C>(p + r, mp_, v_ + c, dp_, keys, alpha + r, o + r * dp_ + c);
    for (; c < dp_; c += kLanes)
      accumulate<R, 1>(p + r, mp_, v_ + c, dp_, keys, alpha + r, o + r * dp_ + c);
  }

  const int mp_, dim_, dp_;  // padded rows, head size, padded head size
  float* const qt_;          // [dp, mp]
  float* const k_;           // [kMostKeys, dp]
  float* const v_;           // [kMostKeys, dp]
};

}  // namespace dustin::DUSTIN_ISA

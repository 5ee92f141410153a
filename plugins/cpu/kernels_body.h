// The kernels of one instruction set: attention and scoring over a block of keys at a time.
//
// `Math` holds the block and multiplies with it; see PlainMath. Logits lie key by key with the query
// rows in the vector's lanes, so that the softmax of a block needs no sums across lanes.
#pragma once

#include <cfloat>
#include <cmath>
#include <utility>

#include "math_plain.h"

namespace dustin::DUSTIN_ISA {

template <class Math>
class Attention {
  using Element = typename Math::Element;

 public:
  explicit Attention(const AttendTask& task)
      : t_(task),
        mp_(round_up(task.rows, Math::kRowPad)),
        dp_(round_up(task.head_dim, kLanes)),
        row_bytes_(task.head_dim * sizeof(Element)) {}

  // Also fetches the first keys and values of the task that this thread goes on with, if any.
  void run(const AttendTask* following) {
    Arena& arena = task_arena();
    arena.reset(Math::room(mp_, t_.head_dim) + Arena::room<float>(Math::kMostKeys * mp_) +
                Arena::room<float>(mp_));
    Math math(arena, mp_, t_.head_dim);
    s_ = arena.take<float>(Math::kMostKeys * mp_);
    alpha_ = arena.take<float>(mp_);
    math.take_queries(t_.rows, [&](int r) {
      const int row = t_.first_row + r;
      return at(t_.q.data, row / t_.group * t_.q.row_stride + row % t_.group * t_.q.head_stride);
    });
    std::fill_n(t_.out, static_cast<int64_t>(mp_) * dp_, 0.f);
    std::fill_n(t_.max, mp_, -FLT_MAX);
    std::fill_n(t_.sum, mp_, 0.f);

    int64_t places[2][Math::kMostKeys];
    int64_t *here = places[0], *next = places[1];
    int keys = locate(t_, t_.first_key, here);
    for (int first = t_.first_key, next_keys; keys > 0; first += keys, keys = next_keys) {
      next_keys = locate(t_, first + keys, next);
      // What comes next is fetched while this is computed with.
      Ahead ahead(row_bytes_);
      if (next_keys > 0)
        ahead.aim(t_.tokens.k, t_.tokens.v, sizeof(Element), next, next_keys);
      else if (following)
        ahead.aim(following->tokens.k, following->tokens.v, sizeof(Element), next,
                  locate(*following, following->first_key, next));
      if (!evenly_spaced(here, keys) ||
          !math.view_keys(at(t_.tokens.k, here[0]), t_.tokens.token_stride, keys))
        for (int j = 0; j < keys; j++) math.stage_key(j, at(t_.tokens.k, here[j]));
      ahead.share(0.35f);
      math.logits(keys, s_, ahead);
      ahead.share(0.5f);
      weights(first, keys, ahead);
      ahead.share(1.f);
      math.add_values(
          keys, t_.rows, [&](int j) { return at(t_.tokens.v, here[j]); }, s_, alpha_, t_.out,
          ahead);
      ahead.rest();
      std::swap(here, next);
    }
  }

 private:
  static const void* at(const void* base, int64_t elements) {
    return static_cast<const Element*>(base) + elements;
  }

  bool evenly_spaced(const int64_t* places, int keys) const {
    bool even = true;
    for (int j = 1; j < keys; j++) even &= places[j] - places[j - 1] == t_.tokens.token_stride;
    return even;
  }

  // Where the keys of the block from `first` on begin, and how many there are. A short rest joins
  // the block before it.
  static int locate(const AttendTask& t, int first, int64_t* places) {
    const int left = t.last_key - first;
    const int keys = left <= Math::kMostKeys ? std::max(0, left) : Math::kBlock;
    for (int j = 0; j < keys; j++) {
      const int key = first + j;
      const int position = key >= t.history ? t.length + key - t.history
                           : t.indices      ? t.indices[key]
                                            : key;
      places[j] = t.tokens.offset(position);
    }
    return keys;
  }

  // Logits to weights 2^(x - max), and what the earlier blocks' sums must be multiplied with.
  void weights(int first, int keys, Ahead& ahead) const {
    const Vec scale = splat(t_.scale * kLog2E);
    const int seen_by_all = std::max(0, std::min(keys, t_.history - first));
    for (int v = 0; v < mp_; v += kLanes) {
      const Vec before = load(t_.max + v);
      Vec top = before;
      for (int j = 0; j < keys; j++) {
        Vec x = load(s_ + j * mp_ + v) * scale;
        if (j >= seen_by_all)  // a new token: earlier ones do not see it
          x = fill_below(x, (first + j - t_.history) * t_.group - t_.first_row - v, -INFINITY);
        store(s_ + j * mp_ + v, x);
        top = max(x, top);
      }
      Vec sum = zero();
      for (int j = 0; j < keys; j++) {
        ahead.step(keys * (mp_ / kLanes));
        const Vec p = exp2(load(s_ + j * mp_ + v) - top);
        store(s_ + j * mp_ + v, p);
        sum = sum + p;
      }
      const Vec alpha = exp2(before - top);
      store(alpha_ + v, alpha);
      store(t_.max + v, top);
      store(t_.sum + v, fma(load(t_.sum + v), alpha, sum));
    }
  }

  const AttendTask& t_;
  const int mp_, dp_;
  const size_t row_bytes_;
  float* s_ = nullptr;      // [kMostKeys, mp]
  float* alpha_ = nullptr;  // [mp]
};

template <class Math>
void attend(const AttendTask& task, const AttendTask* following) {
  Attention<Math>(task).run(following);
}

template <class Math>
void score(const ScoreTask& t) {
  const int mp = round_up(t.rows, Math::kRowPad);
  const size_t row_bytes = t.head_dim * sizeof(typename Math::Element);
  Arena& arena = task_arena();
  arena.reset(Math::room(mp, t.head_dim) + Arena::room<float>(Math::kBlock * mp) +
              Arena::room<float>(kLanes * kLanes));
  Math math(arena, mp, t.head_dim);
  float* s = arena.take<float>(Math::kBlock * mp);
  float* corner = arena.take<float>(kLanes * kLanes);
  math.take_queries(t.rows, [&](int r) { return t.queries[r]; });
  const auto key = [&](int position) {
    return static_cast<const typename Math::Element*>(t.tokens.k) + t.tokens.offset(position);
  };

  const int keys = t.last_key - t.first_key;
  for (int first = 0; first < keys; first += Math::kBlock) {
    const int block = std::min(Math::kBlock, keys - first);
    const int position = t.first_key + first;
    const bool one_page =
        position / t.tokens.page_size == (position + block - 1) / t.tokens.page_size;
    if (!one_page || !math.view_keys(key(position), t.tokens.token_stride, block))
      for (int j = 0; j < block; j++) math.stage_key(j, key(position + j));
    const int next = std::min(Math::kBlock, keys - first - block);
    int64_t places[Math::kBlock];
    for (int j = 0; j < next; j++) places[j] = t.tokens.offset(position + block + j);
    Ahead ahead(row_bytes);
    ahead.aim(t.tokens.k, nullptr, sizeof(typename Math::Element), places, next);
    ahead.share(1.f);
    math.logits(block, s, ahead);
    ahead.rest();
    for (int r = 0; r < t.rows; r += kLanes) {
      const int rows = std::min(kLanes, t.rows - r);
      for (int j = 0; j < block; j += kLanes) {
        float* place = t.weights + r * t.stride + first + j;
        if (rows == kLanes) {
          transpose(s + j * mp + r, mp, place, t.stride);
        } else {
          transpose(s + j * mp + r, mp, corner, kLanes);
          for (int i = 0; i < rows; i++) store(place + i * t.stride, load(corner + i * kLanes));
        }
      }
    }
  }
  const Vec scale = splat(t.scale * kLog2E);
  const int padded = round_up(keys, kLanes);
  for (int r = 0; r < t.rows; r++) {
    float* w = t.weights + r * t.stride;
    std::fill(w + keys, w + padded, 0.f);
    Vec top = splat(-FLT_MAX);
    for (int j = 0; j < padded; j += kLanes) {
      const Vec x = load(w + j) * scale;
      store(w + j, x);
      if (j + kLanes <= keys) top = max(x, top);
    }
    for (int j = keys / kLanes * kLanes; j < keys; j++) top = max(splat(w[j]), top);
    std::fill(w + keys, w + padded, -INFINITY);
    t.max[r] = reduce_max(top);
    const Vec m = splat(t.max[r]);
    Vec sum = zero();
    for (int j = 0; j < padded; j += kLanes) {
      const Vec p = exp2(load(w + j) - m);
      store(w + j, p);
      sum = sum + p;
    }
    t.sum[r] = reduce_add(sum);
  }
}

inline void merge(float* dst, float a, const float* src, float b, int count) {
  const Vec va = splat(a), vb = splat(b);
  for (int i = 0; i < count; i += kLanes)
    store(dst + i, fma(load(src + i), vb, load(dst + i) * va));
}

inline void weigh(const float* weights, int64_t stride, const float* factors, int rows, int count,
                  float* scores) {
  int j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    Vec sum = load(scores + j);
    for (int r = 0; r < rows; r++)
      sum = fma(load(weights + r * stride + j), splat(factors[r]), sum);
    store(scores + j, sum);
  }
  for (; j < count; j++)
    for (int r = 0; r < rows; r++) scores[j] += weights[r * stride + j] * factors[r];
}

}  // namespace dustin::DUSTIN_ISA

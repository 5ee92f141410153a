// srh_score in two kernels. The first reads the keys, once for all query rows of a KV head, keeps
// their logits and the maximum and sum of every chunk of keys. The second joins the chunks' maxima
// and sums and adds up the weights.
//
// Keys go from memory straight into tensor core fragments: a product does not change when the
// dimensions of both sides are permuted alike, so a lane takes 8 consecutive elements of a key, two
// pairs for one step of 16 dimensions and two for the next, and the queries are read the same way.
#pragma once

#include "cache.cuh"

namespace dustin::cuda {

inline constexpr int kKeysAChunk = 512;
inline constexpr int kScoreThreads = 256;
inline constexpr int kScoreWarps = kScoreThreads / 32;
inline constexpr int kKeysAnAddBlock = 1024;

struct SrhScoreParams {
  DustinKvCache cache;
  DustinRows queries;
  float* scores;
  int64_t scores_stride;
  float* logits;  // [B, P * R, width], by KV head, times log2(e)
  float2* stats;  // [B, P * R, chunks]: maximum, and sum of the weights below it
  int64_t width;  // a multiple of 4
  int32_t scores_width;
  int32_t chunks;
  int32_t rows;                                     // R
  int32_t query_heads;                              // P
  int32_t groups;                                   // KV heads that are read
  float scale;                                      // times log2(e)
  uint8_t columns[DUSTIN_CUDA_MAX_SCORED_HEADS];    // the P query heads, by KV head
  uint8_t first[DUSTIN_CUDA_MAX_SCORED_HEADS + 1];  // where a group's columns begin
  uint16_t kv_heads[DUSTIN_CUDA_MAX_SCORED_HEADS];  // of the groups
};

// 16-byte pieces of a query row in shared memory: 4 modulo 8, so that the lanes of a load, two rows
// of four pieces at a time, touch every bank once.
template <int D>
inline constexpr int kQueryPieces = (D / 8 + 3) / 8 * 8 + 4;

template <int D>
DUSTIN_HOST_DEVICE int64_t score_shared_bytes(int64_t rows) {
  return (rows + 7) / 8 * 8 * kQueryPieces<D> * 16;
}

// 16 keys as fragments: key g and key g + 8 of a lane, 16 bytes of every 32 dimensions and, where
// they are left over, 8 of the last 16.
template <int D>
struct KeyFragments {
  uint4 low[D / 32], high[D / 32];
  uint2 low_rest, high_rest;

  // Keys first + g and first + 8 + g; zeros past the last one.
  DUSTIN_DEVICE void load(const uint16_t* keys, const TokenPlaces& places, int first, int length) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int a = first + g, b = first + 8 + g;
    load(low, low_rest, a < length ? keys + places.offset(a, places.page(a)) : nullptr, t);
    load(high, high_rest, b < length ? keys + places.offset(b, places.page(b)) : nullptr, t);
  }

 private:
  static DUSTIN_DEVICE void load(uint4 (&to)[D / 32], uint2& rest, const uint16_t* key, int t) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i)
      to[i] = key ? load_once(reinterpret_cast<const uint4*>(key) + 4 * i + t) : uint4{0, 0, 0, 0};
    if constexpr (D % 32 != 0)
      rest = key ? load_once(reinterpret_cast<const uint2*>(key + D / 32 * 32) + t) : uint2{0, 0};
  }
};

template <class T, int D>
DUSTIN_KERNEL(kScoreThreads, D <= 128 ? 2 : 1)
srh_logits_kernel(const DUSTIN_GRID_CONSTANT SrhScoreParams p) {
  const int chunk = blockIdx.x, group = blockIdx.y, b = blockIdx.z;
  const int length = p.cache.lengths[b];
  DUSTIN_ASSERT(length <= p.scores_width);
  const int begin = chunk * kKeysAChunk, end = min(length, begin + kKeysAChunk);
  if (begin >= end) return;
  const int lane = threadIdx.x % 32, warp = warp_of_block(), g = lane / 4, t = lane % 4;
  const int first_column = p.first[group], columns = p.first[group + 1] - first_column;
  const int rows = columns * p.rows, padded = (rows + 7) / 8 * 8;

  // Row r is query row r / columns of the group's head r % columns.
  uint32_t* const queries = reinterpret_cast<uint32_t*>(shared_memory());
  constexpr int kWords = kQueryPieces<D> * 4;
  for (int i = threadIdx.x; i < padded * (D / 2); i += kScoreThreads) {
    const int row = i / (D / 2), word = i % (D / 2);
    uint32_t x = 0;
    if (row < rows)
      x = load_word(row_of(p.queries, b, row / columns, p.columns[first_column + row % columns]) +
                    2 * word);
    queries[row * kWords + word] = x;
  }
  const TokenPlaces places(p.cache, b);
  const uint16_t* const keys = head_of(p.cache.k, p.cache, p.kv_heads[group]);
  int first = begin + warp * 16;
  KeyFragments<D> key;
  key.load(keys, places, first, end);
  __syncthreads();

  float* const logits = p.logits + (int64_t{b} * p.query_heads + first_column) * p.rows * p.width;
  for (; first < end; first += kScoreWarps * 16) {
    KeyFragments<D> next;
    next.load(keys, places, first + kScoreWarps * 16, end);
    for (int tile = 0; tile < padded; tile += 8) {
      const uint32_t* const query = queries + (tile + g) * kWords;
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const uint4 q = reinterpret_cast<const uint4*>(query)[4 * i + t];
        multiply_add<T>(c, key.low[i].x, key.high[i].x, key.low[i].y, key.high[i].y, q.x, q.y);
        multiply_add<T>(c, key.low[i].z, key.high[i].z, key.low[i].w, key.high[i].w, q.z, q.w);
      }
      if constexpr (D % 32 != 0) {
        const uint2 q = reinterpret_cast<const uint2*>(query + D / 32 * 16)[t];
        multiply_add<T>(c, key.low_rest.x, key.high_rest.x, key.low_rest.y, key.high_rest.y, q.x,
                        q.y);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = first + g + 8 * (i / 2), row = tile + 2 * t + i % 2;
        if (j < end && row < rows) logits[row * p.width + j] = c[i] * p.scale;
      }
    }
    key = next;
  }
  __syncthreads();

  float2* const stats = p.stats + (int64_t{b} * p.query_heads + first_column) * p.rows * p.chunks;
  for (int row = warp; row < rows; row += kScoreWarps) {
    const float* const mine = logits + row * p.width;
    float most = -INFINITY, sum = 0;
    for (int j = begin + lane; j < end; j += 32) most = fmaxf(most, mine[j]);
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, shuffle_xor(most, by));
    for (int j = begin + lane; j < end; j += 32) sum += power_of_2(mine[j] - most);
    for (int by = 16; by > 0; by /= 2) sum += shuffle_xor(sum, by);
    if (lane == 0) stats[int64_t{row} * p.chunks + chunk] = make_float2(most, sum);
  }
}

// Adds the weights of 1024 keys of one batch row.
DUSTIN_KERNEL(kScoreThreads, 4)
srh_add_kernel(const DUSTIN_GRID_CONSTANT SrhScoreParams p) {
  const int b = blockIdx.y, lane = threadIdx.x % 32, warp = warp_of_block();
  const int length = p.cache.lengths[b], begin = blockIdx.x * kKeysAnAddBlock;
  if (begin >= length) return;
  const int rows = p.query_heads * p.rows, chunks = (length + kKeysAChunk - 1) / kKeysAChunk;

  // Every row's maximum, and one over its sum.
  float2* const all = reinterpret_cast<float2*>(shared_memory());
  for (int row = warp; row < rows; row += kScoreWarps) {
    const float2* const stats = p.stats + (int64_t{b} * rows + row) * p.chunks;
    float most = -INFINITY, sum = 0;
    for (int chunk = lane; chunk < chunks; chunk += 32) most = fmaxf(most, stats[chunk].x);
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, shuffle_xor(most, by));
    for (int chunk = lane; chunk < chunks; chunk += 32)
      sum += stats[chunk].y * power_of_2(stats[chunk].x - most);
    for (int by = 16; by > 0; by /= 2) sum += shuffle_xor(sum, by);
    if (lane == 0) all[row] = make_float2(most, reciprocal(sum));
  }
  __syncthreads();

  const float* const logits = p.logits + int64_t{b} * rows * p.width;
  float* const scores = p.scores + b * p.scores_stride;
  // Four keys a thread: adjacent threads read adjacent ones.
#pragma unroll
  for (int i = 0; i < kKeysAnAddBlock / kScoreThreads; ++i) {
    const int j = begin + i * kScoreThreads + static_cast<int>(threadIdx.x);
    if (j >= length) continue;
    float sum = 0;
    for (int row = 0; row < rows; ++row)
      sum += power_of_2(logits[row * p.width + j] - all[row].x) * all[row].y;
    scores[j] += sum;
  }
}

}  // namespace dustin::cuda

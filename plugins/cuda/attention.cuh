// Attention of w queries a row over a list of tokens, on tensor cores: sparse_attention and
// dense_attention alike, which is what makes reading everything through a list and reading densely
// the same to the bit.
//
// The w x G query rows that read one KV head are one matrix. A block takes up to Shape::kRows of
// them and a part of the row's keys. It streams keys and values through shared memory, a few tiles
// ahead, and its warps share the work both ways: kRowWarps ways over query rows, kKeyWarps ways over
// a tile's keys. Each warp keeps its own running maximum (flash attention, arXiv 2205.14135); the
// warps are joined at the end in a fixed order. Rows with many keys are cut into parts
// (flash-decoding), joined by a second kernel, again in a fixed order. How many parts there are is a
// function of the row's own number of keys, so that neither neighbours nor the machine move a bit.
#pragma once

#include "cache.cuh"
#include "device.cuh"
#include "dustin/kernels.h"

namespace dustin::cuda {

// Keys of one block's part, at least; as many for a query row that parts' results stay an eighth of
// the keys and values read; and the most parts of a row.
inline constexpr int kKeysAPart = 1024;
inline constexpr int kKeysAPartAQueryRow = 8;
inline constexpr int kMaxParts = 32;
inline constexpr int kMaxStages = 4;

// How a block's work is cut. The accumulators of a warp are kRowTiles x D / 2 registers a lane and
// its queries half as many, so 255 registers hold two row tiles up to D = 128, one above.
template <int kHeadDim, int kTiles, int kRowWays, int kKeyWays, int kStages>
struct AttentionShape {
  static constexpr int kDim = kHeadDim;
  static constexpr int kRowTiles = kTiles;  // of 16 rows, a warp
  static constexpr int kRowWarps = kRowWays;
  static constexpr int kKeyWarps = kKeyWays;
  static constexpr int kWarps = kRowWarps * kKeyWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kRowTiles * kRowWarps;
  static constexpr int kKeys = 16 * kKeyWarps;  // a tile
  static constexpr int kWantedStages = kStages;
  // 16 bytes more than a row: eight rows then lie in eight different groups of banks.
  static constexpr int kPitch = kDim + 8;
  static constexpr int kTileElements = kKeys * kPitch;
  static constexpr int kStageBytes = 2 * kTileElements * 2;
  static constexpr int kOffsetBytes = kMaxStages * kKeys * 8;
  // Words of one warp's results, joined through the memory of the stages.
  static constexpr int kResultWords = 32 * kRowTiles * (kDim / 2 + 4);
  static constexpr int kJoinBytes = kKeyWarps / 2 * kRowWarps * kResultWords * 4;

  static constexpr int64_t shared_bytes(int stages) {
    const int64_t staged = int64_t{stages} * kStageBytes;
    return (staged > kJoinBytes ? staged : kJoinBytes) + kOffsetBytes;
  }
};

// Up to 16 rows: plain decoding. Small blocks, so that several share a multiprocessor.
template <int D>
using FewRows = AttentionShape<D, 1, 1, D <= 128 ? 4 : 2, 3>;
// Up to 64 rows: a verification window.
template <int D>
using WindowRows = AttentionShape<D, D <= 128 ? 2 : 1, D <= 128 ? 2 : 4, D <= 128 ? 4 : 2, 4>;
// 128 rows and more: prefill.
template <int D>
using ManyRows = AttentionShape<D, D <= 128 ? 2 : 1, D <= 128 ? 4 : 8, D <= 128 ? 2 : 1, 4>;

struct AttentionParams {
  DustinKvCache cache;
  DustinRows q, out;
  float* lse;
  const int32_t* indices;  // null for dense attention
  const int32_t* counts;
  int64_t indices_stride;
  float* partial;  // [B, Hkv, parts, rows x G, D], null where one part holds everything
  float2* stats;   // [B, Hkv, parts, rows x G]: maximum and sum of the weights
  int32_t rows;    // w
  int32_t heads;
  int32_t group;
  int32_t max_parts;
  int32_t stages;
  float scale;  // times log2(e): exponentials are powers of two
};

// Parts that a row of `keys` keys is cut into for `query_rows` = w x G rows.
// In 32 bits, where a division takes no function call: keys are less than 2^31.
DUSTIN_HOST_DEVICE int parts_of(uint32_t keys, uint32_t query_rows) {
  constexpr uint32_t kMostRows = (1u << 30) / kKeysAPartAQueryRow;
  const uint32_t least = (query_rows < kMostRows ? query_rows : kMostRows) * kKeysAPartAQueryRow;
  const uint32_t a_part = least > kKeysAPart ? least : kKeysAPart;
  const uint32_t parts = (keys + a_part - 1) / a_part;
  return parts < 1 ? 1 : parts > kMaxParts ? kMaxParts : static_cast<int>(parts);
}

// What one row of the batch reads: history tokens, listed or all of them, and then the new ones.
struct Reading {
  const int32_t* list;  // null: all of the history
  int length, count, keys, parts;
  int keys_a_part;  // a multiple of 64, and so of every tile

  DUSTIN_DEVICE Reading(const AttentionParams& p, int b) {
    length = p.cache.lengths[b];
    count = p.counts ? p.counts[b] : length;
    list = p.counts && count != length ? p.indices + b * p.indices_stride : nullptr;
    keys = count + p.rows;
    parts = parts_of(keys, p.rows * p.group);
    keys_a_part = ((keys + parts - 1) / parts + 63) / 64 * 64;
    DUSTIN_ASSERT(length >= 0 && count >= 0 && count <= length);
    DUSTIN_ASSERT(parts <= p.max_parts);
  }
  DUSTIN_DEVICE int token(int j) const {
    if (j >= count) return length + (j - count);
    const int t = list ? list[j] : j;
    DUSTIN_ASSERT(t >= 0 && t < length);
    return t;
  }
};

template <class Shape>
struct WarpResult {
  float out[Shape::kRowTiles][Shape::kDim / 8][4];
  float most[Shape::kRowTiles][2];
  float sum[Shape::kRowTiles][2];  // of this lane's columns
};

template <class Shape>
DUSTIN_DEVICE void give(const WarpResult<Shape>& result, float* place) {
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half, place += 64) {
      place[0] = result.most[i][half];
      place[32] = result.sum[i][half];
    }
#pragma unroll
    for (int j = 0; j < Shape::kDim / 8; ++j)
#pragma unroll
      for (int x = 0; x < 4; ++x, place += 32) *place = result.out[i][j][x];
  }
}

template <class Shape>
DUSTIN_DEVICE void take(WarpResult<Shape>& result, const float* place) {
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    float mine[2], other[2];
#pragma unroll
    for (int half = 0; half < 2; ++half, place += 64) {
      const float most = fmaxf(result.most[i][half], place[0]);
      const float base = most == -INFINITY ? 0.f : most;
      mine[half] = power_of_2(result.most[i][half] - base);
      other[half] = power_of_2(place[0] - base);
      result.most[i][half] = most;
      result.sum[i][half] = result.sum[i][half] * mine[half] + place[32] * other[half];
    }
#pragma unroll
    for (int j = 0; j < Shape::kDim / 8; ++j)
#pragma unroll
      for (int x = 0; x < 4; ++x, place += 32) {
        float& out = result.out[i][j][x];
        out = out * mine[x / 2] + *place * other[x / 2];
      }
  }
}

// Natural logarithm of sum x 2^most.
DUSTIN_DEVICE float log_sum(float most, float sum) {
  constexpr float kLn2 = 0.693147180559945f;
  return (most + log2f(sum)) * kLn2;
}

// Blocks that share a multiprocessor of compute capability 9.0 and 10.0: where a block has few rows,
// as many as its shared memory leaves room for; registers must suffice.
template <class Shape>
inline constexpr int kBlocks =
    Shape::kRows > 16 ? 1 : (228 << 10) / (Shape::shared_bytes(Shape::kWantedStages) + 1024);

template <class T, class Shape>
DUSTIN_KERNEL(Shape::kThreads, kBlocks<Shape>)
attention_kernel(const DUSTIN_GRID_CONSTANT AttentionParams p) {
  constexpr int kDim = Shape::kDim, kTiles = Shape::kRowTiles, kSteps = kDim / 16;
  const int b = blockIdx.z, kv_head = blockIdx.y;
  const int part = blockIdx.x % p.max_parts, row_block = blockIdx.x / p.max_parts;
  const int thread = threadIdx.x, lane = thread % 32, warp = warp_of_block();
  const int row_warp = warp % Shape::kRowWarps, key_warp = warp / Shape::kRowWarps;
  const int g = lane / 4, t = lane % 4;

  const Reading reading(p, b);
  if (part >= reading.parts) return;
  const int all_rows = p.rows * p.group;
  const int first_row = row_block * Shape::kRows + row_warp * 16 * kTiles;  // of this warp
  const int last_row = min(all_rows, (row_block + 1) * Shape::kRows) - 1;   // of the block
  const int first = part * reading.keys_a_part;
  const int last =
      min(min(first + reading.keys_a_part, reading.keys), reading.count + last_row / p.group + 1);
  const int tiles = last > first ? (last - first + Shape::kKeys - 1) / Shape::kKeys : 0;

  int64_t* const offsets = reinterpret_cast<int64_t*>(shared_memory());
  uint16_t* const staged = reinterpret_cast<uint16_t*>(shared_memory() + Shape::kOffsetBytes);

  // Where keys lie is found two tiles ahead of copying them, one dependent load a tile: index list
  // first, page table next. Nothing waits for either.
  const TokenPlaces places(p.cache, b);
  const auto token_of = [&](int key) {  // of this part
    return first + key < last ? reading.token(first + key) : -1;
  };
  const bool finds = thread < Shape::kKeys;
  const auto remember = [&](int key, int token, int page) {
    offsets[key % (kMaxStages * Shape::kKeys)] = token < 0 ? -1 : places.offset(token, page);
  };

  const uint16_t* const keys = head_of(p.cache.k, p.cache, kv_head);
  const uint16_t* const values = head_of(p.cache.v, p.cache, kv_head);
  const auto copy_tile = [&](int tile, int stage) {
    uint16_t* const to = staged + stage * 2 * Shape::kTileElements;
    constexpr int kChunks = kDim / 8;
    [[maybe_unused]] constexpr int kAtOnce =
        kTiles * kDim <= 128 ? 8 : 2;  // accumulators leave few registers
#pragma unroll kAtOnce
    for (int i = thread; i < Shape::kKeys * kChunks; i += Shape::kThreads) {
      const int key = i / kChunks, column = i % kChunks * 8;
      const int64_t offset = offsets[tile % kMaxStages * Shape::kKeys + key];
      const bool valid = offset >= 0;
      const int64_t from = (valid ? offset : 0) + column;
      copy_async(to + key * Shape::kPitch + column, keys + from, valid);
      copy_async(to + Shape::kTileElements + key * Shape::kPitch + column, values + from, valid);
    }
  };

  for (int key = thread; key < p.stages * Shape::kKeys; key += Shape::kThreads) {
    const int token = token_of(key);
    remember(key, token, places.page(token));
  }
  __syncthreads();
  for (int tile = 0; tile < p.stages - 1; ++tile) {
    if (tile < tiles) copy_tile(tile, tile);
    commit_copies();
  }
  int token = finds ? token_of(p.stages * Shape::kKeys + thread) : -1;

  // This warp's queries, as fragments, for good; rows past the last one repeat it.
  uint32_t query[kTiles][kSteps][4];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first_row + tile * 16 + half * 8 + g, all_rows - 1);
      const uint16_t* const q = row_of(p.q, b, row / p.group, kv_head * p.group + row % p.group);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        query[tile][step][half] = load_word(q + step * 16 + 2 * t);
        query[tile][step][half + 2] = load_word(q + step * 16 + 2 * t + 8);
      }
    }
  const int used_tiles = min(kTiles, (all_rows - first_row + 15) / 16);  // may be negative

  WarpResult<Shape> result;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      result.most[tile][half] = -INFINITY;
      result.sum[tile][half] = 0;
    }
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) result.out[tile][i][j] = 0;
  }

  for (int tile = 0, stage = 0; tile < tiles; ++tile) {
    wait_for_copies(p.stages - 2);
    __syncthreads();  // the tile is there for all, and nobody reads the one before any more
    const int page = places.page(token);
    const int ahead = (tile + p.stages) * Shape::kKeys + thread;
    const int next_token = finds ? token_of(ahead + Shape::kKeys) : -1;
    if (tile + p.stages - 1 < tiles)
      copy_tile(tile + p.stages - 1, stage == 0 ? p.stages - 1 : stage - 1);
    commit_copies();

    const int first_key = first + tile * Shape::kKeys + key_warp * 16;
    const uint16_t* const k =
        staged + stage * 2 * Shape::kTileElements + key_warp * 16 * Shape::kPitch;
    const uint16_t* const v = k + Shape::kTileElements;
    if (first_key < last && used_tiles > 0) {
      float weight[kTiles][2][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) weight[i][0][j] = weight[i][1][j] = 0;
      const uint16_t* const k_row =
          k + (lane % 8 + lane / 16 * 8) * Shape::kPitch + lane / 8 % 2 * 8;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t key[4];
        load_matrices(key, k_row + step * 16);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          if (i < used_tiles) {
            const auto& q = query[i][step];
            multiply_add<T>(weight[i][0], q[0], q[1], q[2], q[3], key[0], key[1]);
            multiply_add<T>(weight[i][1], q[0], q[1], q[2], q[3], key[2], key[3]);
          }
      }

#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) weight[i][j / 4][j % 4] *= p.scale;
      // Among the new tokens a row sees those up to its own.
      if (first_key + 15 > reading.count)
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = min(first_row + i * 16 + half * 8 + g, all_rows - 1);
            const int limit = reading.count + row / p.group - first_key - 2 * t;
#pragma unroll
            for (int j = 0; j < 4; ++j)
              if (j / 2 * 8 + j % 2 > limit) weight[i][j / 2][2 * half + j % 2] = -INFINITY;
          }

      uint32_t packed[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i >= used_tiles) continue;
        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float most = result.most[i][half];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            most = fmaxf(most, weight[i][j / 2][2 * half + j % 2]);
          }
          most = fmaxf(most, shuffle_xor(most, 1));
          most = fmaxf(most, shuffle_xor(most, 2));
          const float base = most == -INFINITY ? 0.f : most;  // no key seen yet
          shrink[half] = power_of_2(result.most[i][half] - base);
          result.most[i][half] = most;
          float sum = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float& w = weight[i][j / 2][2 * half + j % 2];
            w = power_of_2(w - base);
            sum += w;
          }
          result.sum[i][half] = result.sum[i][half] * shrink[half] + sum;
        }
        // After a few tiles the maximum seldom moves.
        if (any_of_warp(shrink[0] != 1.f || shrink[1] != 1.f))
#pragma unroll
          for (int j = 0; j < kDim / 8; ++j)
#pragma unroll
            for (int x = 0; x < 4; ++x) result.out[i][j][x] *= shrink[x / 2];
        packed[i][0] = pack<T>(weight[i][0][0], weight[i][0][1]);
        packed[i][1] = pack<T>(weight[i][0][2], weight[i][0][3]);
        packed[i][2] = pack<T>(weight[i][1][0], weight[i][1][1]);
        packed[i][3] = pack<T>(weight[i][1][2], weight[i][1][3]);
      }

      const uint16_t* const v_row = v + lane % 16 * Shape::kPitch + lane / 16 * 8;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t value[4];
        load_matrices_transposed(value, v_row + step * 16);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          if (i < used_tiles) {
            const auto& w = packed[i];
            multiply_add<T>(result.out[i][2 * step], w[0], w[1], w[2], w[3], value[0], value[1]);
            multiply_add<T>(result.out[i][2 * step + 1], w[0], w[1], w[2], w[3], value[2],
                            value[3]);
          }
      }
    }
    if (finds) remember(ahead, token, page);
    token = next_token;
    stage = stage + 1 < p.stages ? stage + 1 : 0;
  }

  // Join the warps that shared rows, in a fixed order: the upper half hands over to the lower.
  float* const handed = reinterpret_cast<float*>(staged);
#pragma unroll
  for (int ways = Shape::kKeyWarps / 2; ways > 0; ways /= 2) {
    wait_for_copies(0);
    __syncthreads();  // nobody reads tiles, or what was handed over before, any more
    float* const place =
        handed + (key_warp % ways * Shape::kRowWarps + row_warp) * Shape::kResultWords + lane;
    if (key_warp >= ways && key_warp < 2 * ways) give(result, place);
    __syncthreads();
    if (key_warp < ways) take(result, place);
  }
  if (key_warp > 0) return;

  const bool whole = reading.parts == 1;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = result.sum[i][half];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      const float most = result.most[i][half];
      const int row = first_row + i * 16 + half * 8 + g;
      if (row >= all_rows) continue;
      const int query_row = row / p.group, head = kv_head * p.group + row % p.group;
      if (whole) {
        uint16_t* const out = row_of(p.out, b, query_row, head);
        const float scale = reciprocal(sum);
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j)
          store_word(out + j * 8 + 2 * t, pack<T>(result.out[i][j][2 * half] * scale,
                                                  result.out[i][j][2 * half + 1] * scale));
        if (p.lse && t == 0)
          p.lse[(int64_t{b} * p.rows + query_row) * p.heads + head] = log_sum(most, sum);
      } else {
        const int64_t at =
            ((int64_t{b} * p.cache.num_kv_heads + kv_head) * p.max_parts + part) * all_rows + row;
        float2* const out = reinterpret_cast<float2*>(p.partial + at * kDim);
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j)
          out[j * 4 + t] = make_float2(result.out[i][j][2 * half], result.out[i][j][2 * half + 1]);
        if (t == 0) p.stats[at] = make_float2(most, sum);
      }
    }
}

// Joins the parts of rows that were cut: a warp a query row.
template <class T, int D>
DUSTIN_KERNEL(128, 1)
join_parts_kernel(const DUSTIN_GRID_CONSTANT AttentionParams p) {
  const int lane = threadIdx.x % 32, b = blockIdx.y;
  const int all_rows = p.rows * p.group;
  const int at = blockIdx.x * 4 + threadIdx.x / 32;
  const Reading reading(p, b);
  if (at >= all_rows * p.cache.num_kv_heads || reading.parts == 1) return;
  const int kv_head = at / all_rows, row = at % all_rows;
  const int64_t first =
      (int64_t{b} * p.cache.num_kv_heads + kv_head) * p.max_parts * all_rows + row;

  float most = -INFINITY;
  for (int part = 0; part < reading.parts; ++part)
    most = fmaxf(most, p.stats[first + int64_t{part} * all_rows].x);
  // Every row sees at least its own token, so `most` is finite, unless logits are not.
  constexpr int kPairs = (D / 2 + 31) / 32;  // of columns a lane
  float2 out[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) out[i] = make_float2(0, 0);
  float sum = 0;
  for (int part = 0; part < reading.parts; ++part) {
    const int64_t from = first + int64_t{part} * all_rows;
    const float2 stats = p.stats[from];
    const float weight = power_of_2(stats.x - most);
    sum += weight * stats.y;
    const float2* const partial = reinterpret_cast<const float2*>(p.partial + from * D);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      if (lane + 32 * i < D / 2) {
        const float2 x = partial[lane + 32 * i];
        out[i].x += weight * x.x;
        out[i].y += weight * x.y;
      }
  }
  const int query_row = row / p.group, head = kv_head * p.group + row % p.group;
  uint16_t* const to = row_of(p.out, b, query_row, head);
  const float scale = reciprocal(sum);
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    if (lane + 32 * i < D / 2)
      store_word(to + 2 * (lane + 32 * i), pack<T>(out[i].x * scale, out[i].y * scale));
  if (p.lse && lane == 0)
    p.lse[(int64_t{b} * p.rows + query_row) * p.heads + head] = log_sum(most, sum);
}

}  // namespace dustin::cuda

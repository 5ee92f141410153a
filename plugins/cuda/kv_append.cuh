// Copies the new keys and values to where the page table says.
#pragma once

#include "cache.cuh"

namespace dustin::cuda {

struct KvAppendParams {
  DustinKvCache cache;
  DustinRows k, v;
  int32_t rows;
};

inline constexpr int kAppendThreads = 256;

// A thread copies two elements of a key and of its value; a block a piece of one batch row.
DUSTIN_KERNEL(kAppendThreads, 1)
kv_append_kernel(const DUSTIN_GRID_CONSTANT KvAppendParams p) {
  const DustinKvCache& cache = p.cache;
  // In 32 bits, where a division takes no function call: the launch refuses more words.
  const uint32_t words = cache.head_dim / 2, heads = cache.num_kv_heads;
  const uint32_t i = blockIdx.x * kAppendThreads + threadIdx.x;
  if (i >= p.rows * heads * words) return;
  const int b = blockIdx.y;
  const int column = static_cast<int>(i % words) * 2;
  const int head = static_cast<int>(i / words % heads);
  const int row = static_cast<int>(i / words / heads);
  const int token = cache.lengths[b] + row;
  const TokenPlaces places(cache, b);
  const int64_t to = places.offset(token, places.page(token)) + column;
  store_word(head_of(cache.k, cache, head) + to, load_word(row_of(p.k, b, row, head) + column));
  store_word(head_of(cache.v, cache, head) + to, load_word(row_of(p.v, b, row, head) + column));
}

}  // namespace dustin::cuda

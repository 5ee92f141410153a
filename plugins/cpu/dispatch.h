// What the ops share: the instruction set in use, checks of what a cache holds.
#pragma once

#include "checks.h"
#include "status.h"
#include "tasks.h"

namespace dustin {

// The instruction set in use.
const Isa& isa();

// Lengths, and the pages of each row's first lengths[b] + new_tokens tokens; the cache's shape and
// pointers have been checked.
void check_history(const DustinKvCache& cache, int new_tokens);

// Bytes of an element.
inline int64_t element_size(int32_t dtype) { return dtype == DUSTIN_FLOAT32 ? 4 : 2; }

inline void* advance(void* base, int64_t elements, int32_t dtype) {
  return static_cast<char*>(base) + elements * element_size(dtype);
}
inline const void* advance(const void* base, int64_t elements, int32_t dtype) {
  return static_cast<const char*>(base) + elements * element_size(dtype);
}

// The tokens of batch row b and KV head h.
inline Tokens tokens_of(const DustinKvCache& cache, int b, int h) {
  const int64_t head = h * cache.head_stride;
  return {advance(cache.k, head, cache.dtype),
          cache.v ? advance(cache.v, head, cache.dtype) : nullptr,
          cache.page_table + b * cache.page_table_stride,
          cache.page_stride,
          cache.token_stride,
          cache.page_size};
}

}  // namespace dustin

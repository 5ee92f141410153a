// Where rows of heads and the tokens of a paged cache lie. Elements are 16 bits wide.
#pragma once

#include "device.cuh"
#include "dustin/kernels.h"

namespace dustin::cuda {

// The D elements of one head of one row.
DUSTIN_DEVICE uint16_t* row_of(const DustinRows& rows, int b, int row, int head) {
  return static_cast<uint16_t*>(rows.data) + b * rows.batch_stride + row * rows.row_stride +
         head * rows.head_stride;
}

DUSTIN_DEVICE uint16_t* head_of(void* data, const DustinKvCache& cache, int kv_head) {
  return static_cast<uint16_t*>(data) + kv_head * cache.head_stride;
}

// Two elements at an even place.
DUSTIN_DEVICE uint32_t load_word(const uint16_t* p) {
  return *reinterpret_cast<const uint32_t*>(p);
}
DUSTIN_DEVICE void store_word(uint16_t* p, uint32_t x) { *reinterpret_cast<uint32_t*>(p) = x; }

// The tokens of one batch row: the page is a load of its own, so that it can be asked for early.
struct TokenPlaces {
  const int32_t* table;
  int64_t page_stride, token_stride;
  uint32_t page_size;
  int max_pages, num_pages;

  DUSTIN_DEVICE TokenPlaces(const DustinKvCache& cache, int b)
      : table(cache.page_table + b * cache.page_table_stride),
        page_stride(cache.page_stride),
        token_stride(cache.token_stride),
        page_size(cache.page_size),
        max_pages(cache.max_pages),
        num_pages(cache.num_pages) {}

  // The page of a token; any where token is -1.
  DUSTIN_DEVICE int page(int token) const {
    if (token < 0) return 0;
    const int number = static_cast<int>(token / page_size);
    DUSTIN_ASSERT(number < max_pages);
    const int page = table[number];
    DUSTIN_ASSERT(page >= 0 && page < num_pages);
    return page;
  }
  // Elements from the head's beginning.
  DUSTIN_DEVICE int64_t offset(int token, int page) const {
    return page * page_stride + token % page_size * token_stride;
  }
};

}  // namespace dustin::cuda

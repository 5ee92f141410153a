// kv_append: copies the new keys and values to where the page table says.
#include <cstring>

#include "dispatch.h"
#include "pool.h"

namespace dustin {
namespace {

void copy_rows(const DustinKvCache& c, const DustinRows& src, void* cache, int b, int w) {
  const size_t bytes = c.head_dim * element_size(c.dtype);
  for (int h = 0; h < c.num_kv_heads; h++) {
    const Tokens tokens = tokens_of(c, b, h);
    for (int i = 0; i < w; i++)
      std::memcpy(advance(cache, h * c.head_stride + tokens.offset(c.lengths[b] + i), c.dtype),
                  advance(src.data, b * src.batch_stride + i * src.row_stride + h * src.head_stride,
                          c.dtype),
                  bytes);
  }
}

}  // namespace
}  // namespace dustin

extern "C" int32_t dustin_cpu_kv_append(const DustinKvAppendParams* params, int32_t threads) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(params, "params");
    const DustinKvCache& c = params->cache;
    refuse_below(threads, 1, "threads");
    if (!check_arguments(*params)) return;
    check_history(c, params->rows);
    // A decoding step's few rows are copied sooner than other threads wake up.
    constexpr int64_t kBytesWorthThreads = 256 << 10;
    const int64_t bytes =
        2 * element_size(c.dtype) * c.batch * params->rows * c.num_kv_heads * c.head_dim;
    parallel_for(c.batch, bytes < kBytesWorthThreads ? 1 : threads, [&](int b) {
      copy_rows(c, params->k, c.k, b, params->rows);
      copy_rows(c, params->v, c.v, b, params->rows);
    });
  });
}

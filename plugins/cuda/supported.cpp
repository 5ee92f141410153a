#include "supported.h"

#include <algorithm>
#include <climits>
#include <string>

#include "status.h"

namespace dustin::cuda {
namespace {

void check_aligned(const void* data, const char* name, int bytes) {
  if (reinterpret_cast<uintptr_t>(data) % bytes != 0)
    refuse<DUSTIN_UNSUPPORTED>(name, " begins at an address that is not a multiple of ", bytes,
                               " bytes");
}

void check_stride(int64_t stride, const char* of, const char* name, int elements) {
  if (stride % elements != 0)
    refuse<DUSTIN_UNSUPPORTED>(name, " of ", of, " is ", stride, " elements, not a multiple of ",
                               elements);
}

}  // namespace

void check_supported(const DustinKvCache& cache, bool reads_values) {
  if (cache.dtype == DUSTIN_FLOAT32)
    refuse<DUSTIN_UNSUPPORTED>("the CUDA kernels take float16 and bfloat16, not float32");
  if (std::find(std::begin(kHeadDims), std::end(kHeadDims), cache.head_dim) ==
      std::end(kHeadDims)) {
    std::string sizes;
    for (const int dim : kHeadDims) sizes += " " + std::to_string(dim);
    refuse<DUSTIN_UNSUPPORTED>("head_dim is ", cache.head_dim, ", the CUDA kernels take", sizes);
  }
  constexpr int kMaxGrid = 65535;
  if (cache.batch > kMaxGrid || cache.num_kv_heads > kMaxGrid)
    refuse<DUSTIN_UNSUPPORTED>("batch ", cache.batch, " or ", cache.num_kv_heads,
                               " KV heads exceed ", kMaxGrid);
  check_aligned(cache.k, "k cache", 16);
  if (reads_values) check_aligned(cache.v, "v cache", 16);
  check_stride(cache.page_stride, "the cache", "page_stride", 8);
  check_stride(cache.head_stride, "the cache", "head_stride", 8);
  check_stride(cache.token_stride, "the cache", "token_stride", 8);
}

void check_supported(const DustinRows& rows, const char* name) {
  check_aligned(rows.data, name, 4);
  check_stride(rows.batch_stride, name, "batch_stride", 2);
  check_stride(rows.row_stride, name, "row_stride", 2);
  check_stride(rows.head_stride, name, "head_stride", 2);
}

void check_workspace(const void* workspace, int64_t bytes, int64_t needed) {
  if (needed == 0) return;
  refuse_null(workspace, "workspace");
  if (bytes < needed) refuse("workspace has ", bytes, " bytes, ", needed, " are needed");
  constexpr int kAlignment = 256;
  if (reinterpret_cast<uintptr_t>(workspace) % kAlignment != 0)
    refuse("workspace begins at an address that is not a multiple of ", kAlignment, " bytes");
}

int64_t longest_history(const DustinKvCache& cache, int32_t rows) {
  const int64_t room = int64_t{cache.max_pages} * cache.page_size - rows;
  const int64_t bound = cache.max_length > 0 ? cache.max_length : INT_MAX - rows;
  return std::max<int64_t>(0, std::min(room, bound));
}

}  // namespace dustin::cuda

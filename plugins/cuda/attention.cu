// dense_attention and sparse_attention: what their structs ask of the one kernel.
#include "attention.h"

#include <algorithm>

#include "checks.h"
#include "status.h"
#include "supported.h"

namespace dustin::cuda {
namespace {

// A call as the kernel takes it, and the memory that it needs. The workspace holds the parts' sums of
// values and behind them their statistics.
struct Call {
  AttentionParams params{};
  int64_t partial_bytes = 0, workspace_bytes = 0;

  Call(const DustinDenseAttentionParams& p, const DustinSparseAttentionParams* sparse) {
    const DustinKvCache& c = p.cache;
    check_supported(c, true);
    check_supported(p.q, "q");
    check_supported(p.out, "out");
    const int group = p.heads / c.num_kv_heads;
    if (group > kMaxGroup)
      refuse<DUSTIN_UNSUPPORTED>(p.heads, " query heads of ", c.num_kv_heads,
                                 " KV heads: the CUDA kernels take groups of at most ", kMaxGroup);
    params.cache = c;
    params.q = p.q;
    params.out = p.out;
    params.lse = p.lse;
    params.rows = p.rows;
    params.heads = p.heads;
    params.group = group;
    constexpr float kLog2E = 1.44269504088896f;
    params.scale = p.scale * kLog2E;
    int64_t history = longest_history(c, p.rows);
    if (sparse) {
      const int64_t most = sparse->max_count > 0 ? sparse->max_count : sparse->budget;
      if (sparse->budget > 0 && history > 0) refuse_null(sparse->indices, "indices");
      params.indices = sparse->indices;
      params.counts = sparse->counts;
      params.indices_stride = sparse->indices_stride;
      history = std::min(history, most);
    }
    const int64_t query_rows = int64_t{p.rows} * group;
    params.max_parts = parts_of(history + p.rows, query_rows);
    if (params.max_parts == 1) return;
    const int64_t results = int64_t{c.batch} * c.num_kv_heads * params.max_parts * query_rows;
    partial_bytes = results * c.head_dim * int64_t{sizeof(float)};
    workspace_bytes = partial_bytes + results * int64_t{sizeof(float2)};
  }

  void run(void* workspace, int64_t bytes, void* stream) {
    check_workspace(workspace, bytes, workspace_bytes);
    if (workspace_bytes > 0) {
      params.partial = static_cast<float*>(workspace);
      params.stats = reinterpret_cast<float2*>(static_cast<char*>(workspace) + partial_bytes);
    }
    switch (params.cache.head_dim) {
      case 64:
        return launch_attention<64>(params, stream);
      case 80:
        return launch_attention<80>(params, stream);
      case 96:
        return launch_attention<96>(params, stream);
      case 128:
        return launch_attention<128>(params, stream);
      case 256:
        return launch_attention<256>(params, stream);
      default:
        refuse<DUSTIN_UNSUPPORTED>("head_dim is ", params.cache.head_dim);
    }
  }
};

const DustinDenseAttentionParams& dense_of(const DustinDenseAttentionParams& p) { return p; }
const DustinDenseAttentionParams& dense_of(const DustinSparseAttentionParams& p) {
  return p.attention;
}
const DustinSparseAttentionParams* sparse_of(const DustinDenseAttentionParams&) { return nullptr; }
const DustinSparseAttentionParams* sparse_of(const DustinSparseAttentionParams& p) { return &p; }

template <class Params>
int64_t workspace_of(const Params* params) {
  int64_t bytes = 0;
  const int32_t status = guarded([&] {
    refuse_null(params, "params");
    if (check_arguments(*params))
      bytes = Call(dense_of(*params), sparse_of(*params)).workspace_bytes;
  });
  return status == DUSTIN_OK ? bytes : -1;
}

template <class Params>
int32_t run(const Params* params, void* workspace, int64_t bytes, void* stream) {
  return guarded([&] {
    refuse_null(params, "params");
    if (check_arguments(*params))
      Call(dense_of(*params), sparse_of(*params)).run(workspace, bytes, stream);
  });
}

}  // namespace
}  // namespace dustin::cuda

extern "C" {

int64_t dustin_cuda_dense_attention_workspace(const DustinDenseAttentionParams* params) {
  return dustin::cuda::workspace_of(params);
}

int64_t dustin_cuda_sparse_attention_workspace(const DustinSparseAttentionParams* params) {
  return dustin::cuda::workspace_of(params);
}

int32_t dustin_cuda_dense_attention(const DustinDenseAttentionParams* params, void* workspace,
                                    int64_t workspace_bytes, void* stream) {
  return dustin::cuda::run(params, workspace, workspace_bytes, stream);
}

int32_t dustin_cuda_sparse_attention(const DustinSparseAttentionParams* params, void* workspace,
                                     int64_t workspace_bytes, void* stream) {
  return dustin::cuda::run(params, workspace, workspace_bytes, stream);
}
}

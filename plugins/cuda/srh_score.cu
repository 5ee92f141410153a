#include "srh_score.cuh"

#include <algorithm>

#include "checks.h"
#include "status.h"
#include "supported.h"

namespace dustin::cuda {
namespace {

class SrhScore {
 public:
  explicit SrhScore(const DustinSrhScoreParams& p) {
    const DustinKvCache& c = p.cache;
    check_supported(c, false);
    check_supported(p.queries, "queries");
    if (p.query_heads > DUSTIN_CUDA_MAX_SCORED_HEADS)
      refuse<DUSTIN_UNSUPPORTED>(p.query_heads, " query heads, one call scores at most ",
                                 DUSTIN_CUDA_MAX_SCORED_HEADS);
    params_.cache = c;
    params_.queries = p.queries;
    params_.scores = p.scores;
    params_.scores_stride = p.scores_stride;
    params_.scores_width = p.scores_width;
    params_.rows = p.rows;
    params_.query_heads = p.query_heads;
    constexpr float kLog2E = 1.44269504088896f;
    params_.scale = p.scale * kLog2E;
    longest_ = std::min<int64_t>(longest_history(c, 0), p.scores_width);
    params_.width = (longest_ + 3) / 4 * 4;
    params_.chunks = static_cast<int32_t>((longest_ + kKeysAChunk - 1) / kKeysAChunk);
    gather(p);
    const int64_t rows = int64_t{c.batch} * p.query_heads * p.rows;
    // 256 bytes of stats a time keep the logits aligned.
    stats_bytes_ = (rows * params_.chunks * int64_t{sizeof(float2)} + 255) / 256 * 256;
    workspace_bytes_ = stats_bytes_ + rows * params_.width * int64_t{sizeof(float)};
  }

  int64_t workspace_bytes() const { return workspace_bytes_; }

  void run(void* workspace, int64_t bytes, void* stream) {
    check_workspace(workspace, bytes, workspace_bytes_);
    if (longest_ == 0) return;
    params_.stats = static_cast<float2*>(workspace);
    params_.logits = reinterpret_cast<float*>(static_cast<char*>(workspace) + stats_bytes_);
    switch (params_.cache.head_dim) {
      case 64:
        logits<64>(stream);
        break;
      case 80:
        logits<80>(stream);
        break;
      case 96:
        logits<96>(stream);
        break;
      case 128:
        logits<128>(stream);
        break;
      case 256:
        logits<256>(stream);
        break;
      default:
        refuse<DUSTIN_UNSUPPORTED>("head_dim is ", params_.cache.head_dim);
    }
    const int64_t rows = int64_t{params_.query_heads} * params_.rows;
    const int64_t shared = (rows * int64_t{sizeof(float2)} + 15) / 16 * 16;
    check_shared(shared, "that many query rows");
    const int64_t blocks = (longest_ + kKeysAnAddBlock - 1) / kKeysAnAddBlock;
    launch(srh_add_kernel, dim3(static_cast<unsigned>(blocks), params_.cache.batch), kScoreThreads,
           shared, stream, params_);
  }

 private:
  // Sorts the query heads by the KV head that they read.
  void gather(const DustinSrhScoreParams& p) {
    int placed = 0;
    for (int kv_head = 0; kv_head < p.cache.num_kv_heads && placed < p.query_heads; ++kv_head) {
      const int first = placed;
      for (int i = 0; i < p.query_heads; ++i)
        if (p.kv_heads[i] == kv_head) params_.columns[placed++] = static_cast<uint8_t>(i);
      if (placed == first) continue;
      largest_group_ = std::max(largest_group_, placed - first);
      params_.kv_heads[params_.groups] = static_cast<uint16_t>(kv_head);
      params_.first[params_.groups++] = static_cast<uint8_t>(first);
    }
    params_.first[params_.groups] = static_cast<uint8_t>(placed);
  }

  static void check_shared(int64_t bytes, const char* what) {
    if (const int64_t room = shared_memory_of_a_block(); bytes > room)
      refuse<DUSTIN_UNSUPPORTED>("srh_score of ", what, " takes ", bytes,
                                 " bytes of shared memory, this GPU has ", room);
  }

  template <int D>
  void logits(void* stream) const {
    const int64_t shared = score_shared_bytes<D>(int64_t{largest_group_} * params_.rows);
    check_shared(shared, "that many query rows of a KV head");
    const dim3 grid(params_.chunks, params_.groups, params_.cache.batch);
    const auto kernel = params_.cache.dtype == DUSTIN_FLOAT16 ? srh_logits_kernel<Float16, D>
                                                              : srh_logits_kernel<BFloat16, D>;
    launch(kernel, grid, kScoreThreads, shared, stream, params_);
  }

  SrhScoreParams params_{};
  int largest_group_ = 0;
  int64_t longest_ = 0, stats_bytes_ = 0, workspace_bytes_ = 0;
};

}  // namespace
}  // namespace dustin::cuda

extern "C" {

int64_t dustin_cuda_srh_score_workspace(const DustinSrhScoreParams* params) {
  using namespace dustin;
  int64_t bytes = 0;
  const int32_t status = guarded([&] {
    refuse_null(params, "params");
    if (check_arguments(*params)) bytes = cuda::SrhScore(*params).workspace_bytes();
  });
  return status == DUSTIN_OK ? bytes : -1;
}

int32_t dustin_cuda_srh_score(const DustinSrhScoreParams* params, void* workspace,
                              int64_t workspace_bytes, void* stream) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(params, "params");
    if (check_arguments(*params)) cuda::SrhScore(*params).run(workspace, workspace_bytes, stream);
  });
}
}

#include "select_tokens.cuh"

#include <algorithm>
#include <climits>

#include "checks.h"
#include "status.h"

extern "C" int32_t dustin_cuda_select_tokens(const DustinSelectTokensParams* params, void* stream) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(params, "params");
    if (!check_arguments(*params)) return;
    // The longest row whose scores are looked at.
    int64_t longest = INT_MAX;
    if (params->target_scores) longest = std::min<int64_t>(longest, params->target_width);
    if (params->draft_scores) longest = std::min<int64_t>(longest, params->draft_width);
    if (longest == INT_MAX) longest = 0;
    const int64_t bytes = cuda::select_shared_bytes(longest);
    if (const int64_t room = cuda::shared_memory_of_a_block(); bytes > room)
      refuse<DUSTIN_UNSUPPORTED>("select_tokens of ", longest, " scores a row takes ", bytes,
                                 " bytes of shared memory, this GPU has ", room);
    cuda::launch(cuda::select_tokens_kernel, dim3(params->batch), cuda::kSelectThreads, bytes,
                 stream, *params);
  });
}

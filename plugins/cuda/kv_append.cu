#include "kv_append.cuh"

#include "checks.h"
#include "status.h"
#include "supported.h"

extern "C" int32_t dustin_cuda_kv_append(const DustinKvAppendParams* params, void* stream) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(params, "params");
    if (!check_arguments(*params)) return;
    const DustinKvCache& c = params->cache;
    cuda::check_supported(c, true);
    cuda::check_supported(params->k, "k");
    cuda::check_supported(params->v, "v");
    const int64_t words = int64_t{params->rows} * c.num_kv_heads * c.head_dim / 2;
    if (words > UINT32_MAX)
      refuse<DUSTIN_UNSUPPORTED>("kv_append of ", params->rows, " tokens a row of ", c.num_kv_heads,
                                 " KV heads: append fewer at once");
    const int64_t blocks = (words + cuda::kAppendThreads - 1) / cuda::kAppendThreads;
    cuda::launch(cuda::kv_append_kernel, dim3(static_cast<unsigned>(blocks), c.batch),
                 cuda::kAppendThreads, 0, stream,
                 cuda::KvAppendParams{c, params->k, params->v, params->rows});
  });
}

// DustinDenseAttention: q, cache, page_table, lengths -> out.
#include "attention.h"

namespace dustin::tensorrt {
namespace {

class DenseAttention final : public Attention {
 public:
  using Attention::Attention;

  int64_t workspace_bytes(const Call& call) const override {
    DustinDenseAttentionParams params = params_of(call);
    return most_bytes(params.rows, [&](int32_t w) {
      params.rows = w;
      return dustin_cuda_dense_attention_workspace(&params);
    });
  }

  int32_t run(const Call& call) const override {
    const DustinDenseAttentionParams params = params_of(call);
    return dustin_cuda_dense_attention(&params, call.workspace, kAsAskedFor, call.stream);
  }
};

}  // namespace

OpKind dense_attention() {
  return {"DustinDenseAttention", {kScaleField, CacheInputs::kField}, make_op<DenseAttention>};
}

}  // namespace dustin::tensorrt

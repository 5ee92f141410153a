// DustinSparseAttention: q, cache, page_table, lengths, indices, counts, read_bound -> out.
//
// A row that reads its whole history may have more tokens than indices has columns, and what is
// launched must follow from shapes alone: so the length of read_bound, whose data nobody reads, is
// what no count exceeds.
#include "attention.h"

namespace dustin::tensorrt {
namespace {

class SparseAttention final : public Attention {
 public:
  using Attention::Attention;

  Signature signature(int32_t inputs) const override {
    Signature signature = Attention::signature(inputs);
    signature.inputs.push_back({"indices", Element::kInt32, {"B", "k"}});
    signature.inputs.push_back({"counts", Element::kInt32, {"B"}});
    signature.inputs.push_back({"read_bound", Element::kInt32, {"R"}});
    return signature;
  }

  int64_t workspace_bytes(const Call& call) const override {
    DustinSparseAttentionParams params = sparse_params_of(call);
    return most_bytes(params.attention.rows, [&](int32_t w) {
      params.attention.rows = w;
      return dustin_cuda_sparse_attention_workspace(&params);
    });
  }

  int32_t run(const Call& call) const override {
    const DustinSparseAttentionParams params = sparse_params_of(call);
    return dustin_cuda_sparse_attention(&params, call.workspace, kAsAskedFor, call.stream);
  }

 private:
  DustinSparseAttentionParams sparse_params_of(const Call& call) const {
    const int indices = first_behind(), counts = indices + 1, read_bound = indices + 2;
    DustinSparseAttentionParams params{};
    params.attention = params_of(call);
    params.indices = static_cast<const int32_t*>(call.inputs[indices]);
    params.counts = static_cast<const int32_t*>(call.inputs[counts]);
    params.budget = size_of(call.in[indices], 1);
    params.indices_stride = params.budget;
    params.max_count = size_of(call.in[read_bound], 0);
    return params;
  }
};

}  // namespace

OpKind sparse_attention() {
  return {"DustinSparseAttention", {kScaleField, CacheInputs::kField}, make_op<SparseAttention>};
}

}  // namespace dustin::tensorrt

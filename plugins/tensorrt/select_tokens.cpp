// DustinSelectTokens: lengths [, scores [, draft_scores]] -> indices, counts.
#include "paged.h"
#include "status.h"

namespace dustin::tensorrt {
namespace {

using nvinfer1::PluginFieldType;

class SelectTokens final : public Op {
 public:
  explicit SelectTokens(Fields given)
      : Op(std::move(given)),
        budget_(fields().integer("budget")),
        lookahead_(fields().integer("lookahead")),
        sink_(fields().integer("sink")),
        window_(fields().integer("window")) {
    if (budget_ <= int64_t{sink_} + window_)
      refuse("field 'budget' is ", budget_, ": write more than sink and window together, ",
             int64_t{sink_} + window_);
  }

  Signature signature(int32_t inputs) const override {
    Signature signature;
    signature.inputs = {{"lengths", Element::kInt32, {"B"}}};
    if (inputs > 1) signature.inputs.push_back({"scores", Element::kFloat32, {"B", "N"}});
    if (inputs > 2) signature.inputs.push_back({"draft_scores", Element::kFloat32, {"B", "Nd"}});
    signature.outputs = {{"indices", Element::kInt32, {"B", budget_}},
                         {"counts", Element::kInt32, {"B"}}};
    return signature;
  }
  int32_t outputs() const override { return 2; }

  void check(const Sizes&) const override {}

  int32_t run(const Call& call) const override {
    DustinSelectTokensParams params{};
    if (call.num_inputs > 1) {
      params.target_scores = static_cast<const float*>(call.inputs[1]);
      params.target_width = size_of(call.in[1], 1);
      params.target_stride = params.target_width;
    }
    if (call.num_inputs > 2) {
      params.draft_scores = static_cast<const float*>(call.inputs[2]);
      params.draft_width = size_of(call.in[2], 1);
      params.draft_stride = params.draft_width;
    }
    params.lengths = static_cast<const int32_t*>(call.inputs[0]);
    params.indices = static_cast<int32_t*>(call.outputs[0]);
    params.counts = static_cast<int32_t*>(call.outputs[1]);
    params.indices_stride = budget_;
    params.batch = size_of(call.in[0], 0);
    params.budget = budget_;
    params.lookahead = lookahead_;
    params.sink = sink_;
    params.window = window_;
    return dustin_cuda_select_tokens(&params, call.stream);
  }

 private:
  const int32_t budget_, lookahead_, sink_, window_;
};

}  // namespace

OpKind select_tokens() {
  return {"DustinSelectTokens",
          {{"budget", PluginFieldType::kINT32},
           {"lookahead", PluginFieldType::kINT32},
           {"sink", PluginFieldType::kINT32},
           {"window", PluginFieldType::kINT32}},
          make_op<SelectTokens>};
}

}  // namespace dustin::tensorrt

// DustinSrhScore: queries, page_table, lengths, [scores_in,] key caches -> scores.
#include <algorithm>
#include <numeric>

#include "paged.h"
#include "status.h"

namespace dustin::tensorrt {
namespace {

using nvinfer1::PluginFieldType;

class SrhScore final : public Op {
 public:
  explicit SrhScore(Fields given)
      : Op(std::move(given)),
        kv_heads_(fields().integers("kv_heads")),
        heads_per_cache_(fields().integers("heads_per_cache")),
        pool_layers_(fields().integers("pool_layers")),
        scale_(fields().number("scale")),
        accumulate_(fields().integer("accumulate", 0) != 0) {
    if (fields().integer("accumulate", 0) > 1)
      refuse("field 'accumulate' is ", fields().integer("accumulate"), ": write 0 or 1");
    int64_t heads = 0;
    for (const int32_t count : heads_per_cache_) {
      if (count < 1 || count > DUSTIN_CUDA_MAX_SCORED_HEADS)
        refuse("field 'heads_per_cache' has ", count, ": write 1 to ", DUSTIN_CUDA_MAX_SCORED_HEADS,
               " query heads a cache");
      heads += count;
    }
    if (heads != static_cast<int64_t>(kv_heads_.size()))
      refuse("field 'heads_per_cache' sums to ", heads, " and 'kv_heads' has ", kv_heads_.size(),
             " heads: write as many");
    if (is_pool() && pool_layers_.size() != heads_per_cache_.size())
      refuse("field 'pool_layers' has ", pool_layers_.size(), " layers and 'heads_per_cache' ",
             heads_per_cache_.size(), " counts: write as many");
  }

  Signature signature(int32_t) const override {
    Signature signature;
    std::vector<Tensor>& inputs = signature.inputs;
    inputs = {{"queries", Element::kModel, {"B", "R", static_cast<int32_t>(kv_heads_.size()), "D"}},
              {"page_table", Element::kInt32, {"B", "M"}},
              {"lengths", Element::kInt32, {"B"}}};
    if (accumulate_) inputs.push_back({"scores_in", Element::kFloat32, {"B", "N"}});
    if (is_pool()) {
      inputs.push_back({"pool", Element::kModel, kPoolAxes});
    } else {
      for (size_t i = 0; i < heads_per_cache_.size(); ++i)
        inputs.push_back({"key cache " + std::to_string(i), Element::kModel, kCacheAxes});
    }
    const Axis width = accumulate_ ? Axis("N") : Axis("M", "page_size");
    signature.outputs = {{"scores", Element::kFloat32, {"B", width}}};
    return signature;
  }

  void check(const Sizes& sizes) const override {
    check_head_size(sizes);
    for (const int32_t layer : pool_layers_) check_layer(sizes, layer, "pool_layers");
    const int64_t present = sizes["Hkv"];
    for (const int32_t head : kv_heads_)
      if (present != kUnknown && head >= present)
        refuse("field 'kv_heads' has ", head, ", the caches have ", present, " KV heads");
  }

  int64_t workspace_bytes(const Call& call) const override {
    int64_t most = 0;
    for (size_t i = 0, head = 0; i < heads_per_cache_.size(); head += heads_per_cache_[i++]) {
      const DustinSrhScoreParams params = params_of(call, i, head);
      const int64_t bytes = dustin_cuda_srh_score_workspace(&params);
      if (bytes < 0) return bytes;
      most = std::max(most, bytes);
    }
    return most;
  }

  int32_t run(const Call& call) const override {
    const size_t bytes = call.out[0].dims.d[0] * call.out[0].dims.d[1] * sizeof(float);
    const cudaError_t error = accumulate_
                                  ? cudaMemcpyAsync(call.outputs[0], call.inputs[kScoresIn], bytes,
                                                    cudaMemcpyDeviceToDevice, call.stream)
                                  : cudaMemsetAsync(call.outputs[0], 0, bytes, call.stream);
    if (error != cudaSuccess) return report(DUSTIN_CUDA_ERROR, cudaGetErrorString(error));
    // One after another on the stream, so that all can use the same workspace.
    for (size_t i = 0, head = 0; i < heads_per_cache_.size(); head += heads_per_cache_[i++]) {
      const DustinSrhScoreParams params = params_of(call, i, head);
      const int32_t status =
          dustin_cuda_srh_score(&params, call.workspace, kAsAskedFor, call.stream);
      if (status != DUSTIN_OK) return status;
    }
    return DUSTIN_OK;
  }

 private:
  static constexpr int kPageTable = 1, kScoresIn = 3;

  bool is_pool() const { return !pool_layers_.empty(); }

  // Of the cache `index`, whose query heads begin with `head`.
  DustinSrhScoreParams params_of(const Call& call, size_t index, size_t head) const {
    const size_t first = kScoresIn + (accumulate_ ? 1 : 0), at = is_pool() ? first : first + index;
    DustinSrhScoreParams params{};
    params.cache = is_pool() ? pooled_cache(call.in[at], call.inputs[at], pool_layers_[index])
                             : separate_cache(call.in[at], call.inputs[at], nullptr);
    add_batch(params.cache, call, kPageTable);
    params.queries = rows_of(call.in[0], call.inputs[0]);
    params.queries.data =
        static_cast<uint16_t*>(params.queries.data) + head * params.queries.head_stride;
    params.kv_heads = &kv_heads_[head];
    params.scores = static_cast<float*>(call.outputs[0]);
    params.scores_stride = call.out[0].dims.d[1];
    params.scores_width = size_of(call.out[0], 1);
    params.rows = size_of(call.in[0], 1);
    params.query_heads = heads_per_cache_[index];
    params.scale = scale_;
    return params;
  }

  const std::vector<int32_t> kv_heads_, heads_per_cache_, pool_layers_;
  const float scale_;
  const bool accumulate_;
};

}  // namespace

OpKind srh_score() {
  return {"DustinSrhScore",
          {{"kv_heads", PluginFieldType::kINT32, true},
           {"heads_per_cache", PluginFieldType::kINT32, true},
           {"scale", PluginFieldType::kFLOAT32},
           {"accumulate", PluginFieldType::kINT32, false, true},
           {"pool_layers", PluginFieldType::kINT32, true, true}},
          make_op<SrhScore>};
}

}  // namespace dustin::tensorrt

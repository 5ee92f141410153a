// What dense and sparse attention share: q, cache, page_table, lengths -> out.
#pragma once

#include <algorithm>

#include "paged.h"
#include "status.h"
#include "supported.h"

namespace dustin::tensorrt {

inline constexpr FieldKind kScaleField = {"scale", nvinfer1::PluginFieldType::kFLOAT32};

class Attention : public Op {
 public:
  explicit Attention(Fields given)
      : Op(std::move(given)), cache_(fields()), scale_(fields().number(kScaleField.name)) {}

  Signature signature(int32_t) const override {
    Signature signature;
    signature.inputs = {{"q", Element::kModel, {"B", "w", "Hq", "D"}}};
    cache_.append_to(signature.inputs);
    signature.outputs = {{"out", Element::kModel, {"B", "w", "Hq", "D"}}};
    return signature;
  }

  void check(const Sizes& sizes) const override {
    cache_.check(sizes);
    const int64_t heads = sizes["Hq"], kv_heads = sizes["Hkv"];
    if (heads == kUnknown || kv_heads == kUnknown) return;
    if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0)
      refuse("Hq, ", heads, " query heads, is no multiple of Hkv, ", kv_heads, " KV heads");
    if (heads / kv_heads > cuda::kMaxGroup)
      refuse("Hq is ", heads, " and Hkv ", kv_heads, ": the kernels take at most ", cuda::kMaxGroup,
             " query heads a KV head");
  }

 protected:
  static constexpr int kCache = 1;  // the first cache's input

  int first_behind() const { return kCache + cache_.count_all(); }

  DustinDenseAttentionParams params_of(const Call& call) const {
    DustinDenseAttentionParams params{};
    params.cache = cache_.view(call, kCache);
    params.q = rows_of(call.in[0], call.inputs[0]);
    params.out = rows_of(call.out[0], call.outputs[0]);
    params.rows = size_of(call.in[0], 1);
    params.heads = size_of(call.in[0], 2);
    params.scale = scale_;
    return params;
  }

  // The most that `bytes_with(w)` asks for at up to `rows` new tokens a row. Few rows may take more
  // than many, whose histories are cut into fewer parts.
  template <class Bytes>
  static int64_t most_bytes(int32_t rows, const Bytes& bytes_with) {
    int64_t most = 0;
    for (int32_t w = 1; w <= rows && most >= 0; ++w) {
      const int64_t bytes = bytes_with(w);
      most = bytes < 0 ? bytes : std::max(most, bytes);
    }
    return most;
  }

 private:
  const CacheInputs cache_;
  const float scale_;
};

}  // namespace dustin::tensorrt

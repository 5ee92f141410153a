// DustinKvAppend: k, v, cache, page_table, lengths -> cache, written over its input.
#include "paged.h"
#include "status.h"

namespace dustin::tensorrt {
namespace {

class KvAppend final : public Op {
 public:
  explicit KvAppend(Fields given) : Op(std::move(given)), cache_(fields()) {}

  Signature signature(int32_t) const override {
    Signature signature;
    signature.inputs = {{"k", Element::kModel, {"B", "w", "Hkv", "D"}},
                        {"v", Element::kModel, {"B", "w", "Hkv", "D"}}};
    cache_.append_to(signature.inputs);
    signature.outputs = cache_.caches();
    return signature;
  }
  int32_t outputs() const override { return cache_.count(); }
  int32_t aliased_input(int32_t output) const override { return kCache + output; }

  void check(const Sizes& sizes) const override { cache_.check(sizes); }

  int32_t run(const Call& call) const override {
    // Elsewhere the tokens would be lost to the next step.
    for (int i = 0; i < outputs(); ++i)
      if (call.outputs[i] != call.inputs[aliased_input(i)])
        return report(DUSTIN_INVALID_ARGUMENT,
                      "the cache that comes out is not the one that went in: set "
                      "PreviewFeature::kALIASED_PLUGIN_IO_10_03 where the engine is built");
    DustinKvAppendParams params{};
    params.cache = cache_.view(call, kCache);
    params.k = rows_of(call.in[0], call.inputs[0]);
    params.v = rows_of(call.in[1], call.inputs[1]);
    params.rows = size_of(call.in[0], 1);
    return dustin_cuda_kv_append(&params, call.stream);
  }

 private:
  static constexpr int kCache = 2;  // the first cache's input

  CacheInputs cache_;
};

}  // namespace

OpKind kv_append() { return {"DustinKvAppend", {CacheInputs::kField}, make_op<KvAppend>}; }

}  // namespace dustin::tensorrt

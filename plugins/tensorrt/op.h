// One of Dustin's ops, as the plugin that TensorRT sees (plugin.h) needs it.
#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <vector>

#include "fields.h"
#include "signature.h"

namespace dustin::tensorrt {

// What TensorRT hands over to run an op once.
struct Call {
  int32_t num_inputs;
  const nvinfer1::PluginTensorDesc* in;
  const nvinfer1::PluginTensorDesc* out;
  const void* const* inputs;
  void* const* outputs;
  void* workspace;
  cudaStream_t stream;
};

// Never changes once made, so that a plugin and its clones share one.
class Op {
 public:
  explicit Op(Fields fields) : fields_(std::move(fields)) {}
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;
  virtual ~Op() = default;

  // The tensors where a node has that many inputs, which decides which of the optional ones are
  // there; with any other number the nearest signature.
  virtual Signature signature(int32_t inputs) const = 0;
  virtual int32_t outputs() const { return 1; }
  // The input that an output is written over, or -1.
  virtual int32_t aliased_input(int32_t) const { return -1; }

  // Refuses sizes, of those known, that the op does not take.
  virtual void check(const Sizes& sizes) const = 0;

  // Bytes that calls up to these sizes take, or -1 with dustin_last_error. Looks at no data.
  virtual int64_t workspace_bytes(const Call&) const { return 0; }
  // Queues the op on the stream. A DustinStatus, with dustin_last_error.
  virtual int32_t run(const Call& call) const = 0;

  const Fields& fields() const { return fields_; }

 private:
  Fields fields_;
};

// What to make ops from.
struct OpKind {
  const char* name;
  std::vector<FieldKind> fields;
  std::shared_ptr<const Op> (*make)(Fields fields);  // refuses fields that do not fit each other
};

template <class T>
std::shared_ptr<const Op> make_op(Fields fields) {
  return std::make_shared<const T>(std::move(fields));
}

// One a file.
OpKind kv_append();
OpKind srh_score();
OpKind select_tokens();
OpKind dense_attention();
OpKind sparse_attention();

}  // namespace dustin::tensorrt

#include "plugin.h"

#include <cstring>

#include "dustin/kernels.h"
#include "log.h"
#include "status.h"

namespace dustin::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IDimensionExpr;
using nvinfer1::PluginTensorDesc;

constexpr int32_t kRefused = -1;

Signature signature_of(const Op& op, int32_t num_inputs) {
  Signature signature = op.signature(num_inputs);
  if (signature.inputs.size() == static_cast<size_t>(num_inputs)) return signature;
  std::string names;
  for (const Tensor& input : signature.inputs)
    names += (names.empty() ? "" : ", ") + input.name + " " + written(input.axes);
  refuse("there are ", num_inputs, " inputs, it should be ", signature.inputs.size(), ": ", names);
}

std::vector<int64_t> known(const DimsExprs& dims) {
  std::vector<int64_t> sizes;
  for (int32_t i = 0; i < dims.nbDims; ++i)
    sizes.push_back(dims.d[i]->isConstant() ? dims.d[i]->getConstantValue() : kUnknown);
  return sizes;
}

std::vector<int64_t> known(const Dims& dims) { return {dims.d, dims.d + dims.nbDims}; }

// Refuses sizes of the inputs that do not fit each other or that the op does not take; `dims_of(i)`
// are those of input i.
template <class DimsOf>
void check_shapes(const Op& op, const Signature& signature, const DimsOf& dims_of) {
  Sizes sizes;
  for (size_t i = 0; i < signature.inputs.size(); ++i)
    sizes.add(signature.inputs[i], known(dims_of(i)));
  op.check(sizes);
}

// The first of the inputs that has T, which the others are to match; kUnknown where none has.
int64_t first_model_input(const Signature& signature) {
  for (size_t i = 0; i < signature.inputs.size(); ++i)
    if (signature.inputs[i].element == Element::kModel) return static_cast<int64_t>(i);
  return kUnknown;
}

const char* wanted_type(Element element) {
  return element == Element::kInt32     ? "INT32"
         : element == Element::kFloat32 ? "FLOAT"
                                        : "HALF or BF16, the same for all of the node";
}

// Whether a tensor of the op can have that type where the node's T is `model`.
bool takes(Element element, DataType type, DataType model) {
  if (element == Element::kInt32) return type == DataType::kINT32;
  if (element == Element::kFloat32) return type == DataType::kFLOAT;
  return type == model;
}

// The size of an output's axis, by those of the inputs.
const IDimensionExpr* expression(const char* name, const Signature& signature,
                                 const DimsExprs* inputs) {
  const IDimensionExpr* found = nullptr;
  for (size_t i = 0; i < signature.inputs.size(); ++i)
    for (size_t j = 0; j < signature.inputs[i].axes.size(); ++j) {
      const char* const here = signature.inputs[i].axes[j].name;
      if (!here || std::strcmp(here, name) != 0) continue;
      if (inputs[i].d[j]->isConstant()) return inputs[i].d[j];
      if (!found) found = inputs[i].d[j];
    }
  return found;
}

// The bytes of workspace at the largest sizes, or -1 with dustin_last_error.
int64_t largest_workspace(const Op& op, const DynamicPluginTensorDesc* in, int32_t num_inputs,
                          const DynamicPluginTensorDesc* out, int32_t num_outputs) {
  const auto at_most = [](const DynamicPluginTensorDesc* tensors, int32_t count) {
    std::vector<PluginTensorDesc> largest;
    for (int32_t i = 0; i < count; ++i) {
      largest.push_back(tensors[i].desc);
      largest.back().dims = tensors[i].max;
    }
    return largest;
  };
  // The data is not looked at, but it must be somewhere.
  alignas(256) static char nowhere[256];
  const std::vector<PluginTensorDesc> inputs = at_most(in, num_inputs);
  const std::vector<PluginTensorDesc> outputs = at_most(out, num_outputs);
  const std::vector<const void*> read(inputs.size(), nowhere);
  const std::vector<void*> written(outputs.size(), nowhere);
  return op.workspace_bytes(
      {num_inputs, inputs.data(), outputs.data(), read.data(), written.data(), nullptr, nullptr});
}

}  // namespace

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(
    nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
  return or_logged<IPluginV3*>(name_, nullptr, [&] { return new Plugin(*this); });
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t num_outputs, const DataType* inputs,
                                   int32_t num_inputs) const noexcept {
  return or_logged(name_, kRefused, [&] {
    const Signature signature = signature_of(*op_, num_inputs);
    const int64_t first = first_model_input(signature);
    const DataType model = first == kUnknown ? DataType::kHALF : inputs[first];
    // Before a weakly typed network has chosen its types all are FLOAT or INT32.
    if (model != DataType::kHALF && model != DataType::kBF16 && model != DataType::kFLOAT)
      refuse(signature.inputs[first].name, " should be ", wanted_type(Element::kModel));
    for (int32_t i = 0; i < num_inputs; ++i) {
      const Tensor& input = signature.inputs[i];
      if (!takes(input.element, inputs[i], model))
        refuse(input.name, " should be ", wanted_type(input.element));
    }
    for (int32_t i = 0; i < num_outputs; ++i) {
      const Element element = signature.outputs[i].element;
      outputs[i] = element == Element::kInt32     ? DataType::kINT32
                   : element == Element::kFloat32 ? DataType::kFLOAT
                                                  : model;
    }
    return 0;
  });
}

int32_t Plugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*,
                                int32_t, DimsExprs* outputs, int32_t num_outputs,
                                nvinfer1::IExprBuilder& builder) noexcept {
  return or_logged(name_, kRefused, [&] {
    const Signature signature = signature_of(*op_, num_inputs);
    check_shapes(*op_, signature, [&](size_t i) -> const DimsExprs& { return inputs[i]; });
    for (int32_t i = 0; i < num_outputs; ++i) {
      const std::vector<Axis>& axes = signature.outputs[i].axes;
      outputs[i].nbDims = static_cast<int32_t>(axes.size());
      for (size_t j = 0; j < axes.size(); ++j) {
        const IDimensionExpr*& size = outputs[i].d[j];
        if (!axes[j].name) {
          size = builder.constant(axes[j].number);
          continue;
        }
        size = expression(axes[j].name, signature, inputs);
        if (axes[j].factor)
          size = builder.operation(nvinfer1::DimensionOperation::kPROD, *size,
                                   *expression(axes[j].factor, signature, inputs));
      }
    }
    return 0;
  });
}

bool Plugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                       int32_t num_inputs, int32_t) noexcept {
  return or_logged(name_, false, [&] {
    const Signature signature = signature_of(*op_, num_inputs);
    const Tensor& tensor = position < num_inputs ? signature.inputs[position]
                                                 : signature.outputs[position - num_inputs];
    const PluginTensorDesc& asked = tensors[position].desc;
    if (asked.format != nvinfer1::TensorFormat::kLINEAR) return false;
    const int64_t first = first_model_input(signature);
    const DataType model = first == kUnknown ? DataType::kHALF : tensors[first].desc.type;
    const bool is_half = model == DataType::kHALF || model == DataType::kBF16;
    if (takes(tensor.element, asked.type, model) && (tensor.element != Element::kModel || is_half))
      return true;
    // It may be one question of many, or the reason why there will be no engine.
    log(Severity::kWARNING, name_,
        (tensor.name + " should be " + wanted_type(tensor.element)).c_str());
    return false;
  });
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_inputs,
                                const DynamicPluginTensorDesc* out, int32_t num_outputs) noexcept {
  return or_logged(name_, kRefused, [&] {
    const Signature signature = signature_of(*op_, num_inputs);
    // The bounds need not fit each other: those of tensors inside a network may be loose.
    check_shapes(*op_, signature, [&](size_t i) -> const Dims& { return in[i].opt; });
    if (largest_workspace(*op_, in, num_inputs, out, num_outputs) < 0) refuse(dustin_last_error());
    return 0;
  });
}

size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t num_inputs,
                                const DynamicPluginTensorDesc* out,
                                int32_t num_outputs) const noexcept {
  return or_logged<size_t>(name_, 0, [&] {
    const int64_t bytes = largest_workspace(*op_, in, num_inputs, out, num_outputs);
    if (bytes < 0) refuse(dustin_last_error());
    return static_cast<size_t>(bytes);
  });
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  return or_logged<IPluginV3*>(name_, nullptr, [&] {
    auto attached = std::make_unique<Plugin>(*this);
    attached->is_attached_ = true;
    return attached.release();
  });
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* in, int32_t num_inputs,
                              const PluginTensorDesc*, int32_t) noexcept {
  return or_logged(name_, kRefused, [&] {
    // Sizes that a profile leaves open differ between inputs until here.
    check_shapes(*op_, signature_of(*op_, num_inputs),
                 [&](size_t i) -> const Dims& { return in[i].dims; });
    num_inputs_ = num_inputs;
    return 0;
  });
}

int32_t Plugin::enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out,
                        const void* const* inputs, void* const* outputs, void* workspace,
                        cudaStream_t stream) noexcept {
  // Outside of a context there is no batch, only the builder, which may want to time the op: its
  // lengths and page tables would lead anywhere.
  if (!is_attached_) return 0;
  if (num_inputs_ == 0) {
    log(Severity::kERROR, name_, "enqueue before onShapeChange");
    return kRefused;
  }
  const int32_t status = op_->run({num_inputs_, in, out, inputs, outputs, workspace, stream});
  if (status != DUSTIN_OK) log(Severity::kERROR, name_, dustin_last_error());
  return status;
}

Creator::Creator(OpKind kind) : kind_(std::move(kind)) {
  for (const FieldKind& field : kind_.fields)
    fields_.emplace_back(field.name, nullptr, field.type, field.is_list ? 0 : 1);
  names_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginV3* Creator::createPlugin(const char*,
                                           const nvinfer1::PluginFieldCollection* fields,
                                           nvinfer1::TensorRTPhase) noexcept {
  return or_logged<nvinfer1::IPluginV3*>(kind_.name, nullptr, [&] {
    return new Plugin(kind_.name, kind_.make(Fields(kind_.fields, fields)));
  });
}

}  // namespace dustin::tensorrt

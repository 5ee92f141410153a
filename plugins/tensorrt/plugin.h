// Any of the ops as a TensorRT plugin.
#pragma once

#include <NvInferRuntime.h>

#include <memory>

#include "op.h"

namespace dustin::tensorrt {

constexpr const char* kNamespace = "dustin";
constexpr const char* kVersion = "1";

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  Plugin(const char* name, std::shared_ptr<const Op> op) : name_(name), op_(std::move(op)) {}

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  const char* getPluginName() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  // ---- while an engine is built ----

  int32_t getNbOutputs() const noexcept override { return op_->outputs(); }
  int32_t getAliasedInput(int32_t output) noexcept override { return op_->aliased_input(output); }
  // Combinations beyond the first would be timed against each other, on memory whose lengths and
  // page tables say nothing true. A strongly typed network has one.
  int32_t getFormatCombinationLimit() noexcept override { return 1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t num_outputs,
                             const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                          const nvinfer1::DimsExprs* shape_inputs, int32_t num_shape_inputs,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors,
                                 int32_t num_inputs, int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* out,
                          int32_t num_outputs) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* out,
                          int32_t num_outputs) const noexcept override;

  // ---- where it runs ----

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override {
    return &op_->fields().collection();
  }
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t num_inputs,
                        const nvinfer1::PluginTensorDesc* out,
                        int32_t num_outputs) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;

 private:
  const char* name_;
  std::shared_ptr<const Op> op_;
  int32_t num_inputs_ = 0;  // by the last onShapeChange: enqueue is not told
  bool is_attached_ = false;
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(OpKind kind);

  const char* getPluginName() const noexcept override { return kind_.name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &names_; }
  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;

 private:
  const OpKind kind_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection names_;
};

}  // namespace dustin::tensorrt

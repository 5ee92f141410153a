// Plays TensorRT: takes a plugin through building, serialising and running, as its interface says
// that TensorRT does, and looks at what it answers.
#ifndef DUSTIN_TESTS_PLAYER_H_
#define DUSTIN_TESTS_PLAYER_H_

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "guarded.h"

extern "C" {
void setLoggerFinder(nvinfer1::ILoggerFinder* finder);
nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);
}

using nvinfer1::DataType;
using Extents = std::vector<int64_t>;

// ---- what is logged ----

class Log : public nvinfer1::ILogger, public nvinfer1::ILoggerFinder {
 public:
  static Log& get() {
    static Log log;
    return log;
  }
  void log(Severity, const char* line) noexcept override { lines_.push_back(line); }
  nvinfer1::ILogger* findLogger() override { return this; }

  // Whether one line was logged since the last look, which names the op and has the text.
  void expect(const std::string& op, const std::string& text) {
    const std::vector<std::string> lines = std::exchange(lines_, {});
    if (!check(lines.size() == 1, (std::to_string(lines.size()) + " lines logged").c_str())) return;
    // Where there is no logger the reason is asked for.
    const bool right = lines[0].rfind(op + ": " + dustin_last_error(), 0) == 0 &&
                       lines[0].find(text) != std::string::npos &&
                       lines[0].find('\n') == std::string::npos;
    check(right, ("logged '" + lines[0] + "' without '" + text + "'").c_str());
  }
  void expect_nothing() {
    for (const std::string& line : std::exchange(lines_, {})) check(false, line.c_str());
  }
  void forget() { lines_.clear(); }

 private:
  std::vector<std::string> lines_;
};

// ---- fields ----

class FieldList {
 public:
  FieldList& integers(const char* name, std::vector<int32_t> values) {
    integers_.push_back(std::move(values));
    return add(name, integers_.back().data(), nvinfer1::PluginFieldType::kINT32,
               static_cast<int32_t>(integers_.back().size()));
  }
  FieldList& number(const char* name, float value) {
    floats_.push_back(value);
    return add(name, &floats_.back(), nvinfer1::PluginFieldType::kFLOAT32, 1);
  }
  FieldList& add(const char* name, const void* data, nvinfer1::PluginFieldType type,
                 int32_t length) {
    fields_.emplace_back(name, data, type, length);
    return *this;
  }
  // As a plan keeps them.
  explicit FieldList(const nvinfer1::PluginFieldCollection& all) {
    for (int32_t i = 0; i < all.nbFields; ++i) {
      const nvinfer1::PluginField& field = all.fields[i];
      names_.push_back(field.name);
      if (field.type == nvinfer1::PluginFieldType::kINT32) {
        const int32_t* const data = static_cast<const int32_t*>(field.data);
        integers(names_.back().c_str(), std::vector<int32_t>(data, data + field.length));
      } else {
        check(field.type == nvinfer1::PluginFieldType::kFLOAT32 && field.length == 1, "serialised");
        number(names_.back().c_str(), *static_cast<const float*>(field.data));
      }
    }
  }
  FieldList() = default;
  FieldList(FieldList&&) = default;

  nvinfer1::PluginFieldCollection collection() const {
    return {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  bool operator==(const FieldList& other) const {
    return std::equal(fields_.begin(), fields_.end(), other.fields_.begin(), other.fields_.end(),
                      [](const nvinfer1::PluginField& a, const nvinfer1::PluginField& b) {
                        return !std::strcmp(a.name, b.name) && a.type == b.type &&
                               a.length == b.length && !std::memcmp(a.data, b.data, 4 * a.length);
                      });
  }

 private:
  std::deque<std::vector<int32_t>> integers_;
  std::deque<float> floats_;
  std::deque<std::string> names_;
  std::vector<nvinfer1::PluginField> fields_;
};

// ---- dimensions ----

inline nvinfer1::Dims dims_of(const Extents& shape) {
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), dims.d);
  return dims;
}

// A size by those of the inputs. Constant where it is the same for all the profile allows.
class Expression : public nvinfer1::IDimensionExpr, public nvinfer1::apiv::VDimensionExpr {
 public:
  using Value = std::function<int64_t(const std::vector<Extents>& inputs)>;

  explicit Expression(Value value, std::optional<int64_t> constant)
      : value(std::move(value)), constant_(constant) {
    mImpl = this;
  }
  bool isConstant() const override { return constant_.has_value(); }
  int64_t getConstantValue() const override { return constant_.value_or(INT64_MIN); }
  bool isSizeTensor() const override { return false; }

  const Value value;

 private:
  std::optional<int64_t> constant_;
};

class Expressions : public nvinfer1::IExprBuilder, public nvinfer1::apiv::VExprBuilder {
 public:
  Expressions() { mImpl = this; }

  const nvinfer1::IDimensionExpr* constant(int64_t number) override {
    return make([number](const auto&) { return number; }, number);
  }
  const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation operation,
                                            const nvinfer1::IDimensionExpr& a,
                                            const nvinfer1::IDimensionExpr& b) override {
    check(operation == nvinfer1::DimensionOperation::kPROD, "an operation that is no product");
    const Expression::Value x = value_of(a), y = value_of(b);
    return make([x, y](const auto& inputs) { return x(inputs) * y(inputs); }, std::nullopt);
  }
  const nvinfer1::IDimensionExpr* declareSizeTensor(int32_t, const nvinfer1::IDimensionExpr&,
                                                    const nvinfer1::IDimensionExpr&) override {
    check(false, "a size tensor");
    return nullptr;
  }
  const nvinfer1::IDimensionExpr* size(size_t input, size_t axis, std::optional<int64_t> known) {
    return make([input, axis](const auto& inputs) { return inputs[input][axis]; }, known);
  }
  static const Expression::Value& value_of(const nvinfer1::IDimensionExpr& expression) {
    return static_cast<const Expression&>(expression).value;
  }

 private:
  const nvinfer1::IDimensionExpr* make(Expression::Value value, std::optional<int64_t> constant) {
    made_.push_back(std::make_unique<Expression>(std::move(value), constant));
    return made_.back().get();
  }

  std::deque<std::unique_ptr<Expression>> made_;
};

// ---- nodes ----

struct TensorRange {
  DataType type;
  Extents least, most;      // of the optimisation profile
  bool is_dynamic = false;  // in the network, which leaves all its axes open

  bool is_known(size_t axis) const { return !is_dynamic && least[axis] == most[axis]; }
};

using PluginPointer = std::unique_ptr<nvinfer1::IPluginV3>;

inline nvinfer1::IPluginCreatorV3One* creator_of(const std::string& op) {
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* const all = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(all[i]);
    if (op == creator->getPluginName()) return creator;
  }
  return nullptr;
}

inline PluginPointer create(const std::string& op, const FieldList& fields,
                            nvinfer1::TensorRTPhase phase) {
  const nvinfer1::PluginFieldCollection collection = fields.collection();
  return PluginPointer(creator_of(op)->createPlugin("a layer", &collection, phase));
}

template <class Interface>
Interface& capability(nvinfer1::IPluginV3& plugin, nvinfer1::PluginCapabilityType type) {
  return static_cast<Interface&>(*plugin.getCapabilityInterface(type));
}

// One plugin in a network that is built.
class Node {
 public:
  Node(const std::string& op, const FieldList& fields, const std::vector<TensorRange>& inputs)
      : op_(op), inputs_(inputs), plugin_(create(op, fields, nvinfer1::TensorRTPhase::kBUILD)) {}

  // Up to the workspace; false as soon as the plugin refuses.
  bool build() {
    if (!check(plugin_ != nullptr, "no plugin")) return false;
    using nvinfer1::PluginCapabilityType;
    auto& core = capability<nvinfer1::IPluginV3OneCore>(*plugin_, PluginCapabilityType::kCORE);
    check(op_ == core.getPluginName() && !std::strcmp(core.getPluginVersion(), "1") &&
              !std::strcmp(core.getPluginNamespace(), "dustin"),
          "another name");
    PluginPointer copy(plugin_->clone());  // TensorRT works on clones
    plugin_ = std::move(copy);
    auto& builds = build_side();
    check(builds.getInterfaceInfo().major == 2, "no aliasing in the build interface");
    const int32_t num_inputs = static_cast<int32_t>(inputs_.size());
    const int32_t num_outputs = builds.getNbOutputs();

    std::vector<DataType> types, out_types(num_outputs, DataType::kFP8);
    for (const TensorRange& input : inputs_) types.push_back(input.type);
    if (builds.getOutputDataTypes(out_types.data(), num_outputs, types.data(), num_inputs) != 0)
      return false;

    std::vector<nvinfer1::DimsExprs> dims, out_dims(num_outputs);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const TensorRange& input = inputs_[i];
      dims.emplace_back();
      dims.back().nbDims = static_cast<int32_t>(input.least.size());
      for (size_t j = 0; j < input.least.size(); ++j)
        dims.back().d[j] = expressions_.size(
            i, j, input.is_known(j) ? std::optional(input.least[j]) : std::nullopt);
    }
    if (builds.getOutputShapes(dims.data(), num_inputs, nullptr, 0, out_dims.data(), num_outputs,
                               expressions_) != 0)
      return false;
    for (int32_t i = 0; i < num_outputs; ++i) {
      outputs_.push_back({out_types[i], {}, {}});
      for (int32_t j = 0; j < out_dims[i].nbDims; ++j) {
        outputs_.back().sizes.push_back(Expressions::value_of(*out_dims[i].d[j]));
        outputs_.back().is_known.push_back(out_dims[i].d[j]->isConstant());
      }
    }

    std::vector<nvinfer1::DynamicPluginTensorDesc> tensors;
    std::vector<Extents> least, most;
    for (const TensorRange& input : inputs_) {
      tensors.push_back(described(input.type, input.least, input.most));
      for (size_t j = 0; j < input.least.size(); ++j)
        if (!input.is_known(j)) tensors.back().desc.dims.d[j] = -1;
      least.push_back(input.least), most.push_back(input.most);
    }
    for (const Output& output : outputs_)
      tensors.push_back(described(output.type, output.shape(least), output.shape(most)));
    if (!choose_formats(tensors, num_inputs, num_outputs)) return false;
    const auto* const out = tensors.data() + num_inputs;
    if (builds.configurePlugin(tensors.data(), num_inputs, out, num_outputs) != 0) return false;
    workspace_bytes_ = builds.getWorkspaceSize(tensors.data(), num_inputs, out, num_outputs);
    return true;
  }

  nvinfer1::IPluginV3OneBuildV2& build_side() {
    return capability<nvinfer1::IPluginV3OneBuildV2>(*plugin_,
                                                     nvinfer1::PluginCapabilityType::kBUILD);
  }
  nvinfer1::IPluginV3OneRuntime& runtime_side() {
    return capability<nvinfer1::IPluginV3OneRuntime>(*plugin_,
                                                     nvinfer1::PluginCapabilityType::kRUNTIME);
  }
  size_t workspace_bytes() const { return workspace_bytes_; }

  // Into a plan and out of it; what was there before is gone.
  void deserialize(const FieldList& given) {
    const FieldList plan(*runtime_side().getFieldsToSerialize());
    check(plan == given, "serialises other fields than it was made from");
    plugin_.reset();
    plugin_ = create(op_, plan, nvinfer1::TensorRTPhase::kRUNTIME);
    check(plugin_ != nullptr, "cannot be made again");
  }
  void attach() {
    PluginPointer attached(runtime_side().attachToContext(nullptr));
    plugin_ = std::move(attached);
  }

  // Whether the network knows that size before anything runs.
  bool is_known(size_t output, size_t axis) const { return outputs_[output].is_known[axis]; }

  std::vector<Extents> output_extents(const std::vector<Extents>& inputs) const {
    std::vector<Extents> shapes;
    for (const Output& output : outputs_) shapes.push_back(output.shape(inputs));
    return shapes;
  }

  int32_t change_shapes(const std::vector<Extents>& inputs) {
    in_.clear(), out_.clear();
    for (size_t i = 0; i < inputs.size(); ++i)
      in_.push_back(described(inputs_[i].type, inputs[i], inputs[i]).desc);
    for (const Output& output : outputs_)
      out_.push_back(described(output.type, output.shape(inputs), output.shape(inputs)).desc);
    return runtime_side().onShapeChange(in_.data(), static_cast<int32_t>(in_.size()), out_.data(),
                                        static_cast<int32_t>(out_.size()));
  }

  // With as much workspace as was asked for, and a wall behind it. `off` bytes from alignment.
  int32_t enqueue(const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
                  size_t off = 0) {
    constexpr size_t kAligned = 256;
    Guarded<unsigned char> workspace((workspace_bytes_ + kAligned - 1) / kAligned * kAligned + off,
                                     0xff);
    unsigned char* const begin = workspace.data();
    void* const given = workspace_bytes_ > 0 || off > 0 ? begin : nullptr;
    const int32_t status = runtime_side().enqueue(in_.data(), out_.data(), inputs.data(),
                                                  outputs.data(), given, nullptr);
    check(std::all_of(begin + workspace_bytes_, begin + workspace.size(),
                      [](unsigned char byte) { return byte == 0xff; }),
          "wrote behind the workspace");
    return status;
  }

 private:
  struct Output {
    DataType type;
    std::vector<Expression::Value> sizes;
    std::vector<bool> is_known;

    Extents shape(const std::vector<Extents>& inputs) const {
      Extents shape;
      for (const Expression::Value& size : sizes) shape.push_back(size(inputs));
      return shape;
    }
  };

  static nvinfer1::DynamicPluginTensorDesc described(DataType type, const Extents& least,
                                                     const Extents& most) {
    nvinfer1::DynamicPluginTensorDesc tensor{};
    tensor.desc.type = type;
    tensor.desc.format = nvinfer1::TensorFormat::kLINEAR;
    tensor.desc.scale = 1;
    tensor.min = tensor.opt = dims_of(least), tensor.max = dims_of(most);
    tensor.desc.dims = tensor.max;
    for (size_t i = 0; i < least.size(); ++i)
      if (least[i] != most[i]) tensor.desc.dims.d[i] = -1;
    return tensor;
  }

  // One tensor after another, the later ones not yet known; false where a type is refused.
  bool choose_formats(const std::vector<nvinfer1::DynamicPluginTensorDesc>& tensors,
                      int32_t num_inputs, int32_t num_outputs) {
    auto& builds = build_side();
    std::vector<nvinfer1::DynamicPluginTensorDesc> asked = tensors;
    for (size_t i = 0; i < tensors.size(); ++i)
      asked[i].desc.type = DataType::kBOOL, asked[i].desc.format = nvinfer1::TensorFormat::kHWC;
    for (int32_t i = 0; i < num_inputs + num_outputs; ++i) {
      asked[i] = tensors[i];
      if (!builds.supportsFormatCombination(i, asked.data(), num_inputs, num_outputs)) return false;
      asked[i].desc.format = nvinfer1::TensorFormat::kCHW32;
      check(!builds.supportsFormatCombination(i, asked.data(), num_inputs, num_outputs),
            "takes a format that is not linear");
      Log::get().expect_nothing();
      asked[i] = tensors[i];
      for (const DataType other : {DataType::kFLOAT, DataType::kINT32, DataType::kINT64,
                                   DataType::kHALF, DataType::kBF16, DataType::kFP8}) {
        // The first of the tensors in T may have either.
        if (other == tensors[i].desc.type ||
            (i == 0 && is_half(other) && is_half(asked[i].desc.type)))
          continue;
        asked[i].desc.type = other;
        check(!builds.supportsFormatCombination(i, asked.data(), num_inputs, num_outputs),
              "takes another type");
        asked[i] = tensors[i];
      }
      Log::get().forget();
    }
    return true;
  }
  static bool is_half(DataType type) { return type == DataType::kHALF || type == DataType::kBF16; }

  std::string op_;
  std::vector<TensorRange> inputs_;
  std::vector<Output> outputs_;
  Expressions expressions_;
  PluginPointer plugin_;
  size_t workspace_bytes_ = 0;
  std::vector<nvinfer1::PluginTensorDesc> in_, out_;
};

#endif  // DUSTIN_TESTS_PLAYER_H_

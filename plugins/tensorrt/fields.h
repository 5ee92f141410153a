// The attributes of a plugin node.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace dustin::tensorrt {

// A field that an op knows.
struct FieldKind {
  const char* name;
  nvinfer1::PluginFieldType type;  // kINT32 or kFLOAT32
  bool is_list = false;            // otherwise one number
  bool is_optional = false;
};

// The fields of one node, as they were given: the same collection makes the same plugin again.
class Fields {
 public:
  // Refuses what is unknown, missing, of another type or length, or out of range: integers are at
  // least 0 and floats positive.
  Fields(const std::vector<FieldKind>& kinds, const nvinfer1::PluginFieldCollection* given);
  Fields(Fields&&) = default;

  bool has(const char* name) const { return find(name) != nullptr; }
  int32_t integer(const char* name) const { return integers(name).front(); }
  int32_t integer(const char* name, int32_t otherwise) const {
    return has(name) ? integer(name) : otherwise;
  }
  float number(const char* name) const { return find(name)->floats.front(); }
  // Empty where there is no such field.
  std::vector<int32_t> integers(const char* name) const {
    return has(name) ? find(name)->integers : std::vector<int32_t>();
  }

  const nvinfer1::PluginFieldCollection& collection() const { return collection_; }

 private:
  struct Value {
    FieldKind kind;
    std::vector<int32_t> integers;  // one of the two is empty
    std::vector<float> floats;
  };

  const Value* find(const char* name) const;

  std::vector<Value> values_;
  std::vector<nvinfer1::PluginField> fields_;  // of the values
  nvinfer1::PluginFieldCollection collection_;
};

}  // namespace dustin::tensorrt

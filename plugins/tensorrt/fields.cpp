#include "fields.h"

#include <cmath>
#include <cstring>

#include "status.h"

namespace dustin::tensorrt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

std::string wanted(const FieldKind& kind) {
  const char* const type = kind.type == PluginFieldType::kINT32 ? "int32" : "float32";
  return std::string(kind.is_list ? "a list of " : "one ") + type;
}

const FieldKind& kind_of(const char* name, const std::vector<FieldKind>& kinds) {
  std::string known;
  for (const FieldKind& kind : kinds) {
    if (!std::strcmp(kind.name, name)) return kind;
    known += std::string(known.empty() ? "" : ", ") + kind.name;
  }
  refuse("there is no field '", name, "'; write one of: ", known);
}

void check_form(const PluginField& field, const FieldKind& kind) {
  if (field.type != kind.type)
    refuse("field '", kind.name, "' has another type: write ", wanted(kind));
  if (field.length < 1 || (field.length > 1 && !kind.is_list))
    refuse("field '", kind.name, "' has ", field.length, " numbers: write ", wanted(kind));
  if (!field.data) refuse("field '", kind.name, "' has no data: write ", wanted(kind));
}

}  // namespace

Fields::Fields(const std::vector<FieldKind>& kinds, const nvinfer1::PluginFieldCollection* given) {
  for (int32_t i = 0; given && i < given->nbFields; ++i) {
    const PluginField& field = given->fields[i];
    const FieldKind& kind = kind_of(field.name ? field.name : "", kinds);
    if (has(kind.name)) refuse("field '", kind.name, "' is there twice: write it once");
    check_form(field, kind);
    Value value{kind, {}, {}};
    if (kind.type == PluginFieldType::kINT32) {
      const int32_t* const data = static_cast<const int32_t*>(field.data);
      value.integers.assign(data, data + field.length);
    } else {
      const float* const data = static_cast<const float*>(field.data);
      value.floats.assign(data, data + field.length);
    }
    for (const int32_t x : value.integers)
      if (x < 0) refuse("field '", kind.name, "' has ", x, ": write 0 or more");
    for (const float x : value.floats)
      if (!(std::isfinite(x) && x > 0))
        refuse("field '", kind.name, "' is ", x, ": write a positive number");
    values_.push_back(std::move(value));
  }
  for (const FieldKind& kind : kinds)
    if (!kind.is_optional && !has(kind.name))
      refuse("field '", kind.name, "' is missing: write ", wanted(kind));
  for (const Value& value : values_) {
    const bool is_integer = value.kind.type == PluginFieldType::kINT32;
    const void* data = value.integers.data();
    if (!is_integer) data = value.floats.data();
    const size_t length = is_integer ? value.integers.size() : value.floats.size();
    fields_.emplace_back(value.kind.name, data, value.kind.type, static_cast<int32_t>(length));
  }
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

const Fields::Value* Fields::find(const char* name) const {
  for (const Value& value : values_)
    if (!std::strcmp(value.kind.name, name)) return &value;
  return nullptr;
}

}  // namespace dustin::tensorrt

#include "signature.h"

#include <climits>
#include <cstring>

#include "status.h"

namespace dustin::tensorrt {
namespace {

std::string text_of(const Axis& axis) {
  if (!axis.name) return std::to_string(axis.number);
  return axis.factor ? std::string(axis.name) + "*" + axis.factor : axis.name;
}

}  // namespace

std::string written(const std::vector<Axis>& axes) {
  std::string text;
  for (const Axis& axis : axes) text += (text.empty() ? "" : ", ") + text_of(axis);
  return "[" + text + "]";
}

void Sizes::add(const Tensor& tensor, const std::vector<int64_t>& dims) {
  if (dims.size() != tensor.axes.size())
    refuse(tensor.name, " has ", dims.size(), " dimensions, it should be ", written(tensor.axes));
  for (size_t i = 0; i < dims.size(); ++i) {
    const Axis& axis = tensor.axes[i];
    if (dims[i] == kUnknown) continue;
    if (dims[i] > INT_MAX)
      refuse("axis ", i, " of ", tensor.name, " is ", dims[i], ", more than the kernels count");
    if (!axis.name) {
      if (dims[i] != axis.number)
        refuse("axis ", i, " of ", tensor.name, " is ", dims[i], ", it should be ", axis.number,
               ": ", written(tensor.axes));
    } else if (const Size* const known = find(axis.name)) {
      if (dims[i] != known->value)
        refuse(axis.name, " is ", known->value, " in ", known->first->name, " and ", dims[i],
               " in ", tensor.name, " ", written(tensor.axes));
    } else {
      sizes_.push_back({axis.name, dims[i], &tensor});
    }
  }
}

int64_t Sizes::operator[](const char* name) const {
  const Size* const size = find(name);
  return size ? size->value : kUnknown;
}

const Sizes::Size* Sizes::find(const char* name) const {
  for (const Size& size : sizes_)
    if (!std::strcmp(size.name, name)) return &size;
  return nullptr;
}

}  // namespace dustin::tensorrt

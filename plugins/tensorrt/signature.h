// The tensors of an op, written as its documentation writes them: q is T [B, w, Hq, D].
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace dustin::tensorrt {

// kModel is fp16 or bf16, the same for all such tensors of a node.
enum class Element { kModel, kInt32, kFloat32 };

// One axis: a size with a name, the product of two of them, or a number.
struct Axis {
  Axis(const char* name, const char* factor = nullptr) : name(name), factor(factor) {}
  Axis(int32_t number) : number(number) {}

  const char* name = nullptr;
  const char* factor = nullptr;
  int32_t number = 0;
};

struct Tensor {
  std::string name;
  Element element;
  std::vector<Axis> axes;
};

struct Signature {
  std::vector<Tensor> inputs, outputs;
};

constexpr int64_t kUnknown = -1;

// What the named sizes are. A name stands for the same size in all tensors.
class Sizes {
 public:
  // Takes what is known of a tensor's dimensions (the others are kUnknown); refuses what does not
  // fit.
  void add(const Tensor& tensor, const std::vector<int64_t>& dims);

  int64_t operator[](const char* name) const;  // or kUnknown

 private:
  struct Size {
    const char* name;
    int64_t value;
    const Tensor* first;  // that has it
  };

  const Size* find(const char* name) const;

  std::vector<Size> sizes_;
};

// "[B, w, Hq, D]"
std::string written(const std::vector<Axis>& axes);

}  // namespace dustin::tensorrt

// Paged caches and rows of heads: from TensorRT's descriptions to those of the C ABI.
#pragma once

#include <limits>
#include <optional>

#include "dustin/kernels.h"
#include "op.h"

namespace dustin::tensorrt {

inline int32_t size_of(const nvinfer1::PluginTensorDesc& tensor, int axis) {
  return static_cast<int32_t>(tensor.dims.d[axis]);
}

inline DustinDtype dtype_of(const nvinfer1::PluginTensorDesc& tensor) {
  return tensor.type == nvinfer1::DataType::kHALF ? DUSTIN_FLOAT16 : DUSTIN_BFLOAT16;
}

// [B, rows, heads, D], contiguous.
DustinRows rows_of(const nvinfer1::PluginTensorDesc& tensor, const void* data);

// A cache of keys, or of values, alone, and a pool that interleaves layers, keys and values.
inline const std::vector<Axis> kCacheAxes = {"pages", "Hkv", "page_size", "D"};
inline const std::vector<Axis> kPoolAxes = {"pages", "layers", 2, "Hkv", "page_size", "D"};

// The cache that begins at `k` and `v`; without its batch.
DustinKvCache separate_cache(const nvinfer1::PluginTensorDesc& keys, const void* k, const void* v);
// One layer of a pool.
DustinKvCache pooled_cache(const nvinfer1::PluginTensorDesc& pool, const void* data, int32_t layer);
// The batch: page_table [B, M] and lengths [B] are inputs `first` and the next.
void add_batch(DustinKvCache& cache, const Call& call, int first);

// Refuses a head size that the kernels do not take.
void check_head_size(const Sizes& sizes);
// Refuses a layer that a pool does not have.
void check_layer(const Sizes& sizes, int32_t layer, const char* field);

// The inputs k_cache and v_cache, or one pool, and page_table and lengths behind them.
class CacheInputs {
 public:
  static constexpr FieldKind kField = {"pool_layer", nvinfer1::PluginFieldType::kINT32, false,
                                       true};

  explicit CacheInputs(const Fields& fields) {
    if (fields.has(kField.name)) layer_ = fields.integer(kField.name);
  }

  int count() const { return layer_ ? 1 : 2; }  // of caches
  int count_all() const { return count() + 2; }
  std::vector<Tensor> caches() const;
  void append_to(std::vector<Tensor>& inputs) const;
  void check(const Sizes& sizes) const;
  // Where the first of them is input `first`.
  DustinKvCache view(const Call& call, int first) const;

 private:
  std::optional<int32_t> layer_;
};

// TensorRT does not say how large the workspace is that it hands over: as large as the plugin asked
// for at the profile's largest sizes, which is enough for all others.
constexpr int64_t kAsAskedFor = std::numeric_limits<int64_t>::max();

}  // namespace dustin::tensorrt

#include "paged.h"

#include <algorithm>
#include <iterator>

#include "status.h"
#include "supported.h"

namespace dustin::tensorrt {
namespace {

constexpr int kElementBytes = 2;

// Of [..., Hkv, page_size, D] that begins with the axis `heads`.
DustinKvCache cache_of(const nvinfer1::PluginTensorDesc& tensor, int heads) {
  DustinKvCache cache{};
  cache.dtype = dtype_of(tensor);
  cache.num_pages = size_of(tensor, 0);
  cache.num_kv_heads = size_of(tensor, heads);
  cache.page_size = size_of(tensor, heads + 1);
  cache.head_dim = size_of(tensor, heads + 2);
  cache.token_stride = cache.head_dim;
  cache.head_stride = cache.token_stride * cache.page_size;
  cache.page_stride = cache.head_stride * cache.num_kv_heads;
  return cache;
}

// The C ABI has no const for memory that some ops write.
char* bytes_of(const void* data) { return static_cast<char*>(const_cast<void*>(data)); }

}  // namespace

DustinRows rows_of(const nvinfer1::PluginTensorDesc& tensor, const void* data) {
  DustinRows rows{};
  rows.data = bytes_of(data);
  rows.head_stride = tensor.dims.d[3];
  rows.row_stride = rows.head_stride * tensor.dims.d[2];
  rows.batch_stride = rows.row_stride * tensor.dims.d[1];
  return rows;
}

DustinKvCache separate_cache(const nvinfer1::PluginTensorDesc& keys, const void* k, const void* v) {
  DustinKvCache cache = cache_of(keys, 1);
  cache.k = bytes_of(k);
  cache.v = bytes_of(v);
  return cache;
}

DustinKvCache pooled_cache(const nvinfer1::PluginTensorDesc& pool, const void* data,
                           int32_t layer) {
  DustinKvCache cache = cache_of(pool, 3);
  const int64_t block = cache.page_stride;  // one layer's keys, or values, of a page
  cache.page_stride = pool.dims.d[1] * 2 * block;
  cache.k = bytes_of(data) + layer * 2 * block * kElementBytes;
  cache.v = bytes_of(data) + (layer * 2 + 1) * block * kElementBytes;
  return cache;
}

void add_batch(DustinKvCache& cache, const Call& call, int first) {
  const nvinfer1::PluginTensorDesc& table = call.in[first];
  cache.page_table = static_cast<const int32_t*>(call.inputs[first]);
  cache.lengths = static_cast<const int32_t*>(call.inputs[first + 1]);
  cache.batch = size_of(table, 0);
  cache.max_pages = size_of(table, 1);
  cache.page_table_stride = cache.max_pages;
}

void check_head_size(const Sizes& sizes) {
  const int64_t dim = sizes["D"];
  const auto& known = cuda::kHeadDims;
  if (dim == kUnknown || std::find(std::begin(known), std::end(known), dim) != std::end(known))
    return;
  std::string all;
  for (const int size : known) all += " " + std::to_string(size);
  refuse("D, the head size, is ", dim, "; the kernels take", all);
}

void check_layer(const Sizes& sizes, int32_t layer, const char* field) {
  const int64_t layers = sizes["layers"];
  if (layers != kUnknown && layer >= layers)
    refuse("field '", field, "' has ", layer, ", the pool has ", layers, " layers");
}

std::vector<Tensor> CacheInputs::caches() const {
  if (layer_) return {{"pool", Element::kModel, kPoolAxes}};
  return {{"k_cache", Element::kModel, kCacheAxes}, {"v_cache", Element::kModel, kCacheAxes}};
}

void CacheInputs::append_to(std::vector<Tensor>& inputs) const {
  for (Tensor& cache : caches()) inputs.push_back(std::move(cache));
  inputs.push_back({"page_table", Element::kInt32, {"B", "M"}});
  inputs.push_back({"lengths", Element::kInt32, {"B"}});
}

void CacheInputs::check(const Sizes& sizes) const {
  check_head_size(sizes);
  if (layer_) check_layer(sizes, *layer_, kField.name);
}

DustinKvCache CacheInputs::view(const Call& call, int first) const {
  DustinKvCache cache =
      layer_ ? pooled_cache(call.in[first], call.inputs[first], *layer_)
             : separate_cache(call.in[first], call.inputs[first], call.inputs[first + 1]);
  add_batch(cache, call, first + count());
  return cache;
}

}  // namespace dustin::tensorrt

// Every op at small, awkward sizes, for compute-sanitizer: without torch it starts in no time.
//
//   nvcc -std=c++17 -Iplugins/include tests/gpu/driver.cu -o driver -Ldustin_trt/lib -ldustin_cuda
//
// With -DDUSTIN_EMULATED device memory is the host's, for the emulated library.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "dustin/kernels.h"

#ifdef DUSTIN_EMULATED
namespace {
void* allocate(size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
void to_device(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void to_host(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void wait() {}
void release(void* memory) { std::free(memory); }
}  // namespace
#else
#include <cuda_runtime.h>
namespace {
void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void* allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "cudaMalloc");
  return memory;
}
void to_device(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}
void to_host(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}
void wait() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
void release(void* memory) { check(cudaFree(memory), "cudaFree"); }
}  // namespace
#endif

namespace {

// Memory of exactly its size, so that a checker sees one element too many.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), memory_(allocate(bytes)) {}
  template <class T>
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size() * sizeof(T)) {
    to_device(memory_, values.data(), bytes_);
  }
  ~Buffer() { release(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return memory_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> values(bytes_ / sizeof(T));
    to_host(values.data(), memory_, bytes_);
    return values;
  }

 private:
  size_t bytes_;
  void* memory_;
};

uint32_t state = 1;

float draw() {  // in [-1, 1)
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

std::vector<uint16_t> bfloat16s(size_t count) {
  std::vector<uint16_t> values(count);
  for (auto& value : values) {
    const float x = draw();
    uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    value = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}

void must(int32_t status, const char* op) {
  if (status == DUSTIN_OK) return;
  std::fprintf(stderr, "%s: %s\n", op, dustin_last_error());
  std::exit(1);
}

struct Shape {
  int dim, heads, kv_heads, w, page_size;
  std::vector<int32_t> lengths;
};

void run(const Shape& s) {
  const int batch = static_cast<int>(s.lengths.size());
  int longest = 0;
  for (const int length : s.lengths) longest = length > longest ? length : longest;
  const int max_pages = (longest + s.w + s.page_size - 1) / s.page_size;
  const int pages = batch * max_pages;
  const size_t pool = size_t(pages) * s.kv_heads * s.page_size * s.dim;
  const Buffer k(bfloat16s(pool)), v(bfloat16s(pool));
  std::vector<int32_t> order(pages);
  for (int i = 0; i < pages; ++i) order[i] = (i * 11 + 3) % pages;  // 11 divides no count used here
  const Buffer table(order), lengths(s.lengths);

  DustinKvCache cache{};
  cache.k = k.data();
  cache.v = v.data();
  cache.page_table = table.as<int32_t>();
  cache.lengths = lengths.as<int32_t>();
  cache.page_stride = int64_t{s.kv_heads} * s.page_size * s.dim;
  cache.head_stride = int64_t{s.page_size} * s.dim;
  cache.token_stride = s.dim;
  cache.page_table_stride = max_pages;
  cache.dtype = DUSTIN_BFLOAT16;
  cache.batch = batch;
  cache.num_pages = pages;
  cache.num_kv_heads = s.kv_heads;
  cache.page_size = s.page_size;
  cache.head_dim = s.dim;
  cache.max_pages = max_pages;

  const auto rows_of = [&](const Buffer& buffer, int rows, int heads) {
    const int64_t row = int64_t{heads} * s.dim;
    return DustinRows{buffer.data(), rows * row, row, s.dim};
  };
  const size_t tokens = size_t(batch) * s.w;
  const Buffer new_k(bfloat16s(tokens * s.kv_heads * s.dim));
  const Buffer new_v(bfloat16s(tokens * s.kv_heads * s.dim));
  DustinKvAppendParams append{};
  append.cache = cache;
  append.k = rows_of(new_k, s.w, s.kv_heads);
  append.v = rows_of(new_v, s.w, s.kv_heads);
  append.rows = s.w;
  must(dustin_cuda_kv_append(&append, nullptr), "kv_append");

  const Buffer q(bfloat16s(tokens * s.heads * s.dim));
  std::vector<int32_t> kv_heads(s.heads);
  for (int h = 0; h < s.heads; ++h) kv_heads[h] = h / (s.heads / s.kv_heads);
  const int width = longest > 0 ? longest : 1;
  const Buffer scores(std::vector<float>(size_t(batch) * width, 0.0f));
  DustinSrhScoreParams score{};
  score.cache = cache;
  score.queries = rows_of(q, s.w, s.heads);
  score.kv_heads = kv_heads.data();
  score.scores = scores.as<float>();
  score.scores_stride = width;
  score.scores_width = width;
  score.rows = s.w;
  score.query_heads = s.heads;
  score.scale = 0.1f;
  const int64_t score_bytes = dustin_cuda_srh_score_workspace(&score);
  if (score_bytes < 0) must(DUSTIN_INVALID_ARGUMENT, "srh_score workspace");
  const Buffer score_space(static_cast<size_t>(score_bytes));
  must(dustin_cuda_srh_score(&score, score_space.data(), score_bytes, nullptr), "srh_score");

  const int budget = 40;
  const Buffer indices(size_t(batch) * budget * sizeof(int32_t)), counts(batch * sizeof(int32_t));
  DustinSelectTokensParams select{};
  select.target_scores = scores.as<float>();
  select.draft_scores = scores.as<float>();
  select.lengths = cache.lengths;
  select.indices = indices.as<int32_t>();
  select.counts = counts.as<int32_t>();
  select.target_stride = select.draft_stride = width;
  select.indices_stride = budget;
  select.target_width = select.draft_width = width;
  select.batch = batch;
  select.budget = budget;
  select.lookahead = 10;
  select.sink = 4;
  select.window = 16;
  must(dustin_cuda_select_tokens(&select, nullptr), "select_tokens");

  const Buffer out(tokens * s.heads * s.dim * sizeof(uint16_t));
  const Buffer lse(tokens * s.heads * sizeof(float));
  DustinSparseAttentionParams sparse{};
  sparse.attention.cache = cache;
  sparse.attention.q = rows_of(q, s.w, s.heads);
  sparse.attention.out = rows_of(out, s.w, s.heads);
  sparse.attention.lse = lse.as<float>();
  sparse.attention.rows = s.w;
  sparse.attention.heads = s.heads;
  sparse.attention.scale = 0.1f;
  sparse.indices = indices.as<int32_t>();
  sparse.counts = counts.as<int32_t>();
  sparse.indices_stride = budget;
  sparse.budget = budget;
  const int64_t sparse_bytes = dustin_cuda_sparse_attention_workspace(&sparse);
  if (sparse_bytes < 0) must(DUSTIN_INVALID_ARGUMENT, "sparse_attention workspace");
  const Buffer sparse_space(static_cast<size_t>(sparse_bytes));
  must(dustin_cuda_sparse_attention(&sparse, sparse_space.data(), sparse_bytes, nullptr),
       "sparse_attention");
  const int64_t dense_bytes = dustin_cuda_dense_attention_workspace(&sparse.attention);
  if (dense_bytes < 0) must(DUSTIN_INVALID_ARGUMENT, "dense_attention workspace");
  const Buffer dense_space(static_cast<size_t>(dense_bytes));
  must(dustin_cuda_dense_attention(&sparse.attention, dense_space.data(), dense_bytes, nullptr),
       "dense_attention");
  wait();

  for (const float value : lse.read<float>())
    if (!std::isfinite(value)) {
      std::fprintf(stderr, "head size %d: a log-sum-exp is not finite\n", s.dim);
      std::exit(1);
    }
  const auto chosen = counts.read<int32_t>();
  for (int b = 0; b < batch; ++b)
    if (chosen[b] != (s.lengths[b] < budget ? s.lengths[b] : budget)) {
      std::fprintf(stderr, "head size %d: row %d chose %d tokens\n", s.dim, b, chosen[b]);
      std::exit(1);
    }
}

}  // namespace

int main() {
  run({64, 4, 2, 5, 16, {0, 3, 300}});
  run({80, 16, 1, 1, 1, {41, 17, 1}});
  run({96, 6, 2, 3, 10, {64, 65}});
  run({128, 28, 4, 5, 16, {0, 100, 1000}});
  run({128, 8, 2, 40, 64, {129}});
  run({256, 2, 2, 16, 10, {39, 40, 41}});
  std::puts("driver ok");
  return 0;
}

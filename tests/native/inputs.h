// Random inputs of the kernels: caches, rows of heads, scores. What is no token is NaN.
#ifndef DUSTIN_TESTS_INPUTS_H_
#define DUSTIN_TESTS_INPUTS_H_

#include <algorithm>
#include <climits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "dustin/kernels.h"
#include "guarded.h"
#include "number.h"

// The standard's distributions differ between libraries; these do not.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int between(int low, int high) {
    return static_cast<int>(low + static_cast<int64_t>(engine_() % (int64_t{high} - low + 1)));
  }
  bool once_in(int n) { return between(1, n) == 1; }
  double uniform() { return (engine_() >> 11) * 0x1p-53; }
  // Nearly: four draws of 16 bits, with mean 0 and variance 1.
  double normal() {
    const uint64_t bits = engine_();
    const uint64_t sum =
        (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    return (static_cast<double>(sum) - 131070) / 37837;
  }
  template <typename T>
  const T& of(const std::vector<T>& choices) {
    return choices[between(0, static_cast<int>(choices.size()) - 1)];
  }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[engine_() % i]);
  }

 private:
  std::mt19937_64 engine_;
};

// Elements of one dtype, NaN at first.
class Array {
 public:
  Array(int32_t dtype, int64_t count) : dtype_(dtype), bytes_(count * size_of(dtype)) {
    for (int64_t i = 0; i < count; ++i) store(bytes_.data(), i, dtype, NAN);
  }
  double operator[](int64_t i) const { return load(bytes_.data(), i, dtype_); }
  void set(int64_t i, double x) { store(bytes_.data(), i, dtype_, static_cast<float>(x)); }
  void* at(int64_t i) { return bytes_.data() + i * size_of(dtype_); }
  std::vector<char> copy() const { return bytes_.copy(); }
  bool same_bytes(const std::vector<char>& other) const { return bytes_.same_bytes(other); }

 private:
  int32_t dtype_;
  Guarded<char> bytes_;
};

struct Shape {
  int32_t dtype = DUSTIN_FLOAT32;
  int head_dim = 64;
  int kv_heads = 2;
  int group = 1;  // query heads a KV head
  int page_size = 16;
  int rows = 1;                  // w
  int layout = 0;                // of cache and rows; see below
  double magnitude = 1;          // of queries and keys; their products keep their size
  std::vector<int32_t> lengths;  // B

  int batch() const { return static_cast<int>(lengths.size()); }
  int heads() const { return kv_heads * group; }
  float scale() const {
    return static_cast<float>(1 / std::sqrt(head_dim) / (magnitude * magnitude));
  }
};

constexpr int kLayouts = 4;

// [B, rows, heads, D]
class Rows {
 public:
  Rows(const Shape& shape, int rows, int heads) : batch_(shape.batch()), rows_(rows) {
    heads_ = heads, dim_ = shape.head_dim;
    view_.head_stride = dim_;
    view_.row_stride = heads * view_.head_stride;
    if (shape.layout == 1) {  // [B, heads, rows, D]
      view_.row_stride = dim_;
      view_.head_stride = rows * view_.row_stride;
    } else if (shape.layout == 2) {  // part of a fused projection
      view_.row_stride = (heads + 3) * view_.head_stride;
    } else if (shape.layout == 3) {  // aligned to nothing
      view_.head_stride = dim_ + 1;
      view_.row_stride = heads * view_.head_stride + 3;
    }
    view_.batch_stride =
        shape.layout == 1 ? heads * view_.head_stride : std::max(rows, 1) * view_.row_stride;
    const bool empty = batch_ * rows_ * heads_ == 0;
    const int64_t count = empty ? 0 : index(batch_ - 1, rows_ - 1, heads_ - 1) + dim_;
    elements_ = std::make_unique<Array>(shape.dtype, count);
    view_.data = elements_->at(0);
  }

  void randomize(Random& random, double magnitude) {
    each([&](int64_t i) { elements_->set(i, random.normal() * magnitude); });
  }
  // Whether everything but the heads themselves is as it was made.
  bool gaps_are_untouched() const {
    Array& elements = *elements_;
    const std::vector<char> now = elements.copy();
    each([&](int64_t i) { elements.set(i, NAN); });
    const bool untouched = elements.same_bytes(untouched_);
    if (!now.empty()) std::memcpy(elements.at(0), now.data(), now.size());
    return untouched;
  }
  void remember() { untouched_ = elements_->copy(); }

  int64_t index(int b, int row, int head) const {
    return b * view_.batch_stride + row * view_.row_stride + head * view_.head_stride;
  }
  double operator()(int b, int row, int head, int d) const {
    return (*elements_)[index(b, row, head) + d];
  }
  std::vector<double> values(int b, int row, int head) const {
    std::vector<double> all;
    for (int d = 0; d < dim_; ++d) all.push_back((*this)(b, row, head, d));
    return all;
  }
  const DustinRows& view() const { return view_; }
  DustinRows view_of(int b) const {
    DustinRows view = view_;
    view.data = elements_->at(index(b, 0, 0));
    return view;
  }
  const Array& elements() const { return *elements_; }

 private:
  template <typename Visit>
  void each(Visit visit) const {
    for (int b = 0; b < batch_; ++b)
      for (int row = 0; row < rows_; ++row)
        for (int head = 0; head < heads_; ++head)
          for (int d = 0; d < dim_; ++d) visit(index(b, row, head) + d);
  }

  int batch_, rows_, heads_, dim_;
  DustinRows view_{};
  std::unique_ptr<Array> elements_;
  std::vector<char> untouched_;
};

// A paged cache with `lengths` tokens a row and room for w more.
class Cache {
 public:
  Cache(const Shape& shape, Random& random) : page_size_(shape.page_size), lengths_(shape.lengths) {
    const int dim = shape.head_dim, heads = shape.kv_heads, batch = shape.batch();
    int longest = 0;
    for (const int length : shape.lengths) longest = std::max(longest, length);
    if (page_size_ == 0) page_size_ = std::max(1, longest + shape.rows);  // one page a row
    const int most = (longest + shape.rows + page_size_ - 1) / page_size_;
    const int max_pages = std::max(1, most + random.between(0, 2));

    std::vector<int32_t> pages(batch * max_pages + random.between(0, 2));
    std::iota(pages.begin(), pages.end(), 0);
    random.shuffle(pages);
    const int stride = max_pages + (shape.layout == 3 ? 3 : 0);
    std::vector<int32_t> table((std::max(batch, 1) - 1) * stride + max_pages, INT_MIN);
    int taken = 0;
    for (int b = 0; b < batch; ++b)
      for (int t = 0; t < shape.lengths[b] + shape.rows; t += page_size_)
        table[b * stride + t / page_size_] = pages[taken++];
    table_ = std::make_unique<Guarded<int32_t>>(table);

    const int num_pages = std::max<int>(1, pages.size());
    DustinKvCache& c = view_;
    c.token_stride = dim;
    c.head_stride = page_size_ * c.token_stride;
    c.page_stride = heads * c.head_stride;
    int64_t v_offset = 0;
    if (shape.layout == 1) {  // [pages, page_size, Hkv, D]
      c.head_stride = dim;
      c.token_stride = heads * c.head_stride;
    } else if (shape.layout == 2) {  // [pages, 2, Hkv, page_size, D]: keys and values interleaved
      v_offset = c.page_stride;
      c.page_stride *= 2;
    } else if (shape.layout == 3) {  // aligned to nothing
      c.token_stride = dim + 3;
      c.head_stride = page_size_ * c.token_stride + 1;
      c.page_stride = heads * c.head_stride + 5;
    }
    const int64_t count = (num_pages - 1) * c.page_stride + (heads - 1) * c.head_stride +
                          (page_size_ - 1) * c.token_stride + dim;
    keys_ = std::make_unique<Array>(shape.dtype, count + v_offset);
    if (v_offset == 0) values_ = std::make_unique<Array>(shape.dtype, count);
    c.k = keys_->at(0);
    c.v = values_ ? values_->at(0) : keys_->at(v_offset);
    c.page_table = table_->data();
    c.lengths = lengths_.data();
    c.page_table_stride = stride;
    c.dtype = shape.dtype;
    c.batch = batch;
    c.num_pages = num_pages;
    c.num_kv_heads = heads;
    c.page_size = page_size_;
    c.head_dim = dim;
    c.max_pages = max_pages;
    v_offset_ = v_offset;
  }

  // Tokens 0 ... lengths[b] + `more` - 1 of every row.
  void randomize(Random& random, int more, double magnitude) {
    for (int b = 0; b < view_.batch; ++b)
      for (int head = 0; head < view_.num_kv_heads; ++head)
        for (int t = 0; t < lengths_[b] + more; ++t)
          for (int d = 0; d < view_.head_dim; ++d) {
            set_k(b, head, t, d, random.normal() * magnitude);
            set_v(b, head, t, d, random.normal());
          }
  }

  int64_t index(int b, int head, int t, int d) const {
    const int64_t page = (*table_)[b * view_.page_table_stride + t / page_size_];
    return page * view_.page_stride + head * view_.head_stride +
           t % page_size_ * view_.token_stride + d;
  }
  double k(int b, int head, int t, int d) const { return (*keys_)[index(b, head, t, d)]; }
  double v(int b, int head, int t, int d) const {
    return (values_ ? *values_ : *keys_)[index(b, head, t, d) + v_offset_];
  }
  // Tokens 0 ... count - 1 of a head, [count, D].
  std::vector<double> keys(int b, int head, int count) const {
    std::vector<double> all;
    for (int t = 0; t < count; ++t)
      for (int d = 0; d < view_.head_dim; ++d) all.push_back(k(b, head, t, d));
    return all;
  }
  std::vector<double> values(int b, int head, int count) const {
    std::vector<double> all;
    for (int t = 0; t < count; ++t)
      for (int d = 0; d < view_.head_dim; ++d) all.push_back(v(b, head, t, d));
    return all;
  }
  void set_k(int b, int head, int t, int d, double x) { keys_->set(index(b, head, t, d), x); }
  void set_v(int b, int head, int t, int d, double x) {
    (values_ ? *values_ : *keys_).set(index(b, head, t, d) + v_offset_, x);
  }

  DustinKvCache& view() { return view_; }
  DustinKvCache view_of(int b) const {
    DustinKvCache view = view_;
    view.page_table += b * view.page_table_stride;
    view.lengths += b;
    view.batch = 1;
    return view;
  }
  int length(int b) const { return lengths_[b]; }
  Guarded<int32_t>& lengths() { return lengths_; }
  Guarded<int32_t>& table() { return *table_; }

  std::vector<char> copy() const {
    std::vector<char> bytes = keys_->copy();
    if (values_) {
      const std::vector<char> values = values_->copy();
      bytes.insert(bytes.end(), values.begin(), values.end());
    }
    return bytes;
  }
  void restore(const std::vector<char>& bytes) {
    const size_t keys = keys_->copy().size();
    std::memcpy(keys_->at(0), bytes.data(), keys);
    if (values_) std::memcpy(values_->at(0), bytes.data() + keys, bytes.size() - keys);
  }

 private:
  int page_size_;
  int64_t v_offset_ = 0;
  Guarded<int32_t> lengths_;
  std::unique_ptr<Guarded<int32_t>> table_;
  std::unique_ptr<Array> keys_, values_;  // values_ is null where both are interleaved
  DustinKvCache view_{};
};

#endif  // DUSTIN_TESTS_INPUTS_H_

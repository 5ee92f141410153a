// The TensorRT plugins over the emulated kernels: built, serialised and run as TensorRT does it,
// against plain loops; and what they refuse.
//
//   test_plugins [seed]

#include <climits>
#include <cstdio>
#include <cstdlib>

#include "expect.h"
#include "inputs.h"
#include "player.h"
#include "reference.h"

void test_refusals();

namespace {

using Layer = std::optional<int>;  // of a pool; without, keys and values have caches of their own

DataType type_of(int32_t dtype) {
  return dtype == DUSTIN_FLOAT16 ? DataType::kHALF : DataType::kBF16;
}

// Weights are rounded to the dtype before they meet the values.
double out_tolerance(int32_t dtype) { return dtype == DUSTIN_FLOAT16 ? 1.5e-3 : 1.2e-2; }

struct Argument {
  DataType type;
  Extents extents;
  const void* data;
};

// What one execution hands over, and what should come of it.
class Case {
 public:
  virtual ~Case() = default;
  virtual void expect() const = 0;

  std::string what;
  std::vector<Argument> inputs;
  std::vector<void*> outputs;
  std::vector<Extents> output_extents;
};
using Cases = std::vector<std::unique_ptr<Case>>;

// Builds a plugin whose profile holds all cases, and runs them one after another in one context.
void play(const std::string& op, const FieldList& fields, const Cases& cases) {
  Report::get().where = op + ", " + cases[0]->what;
  std::vector<TensorRange> ranges;
  for (const Argument& input : cases[0]->inputs)
    ranges.push_back({input.type, input.extents, input.extents});
  for (const auto& one : cases)
    for (size_t i = 0; i < ranges.size(); ++i)
      for (size_t j = 0; j < ranges[i].least.size(); ++j) {
        const int64_t extent = one->inputs[i].extents[j];
        ranges[i].least[j] = std::min(ranges[i].least[j], extent);
        ranges[i].most[j] = std::max(ranges[i].most[j], extent);
      }
  Node node(op, fields, ranges);
  const bool built = node.build();
  Log::get().expect_nothing();
  if (!check(built, "refused")) return;
  node.deserialize(fields);
  node.attach();
  for (const auto& one : cases) {
    Report::get().where = op + ", " + one->what;
    std::vector<Extents> extents;
    std::vector<const void*> data;
    for (const Argument& input : one->inputs) {
      extents.push_back(input.extents);
      data.push_back(input.data);
    }
    check(node.output_extents(extents) == one->output_extents, "other extents come out");
    check(node.change_shapes(extents) == 0, "refused a change of shapes");
    const bool ran = node.enqueue(data, one->outputs) == 0;
    Log::get().expect_nothing();
    if (check(ran, "enqueue failed")) one->expect();
  }
}

// What a node gets of paged caches: one's keys and values, or a pool in which caches are layers
// between others, which are NaN.
class Pool {
 public:
  static constexpr int kLayers = 5;

  explicit Pool(Cache& cache, int32_t dtype)
      : dtype_(dtype),
        extents_{
            cache.view().num_pages, kLayers, 2, cache.view().num_kv_heads, cache.view().page_size,
            cache.view().head_dim},
        block_(cache.view().page_stride),
        elements_(dtype, extents_[0] * kLayers * 2 * block_) {}

  void take(Cache& cache, int layer) {
    const int64_t bytes = block_ * size_of(dtype_);
    for (int64_t page = 0; page < extents_[0]; ++page) {
      void* const here = elements_.at((page * kLayers + layer) * 2 * block_);
      std::memcpy(here, static_cast<const char*>(cache.view().k) + page * bytes, bytes);
      std::memcpy(static_cast<char*>(here) + bytes,
                  static_cast<const char*>(cache.view().v) + page * bytes, bytes);
    }
  }
  Argument argument() { return {type_of(dtype_), extents_, elements_.at(0)}; }
  std::vector<char> copy() const { return elements_.copy(); }

 private:
  int32_t dtype_;
  Extents extents_;
  int64_t block_;
  Array elements_;
};

std::unique_ptr<Pool> pool_of(Cache& cache, const Shape& shape, Layer layer) {
  if (!layer) return nullptr;
  auto pool = std::make_unique<Pool>(cache, shape.dtype);
  pool->take(cache, *layer);
  return pool;
}

Argument cache_argument(const Shape& shape, Cache& cache, const void* data) {
  const DustinKvCache& c = cache.view();
  return {type_of(shape.dtype), {c.num_pages, c.num_kv_heads, c.page_size, c.head_dim}, data};
}

std::vector<Argument> cache_arguments(const Shape& shape, Cache& cache, Pool* pool) {
  if (pool) return {pool->argument()};
  return {cache_argument(shape, cache, cache.view().k),
          cache_argument(shape, cache, cache.view().v)};
}

std::vector<Argument> batch_arguments(Cache& cache) {
  const DustinKvCache& c = cache.view();
  return {{DataType::kINT32, {c.batch, c.max_pages}, c.page_table},
          {DataType::kINT32, {c.batch}, c.lengths}};
}

Argument rows_argument(const Shape& shape, const Rows& rows, int heads) {
  return {
      type_of(shape.dtype), {shape.batch(), shape.rows, heads, shape.head_dim}, rows.view().data};
}

void append(std::vector<Argument>& all, const std::vector<Argument>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

FieldList attention_fields(const Shape& shape, Layer layer) {
  FieldList fields;
  fields.number("scale", shape.scale());
  if (layer) fields.integers("pool_layer", {*layer});
  return fields;
}

// ---- the ops ----

class AppendCase : public Case {
 public:
  AppendCase(const Shape& shape, Random& random, Layer layer)
      : cache_(shape, random),
        k_(shape, shape.rows, shape.kv_heads),
        v_(shape, shape.rows, shape.kv_heads) {
    what = describe("append", shape);
    cache_.randomize(random, 0, 1);
    k_.randomize(random, 1), v_.randomize(random, 1);
    pool_ = pool_of(cache_, shape, layer);
    const std::vector<char> before = cache_.copy();
    for (int b = 0; b < shape.batch(); ++b)
      for (int row = 0; row < shape.rows; ++row)
        for (int head = 0; head < shape.kv_heads; ++head)
          for (int d = 0; d < shape.head_dim; ++d) {
            cache_.set_k(b, head, cache_.length(b) + row, d, k_(b, row, head, d));
            cache_.set_v(b, head, cache_.length(b) + row, d, v_(b, row, head, d));
          }
    want_ = pool_ ? pool_of(cache_, shape, layer)->copy() : cache_.copy();
    cache_.restore(before);

    const std::vector<Argument> caches = cache_arguments(shape, cache_, pool_.get());
    inputs = {rows_argument(shape, k_, shape.kv_heads), rows_argument(shape, v_, shape.kv_heads)};
    append(inputs, caches);
    append(inputs, batch_arguments(cache_));
    for (const Argument& cache : caches) {
      outputs.push_back(const_cast<void*>(cache.data));
      output_extents.push_back(cache.extents);
    }
  }
  void expect() const override {
    check((pool_ ? pool_->copy() : cache_.copy()) == want_, "the cache is not what it should be");
  }

 private:
  Cache cache_;
  Rows k_, v_;
  std::unique_ptr<Pool> pool_;
  std::vector<char> want_;
};

class AttentionCase : public Case {
 public:
  // Sparse where there is a budget: every third row then reads everything.
  AttentionCase(const Shape& shape, Random& random, Layer layer, std::optional<int> budget)
      : shape_(shape),
        cache_(shape, random),
        q_(shape, shape.rows, shape.heads()),
        out_(shape, shape.rows, shape.heads()) {
    what = describe(budget ? "sparse" : "dense", shape);
    cache_.randomize(random, shape.rows, 1);
    q_.randomize(random, 1);
    pool_ = pool_of(cache_, shape, layer);
    inputs = {rows_argument(shape, q_, shape.heads())};
    append(inputs, cache_arguments(shape, cache_, pool_.get()));
    append(inputs, batch_arguments(cache_));
    outputs = {out_.view().data};
    output_extents = {inputs[0].extents};

    std::vector<std::vector<int32_t>> read(shape.batch());
    for (int b = 0; b < shape.batch(); ++b) {
      read[b].resize(cache_.length(b));
      std::iota(read[b].begin(), read[b].end(), 0);
    }
    if (budget) choose(random, *budget, read);
    want_ = attend(shape, cache_, q_, read, shape.scale());
    before_ = cache_.copy();
  }
  void expect() const override {
    const double tolerance = out_tolerance(shape_.dtype);
    size_t i = 0;
    for (int b = 0; b < shape_.batch(); ++b)
      for (int head = 0; head < shape_.heads(); ++head)
        for (int row = 0; row < shape_.rows; ++row)
          for (int d = 0; d < shape_.head_dim; ++d)
            if (!near(out_(b, row, head, d), want_.out[i++], tolerance, tolerance, "out")) return;
    check(cache_.copy() == before_, "wrote to the cache");
  }

 private:
  void choose(Random& random, int budget, std::vector<std::vector<int32_t>>& read) {
    const int batch = shape_.batch();
    std::vector<int32_t> indices(batch * budget, INT_MIN), counts;
    int32_t most = 1;
    for (int b = 0; b < batch; ++b) {
      if (b % 3 != 2) {
        random.shuffle(read[b]);
        read[b].resize(std::min<size_t>(budget, read[b].size()));
        std::sort(read[b].begin(), read[b].end());
        std::copy(read[b].begin(), read[b].end(), indices.begin() + b * budget);
      }
      counts.push_back(static_cast<int32_t>(read[b].size()));
      most = std::max(most, counts.back());
    }
    indices_ = std::make_unique<Guarded<int32_t>>(indices);
    counts_ = std::make_unique<Guarded<int32_t>>(counts);
    append(inputs, {{DataType::kINT32, {batch, budget}, indices_->data()},
                    {DataType::kINT32, {batch}, counts_->data()},
                    {DataType::kINT32, {most}, unreadable_.data()}});
  }

  Shape shape_;
  Cache cache_;
  Rows q_, out_;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<Guarded<int32_t>> indices_, counts_;
  Guarded<int32_t> unreadable_{0};
  Attention want_;
  std::vector<char> before_;
};

struct Scoring {
  std::vector<int32_t> kv_heads, heads_per_cache, pool_layers;  // the last may be empty
  bool accumulate;
};

class ScoreCase : public Case {
 public:
  ScoreCase(const Shape& shape, Random& random, const Scoring& scoring)
      : lengths_(shape.lengths), accumulates_(scoring.accumulate) {
    what = describe("score", shape);
    Shape history = shape;
    history.rows = 0;  // pages end with the history
    const int heads = static_cast<int>(scoring.kv_heads.size()), dim = shape.head_dim;
    const int batch = shape.batch();
    queries_ = std::make_unique<Rows>(shape, shape.rows, heads);
    // The same page table for all.
    const Random tables = random;
    for (size_t i = 0; i < scoring.heads_per_cache.size(); ++i) {
      Random same = tables;
      caches_.push_back(std::make_unique<Cache>(history, same));
      caches_[i]->randomize(random, 0, 1);
    }
    const DustinKvCache& c = caches_[0]->view();
    width_ = scoring.accumulate ? *std::max_element(lengths_.begin(), lengths_.end()) + 3
                                : c.max_pages * c.page_size;
    before_.assign(batch * width_, 0);
    if (scoring.accumulate)
      for (float& score : before_) score = static_cast<float>(random.normal());
    want_.assign(before_.begin(), before_.end());

    int first = 0;
    for (size_t i = 0; i < caches_.size(); first += scoring.heads_per_cache[i++]) {
      const int count = scoring.heads_per_cache[i];
      Rows part(shape, shape.rows, count);
      part.randomize(random, 1);
      const int bytes = dim * size_of(shape.dtype);
      for (int b = 0; b < batch; ++b)
        for (int row = 0; row < shape.rows; ++row)
          for (int head = 0; head < count; ++head)
            std::memcpy(at(queries_->view(), queries_->index(b, row, first + head)),
                        at(part.view(), part.index(b, row, head)), bytes);
      const std::vector<int32_t> read(scoring.kv_heads.begin() + first,
                                      scoring.kv_heads.begin() + first + count);
      for (int b = 0; b < batch; ++b) {
        const std::vector<double> more =
            srh_scores(shape, *caches_[i], part, read, b, shape.scale());
        for (size_t t = 0; t < more.size(); ++t) want_[b * width_ + t] += more[t];
      }
    }

    scores_in_ = std::make_unique<Guarded<float>>(before_);
    scores_ = std::make_unique<Guarded<float>>(before_.size(), NAN);
    inputs = {rows_argument(shape, *queries_, heads)};
    append(inputs, batch_arguments(*caches_[0]));
    if (accumulates_) inputs.push_back({DataType::kFLOAT, {batch, width_}, scores_in_->data()});
    if (!scoring.pool_layers.empty()) {
      pool_ = std::make_unique<Pool>(*caches_[0], shape.dtype);
      for (size_t i = 0; i < caches_.size(); ++i) pool_->take(*caches_[i], scoring.pool_layers[i]);
      inputs.push_back(pool_->argument());
    } else {
      for (const auto& cache : caches_)
        inputs.push_back(cache_argument(shape, *cache, cache->view().k));
    }
    outputs = {scores_->data()};
    output_extents = {{batch, width_}};
  }
  void expect() const override {
    for (size_t b = 0; b < lengths_.size(); ++b)
      for (int t = 0; t < width_; ++t) {
        const size_t i = b * width_ + t;
        if (t >= lengths_[b]
                ? !check((*scores_)[i] == before_[i], "a score past the history is another")
                : !near((*scores_)[i], want_[i], 2e-5, 2e-6, "score"))
          return;
      }
    check(scores_in_->same_bytes(before_), "wrote to scores_in");
  }

 private:
  static void* at(const DustinRows& rows, int64_t element) {
    return static_cast<uint16_t*>(rows.data) + element;
  }

  std::vector<int32_t> lengths_;
  bool accumulates_;
  int width_;
  std::unique_ptr<Rows> queries_;
  std::vector<std::unique_ptr<Cache>> caches_;
  std::unique_ptr<Pool> pool_;
  std::vector<float> before_;
  std::vector<double> want_;
  std::unique_ptr<Guarded<float>> scores_in_, scores_;
};

class SelectCase : public Case {
 public:
  SelectCase(Random& random, const std::vector<int32_t>& lengths, Choice choice, int num_scores)
      : lengths_(lengths),
        indices_(lengths.size() * choice.budget, 77),
        counts_(lengths.size(), 77) {
    what = "select of " + std::to_string(lengths.size()) + " rows by " +
           std::to_string(num_scores) + " scores";
    const int64_t batch = static_cast<int64_t>(lengths.size());
    inputs = {{DataType::kINT32, {batch}, lengths_.data()}};
    const int longest = *std::max_element(lengths.begin(), lengths.end());
    std::vector<int> widths;
    for (int i = 0; i < num_scores; ++i) {
      widths.push_back(longest + random.between(0, 9));
      std::vector<float> scores(batch * widths[i]);
      for (float& score : scores) score = static_cast<float>(random.between(-99, 99));
      scores_.push_back(std::make_unique<Guarded<float>>(scores));
      inputs.push_back({DataType::kFLOAT, {batch, widths[i]}, scores_[i]->data()});
    }
    outputs = {indices_.data(), counts_.data()};
    output_extents = {{batch, choice.budget}, {batch}};
    for (int b = 0; b < batch; ++b) {
      std::optional<std::vector<float>> rows[2];
      for (int i = 0; i < num_scores; ++i) {
        const float* const row = scores_[i]->data() + b * widths[i];
        rows[i].emplace(row, row + widths[i]);
      }
      std::vector<int32_t> tokens = select(rows[0], rows[1], lengths[b], choice);
      want_counts_.push_back(static_cast<int32_t>(tokens.size()));
      tokens.resize(choice.budget, -1);
      want_.insert(want_.end(), tokens.begin(), tokens.end());
    }
  }
  void expect() const override {
    check(counts_.same_bytes(want_counts_), "other counts");
    check(indices_.same_bytes(want_), "other tokens");
  }

 private:
  Guarded<int32_t> lengths_, indices_, counts_;
  std::vector<std::unique_ptr<Guarded<float>>> scores_;
  std::vector<int32_t> want_, want_counts_;
};

// ---- what is played ----

// Another batch, other lengths and other numbers of new tokens of one model.
std::vector<Shape> shapes_of(Shape model, Random& random) {
  std::vector<Shape> shapes;
  for (int i = 0; i < 3; ++i) {
    model.rows = random.between(1, 6);
    model.lengths.clear();
    for (int b = random.between(1, 4); b > 0; --b)
      model.lengths.push_back(random.once_in(5) ? 0 : random.between(1, 90));
    shapes.push_back(model);
  }
  return shapes;
}

template <class Make>
Cases cases_of(const std::vector<Shape>& shapes, const Make& make) {
  Cases cases;
  for (const Shape& shape : shapes) cases.push_back(make(shape));
  return cases;
}

void test_model(const Shape& model, Random& random, Layer layer) {
  const std::vector<Shape> shapes = shapes_of(model, random);
  FieldList append_fields;
  if (layer) append_fields.integers("pool_layer", {*layer});
  play("DustinKvAppend", append_fields, cases_of(shapes, [&](const Shape& shape) {
         return std::make_unique<AppendCase>(shape, random, layer);
       }));
  const FieldList fields = attention_fields(model, layer);
  play("DustinDenseAttention", fields, cases_of(shapes, [&](const Shape& shape) {
         return std::make_unique<AttentionCase>(shape, random, layer, std::nullopt);
       }));
  play("DustinSparseAttention", fields, cases_of(shapes, [&](const Shape& shape) {
         return std::make_unique<AttentionCase>(shape, random, layer, random.between(1, 40));
       }));

  Scoring scoring{};
  for (int i = random.between(1, 3); i > 0; --i) {
    scoring.heads_per_cache.push_back(random.between(1, 5));
    if (layer) scoring.pool_layers.push_back((*layer + i) % Pool::kLayers);
    for (int head = scoring.heads_per_cache.back(); head > 0; --head)
      scoring.kv_heads.push_back(random.between(0, model.kv_heads - 1));
  }
  for (const bool accumulate : {false, true}) {
    scoring.accumulate = accumulate;
    FieldList score_fields;
    score_fields.number("scale", model.scale());
    score_fields.integers("kv_heads", scoring.kv_heads);
    score_fields.integers("heads_per_cache", scoring.heads_per_cache);
    if (accumulate || random.once_in(2)) score_fields.integers("accumulate", {accumulate});
    if (layer) score_fields.integers("pool_layers", scoring.pool_layers);
    play("DustinSrhScore", score_fields, cases_of(shapes, [&](const Shape& shape) {
           return std::make_unique<ScoreCase>(shape, random, scoring);
         }));
  }
}

void test_select(Random& random, int num_scores) {
  Choice choice{};
  choice.sink = random.between(0, 4);
  choice.window = random.between(0, 20);
  choice.budget = choice.sink + choice.window + random.between(1, 40);
  choice.lookahead = random.between(0, choice.budget);
  FieldList fields;
  fields.integers("budget", {choice.budget}).integers("lookahead", {choice.lookahead});
  fields.integers("sink", {choice.sink}).integers("window", {choice.window});
  Cases cases;
  for (int i = 0; i < 3; ++i) {
    std::vector<int32_t> lengths;
    for (int b = random.between(1, 4); b > 0; --b)
      lengths.push_back(random.between(0, random.of<int>({20, 200})));
    cases.push_back(std::make_unique<SelectCase>(random, lengths, choice, num_scores));
  }
  play("DustinSelectTokens", fields, cases);
}

// Histories that are cut into parts, and so need workspace, also in a profile whose largest number
// of new tokens needs none.
void test_long(Random& random) {
  Shape shape;
  shape.dtype = DUSTIN_BFLOAT16;
  shape.kv_heads = 1;
  shape.group = 4;
  shape.rows = 2;
  shape.lengths = {900, 1300, 2600};  // the last part of the last row is where workspace ends
  Shape prompt = shape;
  prompt.rows = 90;
  prompt.lengths = {30};
  for (const std::optional<int> budget : {std::optional<int>(), std::optional<int>(900)})
    for (const std::vector<Shape>& shapes : {std::vector{shape}, std::vector{shape, prompt}})
      play(budget ? "DustinSparseAttention" : "DustinDenseAttention",
           attention_fields(shape, std::nullopt), cases_of(shapes, [&](const Shape& one) {
             return std::make_unique<AttentionCase>(one, random, std::nullopt, budget);
           }));
}

}  // namespace

int main(int argc, char** argv) {
  Random random(argc > 1 ? std::atoi(argv[1]) : 1);
  setLoggerFinder(&Log::get());
  test_refusals();
  int turn = 0;
  for (const int32_t dtype : {DUSTIN_BFLOAT16, DUSTIN_FLOAT16})
    for (const int head_dim : {64, 80, 96, 128, 256})
      for (const bool pooled : {false, true}) {
        Shape model;
        model.dtype = dtype;
        model.head_dim = head_dim;
        model.kv_heads = random.between(1, 3);
        model.group = random.between(1, 4);
        model.page_size = random.of<int>({8, 16, 7});
        test_model(model, random, pooled ? Layer(turn % Pool::kLayers) : std::nullopt);
        ++turn;
      }
  for (int i = 0; i < 9; ++i) test_select(random, i % 3);
  test_long(random);
  const Report& report = Report::get();
  std::printf("TensorRT plugins: %ld checks, %ld wrong\n", report.checks, report.failures);
  return report.failures == 0 ? 0 : 1;
}

// The CUDA kernels under the emulator: every op against plain loops, in every order of threads.
//
//   test_cuda [random shapes] [seed] [op] [head size]

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "expect.h"
#include "inputs.h"
#include "reference.h"

extern "C" void emulator_configure(int32_t order, int32_t copies, uint64_t seed,
                                   int64_t shared_memory);

void test_refusals();

namespace {

struct Schedule {
  const char* name;
  int order, copies;
};

const std::vector<Schedule> kSchedules = {
    {"forward, copies at the wait", 0, 1},
    {"backward, copies at once", 1, 0},
    {"one warp at a time, copies at the wait", 3, 1},
    {"random", 2, 2},
    {"one warp at a time, copies at once", 3, 0},
};
// The last one is what every GPU has: two stages of heads of 64.
constexpr int64_t kSharedOfHopper = 227 << 10, kSharedOfAda = 99 << 10, kLeastShared = 48 << 10;

// `run` in every schedule; the first one is the one whose bits the others must repeat.
template <class Run>
void everywhere(const std::string& what, Random& random, const Run& run,
                int64_t shared = kSharedOfHopper) {
  for (size_t i = 0; i < kSchedules.size(); ++i) {
    const Schedule& s = kSchedules[i];
    Report::get().where = what + ", " + s.name;
    emulator_configure(s.order, s.copies, random.between(1, INT_MAX), shared);
    run(i == 0);
  }
}

// Device memory that a call may use, full of NaN.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(bytes), memory_((bytes + 255) / 256 * 256) {
    check(bytes >= 0, dustin_last_error());
    std::memset(memory_.data(), 0xff, memory_.size());
  }
  void* data() { return bytes_ > 0 ? memory_.data() : nullptr; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
  Guarded<char> memory_;
};

int32_t run(const DustinDenseAttentionParams& p) {
  Workspace workspace(dustin_cuda_dense_attention_workspace(&p));
  return dustin_cuda_dense_attention(&p, workspace.data(), workspace.bytes(), nullptr);
}
int32_t run(const DustinSparseAttentionParams& p) {
  Workspace workspace(dustin_cuda_sparse_attention_workspace(&p));
  return dustin_cuda_sparse_attention(&p, workspace.data(), workspace.bytes(), nullptr);
}
int32_t run(const DustinSrhScoreParams& p) {
  Workspace workspace(dustin_cuda_srh_score_workspace(&p));
  return dustin_cuda_srh_score(&p, workspace.data(), workspace.bytes(), nullptr);
}

// Weights are rounded to the dtype before they meet the values.
double out_tolerance(int32_t dtype) { return dtype == DUSTIN_FLOAT16 ? 1.5e-3 : 1.2e-2; }
constexpr double kLseTolerance = 3e-5;

bool same_row(const Rows& a, const Rows& b, const Shape& shape, int row_of_batch) {
  for (int row = 0; row < shape.rows; ++row)
    for (int head = 0; head < shape.heads(); ++head)
      for (int d = 0; d < shape.head_dim; ++d)
        if (a(row_of_batch, row, head, d) != b(row_of_batch, row, head, d)) return false;
  return true;
}

void test_attention(const Shape& shape, Random& random, int budget, float sharpness) {
  Cache cache(shape, random);
  cache.randomize(random, shape.rows, shape.magnitude);
  Rows q(shape, shape.rows, shape.heads());
  q.randomize(random, shape.magnitude);
  const float scale = shape.scale() * sharpness;

  const int batch = shape.batch(), stride = budget + random.between(0, 1) * 3;
  std::vector<int32_t> indices(batch * stride, INT_MIN), counts;
  std::vector<std::vector<int32_t>> all(batch), chosen(batch);
  int most = 0;
  for (int b = 0; b < batch; ++b) {
    all[b].resize(cache.length(b));
    std::iota(all[b].begin(), all[b].end(), 0);
    chosen[b] = all[b];
    if (b % 3 != 2) {  // every third row reads everything, whatever the budget
      random.shuffle(chosen[b]);
      const int room = std::min(budget, cache.length(b));
      chosen[b].resize(random.once_in(4) ? random.between(0, room) : room);
      std::sort(chosen[b].begin(), chosen[b].end());
      std::copy(chosen[b].begin(), chosen[b].end(), indices.begin() + b * stride);
    }
    counts.push_back(static_cast<int32_t>(chosen[b].size()));
    most = std::max(most, counts.back());
  }
  const Guarded<int32_t> listed(indices), counted(counts);
  const Attention dense_want = attend(shape, cache, q, all, scale);
  const Attention sparse_want = attend(shape, cache, q, chosen, scale);
  const double out_tol = out_tolerance(shape.dtype);
  const size_t heads = batch * shape.rows * shape.heads();
  const std::vector<char> cached = cache.copy();
  std::vector<char> dense_first, sparse_first;

  everywhere(
      describe("attention", shape) + "budget=" + std::to_string(budget), random,
      [&](bool first) {
        Rows dense(shape, shape.rows, shape.heads()), sparse(shape, shape.rows, shape.heads());
        dense.remember(), sparse.remember();
        Guarded<float> dense_lse(heads, NAN), sparse_lse(heads, NAN);
        DustinDenseAttentionParams params{};
        params.cache = cache.view();
        params.q = q.view();
        params.out = dense.view();
        params.lse = dense_lse.data();
        params.rows = shape.rows;
        params.heads = shape.heads();
        params.scale = scale;
        DustinSparseAttentionParams listing{};
        listing.attention = params;
        listing.attention.out = sparse.view();
        listing.attention.lse = sparse_lse.data();
        listing.indices = listed.data();
        listing.counts = counted.data();
        listing.indices_stride = stride;
        listing.budget = budget;
        listing.max_count = std::max(most, 1);
        succeeds(run(params));
        succeeds(run(listing));
        if (first) {
          expect_attention(shape, dense, dense_lse, dense_want, out_tol, kLseTolerance);
          Report::get().where += ", sparse";
          expect_attention(shape, sparse, sparse_lse, sparse_want, out_tol, kLseTolerance);
          dense_first = dense.elements().copy(), sparse_first = sparse.elements().copy();
          for (int b = 0; b < batch; ++b)
            if (counts[b] == cache.length(b))
              check(same_row(dense, sparse, shape, b), "differs from dense over the whole history");
          const int b = random.between(0, batch - 1);  // the same row without its neighbours
          params.cache = listing.attention.cache = cache.view_of(b);
          params.cache.max_length = listing.attention.cache.max_length = cache.length(b);
          params.q = listing.attention.q = q.view_of(b);
          Rows one(shape, shape.rows, shape.heads()), sparse_one(shape, shape.rows, shape.heads());
          params.out = one.view_of(b);
          listing.attention.out = sparse_one.view_of(b);
          params.lse = listing.attention.lse = nullptr;
          listing.indices += b * stride;
          listing.counts += b;
          succeeds(run(params));
          succeeds(run(listing));
          check(same_row(one, dense, shape, b), "dense depends on the row's neighbours");
          check(same_row(sparse_one, sparse, shape, b), "sparse depends on the row's neighbours");
        } else {
          check(dense.elements().same_bytes(dense_first), "dense depends on the order of threads");
          check(sparse.elements().same_bytes(sparse_first),
                "sparse depends on the order of threads");
        }
      },
      random.of<int64_t>({kSharedOfHopper, shape.head_dim <= 128 ? kSharedOfAda : kSharedOfHopper,
                          shape.head_dim == 64 ? kLeastShared : kSharedOfHopper}));
  check(cache.copy() == cached, "wrote to the cache");
}

void test_srh_score(const Shape& shape, Random& random, int query_heads) {
  Shape history = shape;
  history.rows = 0;  // pages end with the history: nobody may look at the next one
  Cache cache(history, random);
  cache.randomize(random, 0, shape.magnitude);
  Rows queries(shape, shape.rows, query_heads);
  queries.randomize(random, shape.magnitude);
  std::vector<int32_t> kv_heads(query_heads);
  // At times the last KV head alone.
  const int lowest = random.once_in(3) ? shape.kv_heads - 1 : 0;
  for (int32_t& head : kv_heads) head = random.between(lowest, shape.kv_heads - 1);
  const float scale = shape.scale();
  const int batch = shape.batch();
  const int width = *std::max_element(shape.lengths.begin(), shape.lengths.end()) + 3;
  const int stride = width + 1;
  std::vector<float> before(batch * stride);
  for (float& score : before) score = static_cast<float>(random.normal());
  std::vector<std::vector<double>> want;
  for (int b = 0; b < batch; ++b) {
    want.push_back(srh_scores(shape, cache, queries, kv_heads, b, scale));
    for (int t = 0; t < shape.lengths[b]; ++t) want[b][t] += before[b * stride + t];
  }
  std::vector<float> first_scores;
  everywhere(
      describe("srh_score", shape) + "P=" + std::to_string(query_heads), random, [&](bool first) {
        Guarded<float> scores(before);
        const Guarded<int32_t> heads(kv_heads);
        DustinSrhScoreParams params{};
        params.cache = cache.view();
        params.cache.v = nullptr;
        params.queries = queries.view();
        params.kv_heads = heads.data();
        params.scores = scores.data();
        params.scores_stride = stride;
        params.scores_width = width;
        params.rows = shape.rows;
        params.query_heads = query_heads;
        params.scale = scale;
        succeeds(run(params));
        for (int b = 0; b < batch; ++b)
          for (int t = 0; t < shape.lengths[b]; ++t)
            if (!near(scores[b * stride + t], want[b][t], 2e-5, 2e-6, "score")) return;
        const std::vector<float> after = scores.copy();
        if (first) {
          first_scores = after;
          const int b = random.between(0, batch - 1);
          Guarded<float> one(before);
          params.cache = cache.view_of(b);
          params.queries = queries.view_of(b);
          params.scores = one.data() + b * stride;
          succeeds(run(params));
          for (int t = 0; t < shape.lengths[b]; ++t)
            if (!check(one[b * stride + t] == after[b * stride + t], "depends on neighbours"))
              return;
        } else {
          check(scores.same_bytes(first_scores), "depends on the order of threads");
        }
        for (int b = 0; b < batch; ++b)  // what is no history stays as it was
          for (int t = 0; t < shape.lengths[b]; ++t)
            scores[b * stride + t] = before[b * stride + t];
        check(scores.same_bytes(before), "wrote past the history");
      });
}

void test_kv_append(const Shape& shape, Random& random) {
  Cache cache(shape, random);
  cache.randomize(random, 0, 1);
  Rows k(shape, shape.rows, shape.kv_heads), v(shape, shape.rows, shape.kv_heads);
  k.randomize(random, 1), v.randomize(random, 1);
  const std::vector<char> before = cache.copy();
  for (int b = 0; b < shape.batch(); ++b)
    for (int row = 0; row < shape.rows; ++row)
      for (int head = 0; head < shape.kv_heads; ++head)
        for (int d = 0; d < shape.head_dim; ++d) {
          cache.set_k(b, head, cache.length(b) + row, d, k(b, row, head, d));
          cache.set_v(b, head, cache.length(b) + row, d, v(b, row, head, d));
        }
  const std::vector<char> want = cache.copy();
  everywhere(describe("kv_append", shape), random, [&](bool) {
    cache.restore(before);
    DustinKvAppendParams params{};
    params.cache = cache.view();
    params.k = k.view();
    params.v = v.view();
    params.rows = shape.rows;
    succeeds(dustin_cuda_kv_append(&params, nullptr));
    check(cache.copy() == want, "the cache is not what it should be");
  });
}

constexpr int kScoreKinds = 6;

// A choice of `open` tokens beside sink and window, by one kind of scores.
void test_select_tokens(Random& random, int longest, int open, int kind, bool has_target,
                        bool has_draft) {
  const int batch = random.between(1, 3);
  Choice choice{};
  choice.sink = random.between(0, 8);
  choice.window = random.between(0, 40);
  choice.budget = choice.sink + choice.window + open;
  choice.lookahead = random.between(0, choice.budget);
  std::vector<int32_t> lengths;
  for (int b = 0; b < batch; ++b)
    lengths.push_back(b > 0 && random.once_in(4) ? random.between(0, choice.budget + 1)
                                                 : random.between(longest / 2, longest));
  const int width = *std::max_element(lengths.begin(), lengths.end()) + random.between(0, 3);
  const int stride = width + random.between(0, 3);
  const auto any_score = [&]() -> float {
    if (kind == 1) return 0.25f * static_cast<float>(random.between(-2, 2));  // ties
    if (kind == 2) return random.once_in(2) ? 0.0f : -0.0f;
    if (kind == 3 && random.once_in(5))
      return random.of<float>({NAN, -NAN, INFINITY, -INFINITY, 1e-40f, 3e38f});
    // Scores that differ in their last bits only.
    if (kind == 4) return float_of(bits_of(0.7f) + random.between(0, 5000));
    const double normal = random.normal();
    return static_cast<float>(kind == 5 ? -std::abs(normal) : normal);
  };
  std::vector<float> scores[2];
  for (std::vector<float>& some : scores)
    for (int i = 0; i < (batch - 1) * stride + width; ++i) some.push_back(any_score());
  const Guarded<float> target(scores[0]), draft(scores[1]);
  const Guarded<int32_t> histories(lengths);
  const int out_stride = choice.budget + random.between(0, 3);
  std::vector<int32_t> want((batch - 1) * out_stride + choice.budget, 77), want_counts;
  for (int b = 0; b < batch; ++b) {
    std::optional<std::vector<float>> row[2];
    if (has_target) row[0].emplace(target.data() + b * stride, target.data() + b * stride + width);
    if (has_draft) row[1].emplace(draft.data() + b * stride, draft.data() + b * stride + width);
    std::vector<int32_t> tokens = select(row[0], row[1], lengths[b], choice);
    want_counts.push_back(static_cast<int32_t>(tokens.size()));
    tokens.resize(choice.budget, -1);
    std::copy(tokens.begin(), tokens.end(), want.begin() + b * out_stride);
  }
  std::ostringstream what;
  what << "select_tokens kind=" << kind << " budget=" << choice.budget << " m=" << choice.lookahead
       << " sink=" << choice.sink << " window=" << choice.window << " target=" << has_target
       << " draft=" << has_draft << " lengths=";
  for (const int32_t length : lengths) what << length << " ";
  everywhere(what.str(), random, [&](bool) {
    Guarded<int32_t> indices(want.size(), 77), counts(batch, 77);
    DustinSelectTokensParams params{};
    params.target_scores = has_target ? target.data() : nullptr;
    params.draft_scores = has_draft ? draft.data() : nullptr;
    params.lengths = histories.data();
    params.indices = indices.data();
    params.counts = counts.data();
    params.target_stride = params.draft_stride = stride;
    params.indices_stride = out_stride;
    params.target_width = params.draft_width = width;
    params.batch = batch;
    params.budget = choice.budget;
    params.lookahead = choice.lookahead;
    params.sink = choice.sink;
    params.window = choice.window;
    succeeds(dustin_cuda_select_tokens(&params, nullptr));
    check(counts.same_bytes(want_counts), "other counts");
    check(indices.same_bytes(want), "other tokens");
  });
}

constexpr int kCudaLayouts = 3;  // of kLayouts; the last is aligned to nothing

int g_head_dim = 0;  // the only one to test; 0 for all

bool wanted(const char* op, const char* only) { return !only || !std::strcmp(op, only); }

void test_ops(const Shape& shape, Random& random, int budget, int query_heads, const char* only,
              float sharpness = 1) {
  if (g_head_dim != 0 && shape.head_dim != g_head_dim) return;
  if (wanted("attention", only)) test_attention(shape, random, budget, sharpness);
  if (wanted("srh_score", only) && shape.rows <= 16) test_srh_score(shape, random, query_heads);
  if (wanted("kv_append", only)) test_kv_append(shape, random);
}

// Every dtype with every head size in each of the attention kernel's three shapes.
void test_grid(Random& random, const char* only) {
  const std::vector<int> page_sizes = {16, 1, 7, 0};  // 0: one page a row
  int turn = 0;
  for (const int32_t dtype : {DUSTIN_BFLOAT16, DUSTIN_FLOAT16})
    for (const int head_dim : {64, 80, 96, 128, 256})
      for (const int query_rows : {7, 40, 68}) {
        Shape shape;
        shape.dtype = dtype;
        shape.head_dim = head_dim;
        shape.kv_heads = 1 + turn % 2;
        shape.group = query_rows == 7 ? 7 : query_rows == 40 ? 8 : 4;
        shape.rows = query_rows / shape.group;
        shape.page_size = page_sizes[turn % page_sizes.size()];
        shape.layout = turn % kCudaLayouts;
        shape.lengths = {random.between(1, 60), 0, random.between(60, 150)};
        test_ops(shape, random, random.between(0, 80), random.between(1, 9), only,
                 random.once_in(4) ? 4 : 1);
        ++turn;
      }
}

void test_random_shapes(Random& random, int count, const char* only) {
  for (int i = 0; i < count; ++i) {
    Shape shape;
    shape.dtype = random.once_in(2) ? DUSTIN_FLOAT16 : DUSTIN_BFLOAT16;
    shape.head_dim = random.of<int>({64, 64, 80, 96, 128, 128, 256});
    shape.kv_heads = random.between(1, 2);
    shape.group = random.between(1, 16);
    shape.page_size = random.once_in(3) ? random.between(1, 70) : random.of<int>({1, 16, 64, 0});
    shape.rows = random.once_in(6) ? random.between(17, 40) : random.between(1, 16);
    shape.layout = random.between(0, kCudaLayouts - 1);
    if (random.once_in(4)) shape.magnitude = 64;  // products that fp16 could not hold
    for (int b = random.between(0, 3); b >= 0; --b)
      shape.lengths.push_back(random.once_in(4) ? 0 : random.between(1, 200));
    test_ops(shape, random, random.between(0, 150), random.between(1, 20), only,
             random.once_in(4) ? 4 : 1);
  }
}

// Histories that are cut into parts, and scored in chunks.
void test_long(Random& random, const char* only) {
  Shape shape;
  shape.dtype = DUSTIN_BFLOAT16;
  shape.kv_heads = 1;
  shape.group = 3;
  shape.rows = 2;
  shape.lengths = {1022, 2600, 1300, 0};
  test_ops(shape, random, 1400, 5, only);
  shape.dtype = DUSTIN_FLOAT16;
  shape.kv_heads = 2;
  shape.group = 7;
  shape.rows = 5;
  shape.lengths = {700, 1500};
  test_ops(shape, random, 600, 14, only);
  shape.kv_heads = 1;
  shape.group = 4;
  shape.rows = 33;  // a prompt, in parts of 1056 keys: its new tokens make them two
  shape.lengths = {1040};
  test_ops(shape, random, 100, 1, only, 256);  // a part's weights may vanish beside another's
  shape.rows = 1;
  shape.lengths = {17000};  // more chunks than a warp has lanes
  if (wanted("srh_score", only)) test_srh_score(shape, random, 1);
}

}  // namespace

int main(int argc, char** argv) {
  const int shapes = argc > 1 ? std::atoi(argv[1]) : 12;
  Random random(argc > 2 ? std::atoi(argv[2]) : 1);
  const char* const only = argc > 3 ? argv[3] : nullptr;
  if (argc > 4) g_head_dim = std::atoi(argv[4]);
  if (wanted("refusals", only)) test_refusals();
  test_grid(random, only);
  test_random_shapes(random, shapes, only);
  test_long(random, only);
  if (wanted("select_tokens", only)) {
    for (const int longest : {10, 70, 300, 3000})
      for (int i = 0; i < shapes; ++i)
        test_select_tokens(random, longest, random.between(0, random.of<int>({0, 20, 200})),
                           i % kScoreKinds, i % 8 != 1 && i % 8 != 7, i % 8 != 2 && i % 8 != 7);
    // More words of bits than threads.
    for (const int open : {200, 0}) test_select_tokens(random, 80000, open, 1, true, true);
  }
  const Report& report = Report::get();
  std::printf("emulated CUDA kernels: %ld checks, %ld wrong\n", report.checks, report.failures);
  return report.failures == 0 ? 0 : 1;
}

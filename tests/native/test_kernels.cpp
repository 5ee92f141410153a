// Every op on every instruction set against plain loops, over a grid and random shapes.
//
//   test_kernels [random shapes] [seed]

#include <cstdio>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "expect.h"
#include "inputs.h"
#include "reference.h"

void test_errors();

namespace {

const std::vector<int32_t> kDtypes = {DUSTIN_FLOAT32, DUSTIN_FLOAT16, DUSTIN_BFLOAT16};
const std::vector<int> kHeadDims = {64, 80, 96, 128, 256, 24, 1, 33};
const std::vector<int> kPageSizes = {1, 7, 16, 0};  // 0: one page a row
const std::vector<int> kRows = {1, 5, 17, 33};

double out_tolerance(int32_t dtype) {
  return dtype == DUSTIN_FLOAT32 ? 1e-5 : dtype == DUSTIN_FLOAT16 ? 6e-4 : 5e-3;
}

double lse_tolerance(int32_t dtype) { return dtype == DUSTIN_BFLOAT16 ? 2e-4 : 1e-5; }

void test_attention(const Shape& shape, Random& random) {
  Cache cache(shape, random);
  cache.randomize(random, shape.rows, shape.magnitude);
  Rows q(shape, shape.rows, shape.heads());
  q.randomize(random, shape.magnitude);
  const float scale = shape.scale() * (random.once_in(4) ? 4 : 1);  // at times a sharp softmax

  const int batch = shape.batch();
  const int budget = random.between(0, random.once_in(3) ? 2000 : 80);
  const int stride = budget + random.between(0, 1) * 3;
  std::vector<int32_t> indices(batch == 0 ? 0 : (batch - 1) * stride + budget, INT_MIN), counts;
  std::vector<std::vector<int32_t>> all(batch), chosen(batch);
  for (int b = 0; b < batch; ++b) {
    all[b].resize(cache.length(b));
    std::iota(all[b].begin(), all[b].end(), 0);
    chosen[b] = all[b];
    random.shuffle(chosen[b]);
    const int most = std::min(budget, cache.length(b));
    chosen[b].resize(random.once_in(4) ? random.between(0, most) : most);
    if (!random.once_in(4)) std::sort(chosen[b].begin(), chosen[b].end());
    std::copy(chosen[b].begin(), chosen[b].end(), indices.begin() + b * stride);
    counts.push_back(static_cast<int32_t>(chosen[b].size()));
  }
  const Guarded<int32_t> listed(indices), counted(counts);
  const double out_tol = out_tolerance(shape.dtype), lse_tol = lse_tolerance(shape.dtype);
  const Attention dense_want = attend(shape, cache, q, all, scale);
  const Attention sparse_want = attend(shape, cache, q, chosen, scale);

  const size_t heads = batch * shape.rows * shape.heads();
  const std::vector<char> cached = cache.copy();
  std::vector<char> dense_alone, sparse_alone;
  everywhere(describe("attention", shape), [&](int threads) {
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
    succeeds(dustin_cpu_dense_attention(&params, threads));
    expect_attention(shape, dense, dense_lse, dense_want, out_tol, lse_tol);

    DustinSparseAttentionParams listing{};
    listing.attention = params;
    listing.attention.out = sparse.view();
    listing.attention.lse = sparse_lse.data();
    listing.indices = listed.data();
    listing.counts = counted.data();
    listing.indices_stride = stride;
    listing.budget = budget;
    succeeds(dustin_cpu_sparse_attention(&listing, threads));
    Report::get().where += ", sparse";
    expect_attention(shape, sparse, sparse_lse, sparse_want, out_tol, lse_tol);

    for (int b = 0; b < batch; ++b)
      if (counts[b] == cache.length(b))
        for (int row = 0; row < shape.rows; ++row)
          for (int head = 0; head < shape.heads(); ++head)
            for (int d = 0; d < shape.head_dim; ++d)
              if (!check(sparse(b, row, head, d) == dense(b, row, head, d),
                         "differs from dense over the whole history"))
                return;
    if (threads == 1) {
      dense_alone = dense.elements().copy(), sparse_alone = sparse.elements().copy();
      const int b = random.between(0, batch - 1);  // the same row without its neighbours
      params.cache = listing.attention.cache = cache.view_of(b);
      params.q = listing.attention.q = q.view_of(b);
      Rows one(shape, shape.rows, shape.heads()), sparse_one(shape, shape.rows, shape.heads());
      params.out = one.view_of(b);
      listing.attention.out = sparse_one.view_of(b);
      params.lse = listing.attention.lse = nullptr;
      listing.indices += b * stride;
      listing.counts += b;
      succeeds(dustin_cpu_dense_attention(&params, 1));
      succeeds(dustin_cpu_sparse_attention(&listing, 1));
      for (int row = 0; row < shape.rows; ++row)
        for (int head = 0; head < shape.heads(); ++head)
          for (int d = 0; d < shape.head_dim; ++d)
            if (!check(one(b, row, head, d) == dense(b, row, head, d) &&
                           sparse_one(b, row, head, d) == sparse(b, row, head, d),
                       "depends on the row's neighbours"))
              return;
    } else {
      check(dense.elements().same_bytes(dense_alone), "dense depends on the number of threads");
      check(sparse.elements().same_bytes(sparse_alone), "sparse depends on the number of threads");
    }
  });
  check(cache.copy() == cached, "attention wrote to the cache");
}

void test_srh_score(const Shape& shape, Random& random) {
  Cache cache(shape, random);
  cache.randomize(random, 0, shape.magnitude);
  std::vector<int32_t> kv_heads(random.between(1, 2 * shape.heads()));
  for (int32_t& kv_head : kv_heads) kv_head = random.between(0, shape.kv_heads - 1);
  const Guarded<int32_t> heads(kv_heads);
  Rows queries(shape, shape.rows, static_cast<int>(kv_heads.size()));
  queries.randomize(random, shape.magnitude);
  const float scale = shape.scale() * (random.once_in(4) ? 3 : 1);

  const int batch = shape.batch();
  const int width =
      *std::max_element(shape.lengths.begin(), shape.lengths.end()) + random.between(0, 1) * 5;
  const int stride = width + random.between(0, 1) * 3;
  std::vector<float> before((batch - 1) * stride + width, NAN);
  std::vector<std::vector<double>> want;
  for (int b = 0; b < batch; ++b) {
    want.push_back(srh_scores(shape, cache, queries, kv_heads, b, scale));
    for (int t = 0; t < shape.lengths[b]; ++t)
      want[b][t] += before[b * stride + t] = static_cast<float>(random.uniform());
  }
  if (random.once_in(2)) cache.view().v = nullptr;

  std::vector<float> alone;
  everywhere(describe("srh_score", shape), [&](int threads) {
    Guarded<float> scores(before);
    DustinSrhScoreParams params{};
    params.cache = cache.view();
    params.queries = queries.view();
    params.kv_heads = heads.data();
    params.scores = scores.data();
    params.scores_stride = stride;
    params.scores_width = width;
    params.rows = shape.rows;
    params.query_heads = static_cast<int32_t>(kv_heads.size());
    params.scale = scale;
    succeeds(dustin_cpu_srh_score(&params, threads));
    for (int b = 0; b < batch; ++b)
      for (int t = 0; t < shape.lengths[b]; ++t)
        if (!near(scores[b * stride + t], want[b][t], 2e-5, 1e-6, "score")) return;

    const std::vector<float> after = scores.copy();
    if (threads == 1) {
      alone = after;
      const int b = random.between(0, batch - 1);
      Guarded<float> one(before);
      params.cache = cache.view_of(b);
      params.queries = queries.view_of(b);
      params.scores = one.data() + b * stride;
      succeeds(dustin_cpu_srh_score(&params, 1));
      for (int t = 0; t < shape.lengths[b]; ++t)
        if (!check(one[b * stride + t] == scores[b * stride + t], "depends on neighbours")) return;
    } else {
      check(scores.same_bytes(alone), "depends on the number of threads");
    }
    for (int b = 0; b < batch; ++b)  // what is no history stays as it was
      for (int t = 0; t < shape.lengths[b]; ++t) scores[b * stride + t] = before[b * stride + t];
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
  everywhere(describe("kv_append", shape), [&](int threads) {
    cache.restore(before);
    DustinKvAppendParams params{};
    params.cache = cache.view();
    params.k = k.view();
    params.v = v.view();
    params.rows = shape.rows;
    succeeds(dustin_cpu_kv_append(&params, threads));
    check(cache.copy() == want, "the cache is not what it should be");
  });
}

void test_select_tokens(Random& random) {
  const int batch = random.between(1, 4);
  const int longest = random.of<int>({10, 70, 300, 3000});
  const bool has_target = !random.once_in(4), has_draft = !random.once_in(4);
  Choice choice{};
  choice.sink = random.between(0, 8);
  choice.window = random.between(0, 16);
  choice.budget = choice.sink + choice.window + random.between(0, random.of<int>({0, 20, 200}));
  choice.lookahead = random.between(0, choice.budget);

  std::vector<int32_t> lengths;
  for (int b = 0; b < batch; ++b)
    lengths.push_back(random.once_in(4) ? random.between(0, choice.budget + 1)
                                        : random.between(0, longest));
  const int width = *std::max_element(lengths.begin(), lengths.end()) + random.between(0, 3);
  const int stride = width + random.between(0, 3);
  const int kind = random.between(0, 3);
  const auto any_score = [&]() -> float {
    if (kind == 1) return 0.25f * static_cast<float>(random.between(-2, 2));  // ties
    if (kind == 2) return random.once_in(2) ? 0.0f : -0.0f;
    if (kind == 3 && random.once_in(5))
      return random.of<float>({NAN, -NAN, INFINITY, -INFINITY, 1e-40f, 3e38f});
    return static_cast<float>(random.normal());
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
  everywhere(what.str(), [&](int threads) {
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
    succeeds(dustin_cpu_select_tokens(&params, threads));
    check(counts.same_bytes(want_counts), "other counts");
    check(indices.same_bytes(want), "other tokens");
  });
}

void test_read_rows(Random& random) {
  const int row_words = 8 * random.between(1, 40), rows = random.between(1, 50);
  Guarded<uint64_t> memory(row_words * rows);
  for (uint64_t& word : memory) word = random.between(0, INT_MAX) * 0x9e3779b97f4a7c15u;
  std::vector<int64_t> order(random.between(0, 60));
  for (int64_t& row : order) row = random.between(0, rows - 1);
  const Guarded<int64_t> listed(order);
  uint64_t stream = 0, listing = 0;
  for (const uint64_t word : memory) stream += word;
  for (const int64_t row : order)
    for (int i = 0; i < row_words; ++i) listing += memory[row * row_words + i];
  everywhere("read_rows", [&](int threads) {
    uint64_t sum = 0;
    succeeds(dustin_cpu_read_rows(memory.data(), 8 * row_words, nullptr, rows, &sum, threads));
    check(sum == stream, "other sum of the stream");
    succeeds(dustin_cpu_read_rows(memory.data(), 8 * row_words, listed.data(), listed.size(), &sum,
                                  threads));
    check(sum == listing, "other sum of the listed rows");
  });
}

void test_ops(const Shape& shape, Random& random) {
  test_attention(shape, random);
  test_srh_score(shape, random);
  test_kv_append(shape, random);
}

// Every dtype with every head size; the rest takes turns.
void test_grid(Random& random) {
  const std::vector<std::pair<int, int>> heads = {{1, 1}, {2, 2}, {1, 3}, {2, 4}, {4, 7}, {1, 8}};
  int turn = 0;
  for (const int32_t dtype : kDtypes)
    for (const int head_dim : kHeadDims) {
      Shape shape;
      shape.dtype = dtype;
      shape.head_dim = head_dim;
      std::tie(shape.kv_heads, shape.group) = heads[turn % heads.size()];
      shape.page_size = kPageSizes[turn % kPageSizes.size()];
      shape.rows = kRows[turn / 2 % kRows.size()];
      shape.layout = turn / 3 % kLayouts;
      shape.lengths = {random.between(1, 60), 0, random.between(60, 110)};
      test_ops(shape, random);
      ++turn;
    }
}

void test_random_shapes(Random& random, int count) {
  for (int i = 0; i < count; ++i) {
    Shape shape;
    shape.dtype = random.of(kDtypes);
    shape.head_dim = random.once_in(3) ? random.between(1, 160) : random.of(kHeadDims);
    shape.kv_heads = random.between(1, 3);
    shape.group = random.between(1, 8);
    shape.page_size = random.once_in(3) ? random.between(1, 70) : random.of(kPageSizes);
    shape.rows = random.once_in(3) ? random.between(1, 40) : random.of(kRows);
    shape.layout = random.between(0, kLayouts - 1);
    if (random.once_in(4)) shape.magnitude = 64;  // products that fp16 could not hold
    for (int b = random.between(0, 2); b >= 0; --b)
      shape.lengths.push_back(random.once_in(4) ? 0 : random.between(1, 90));
    if (i % 4 == 0) {  // histories that are split over threads
      shape.kv_heads = random.between(1, 2);
      shape.group = random.between(1, 4);
      shape.rows = random.of<int>({1, 3});
      shape.lengths = {random.between(0, 90), random.between(1000, 2500)};
    }
    test_ops(shape, random);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int shapes = argc > 1 ? std::atoi(argv[1]) : 24;
  Random random(argc > 2 ? std::atoi(argv[2]) : 1);
  test_errors();
  test_grid(random);
  test_random_shapes(random, shapes);
  for (int i = 0; i < 8 * shapes; ++i) test_select_tokens(random);
  for (int i = 0; i < 10; ++i) test_read_rows(random);
  const Report& report = Report::get();
  std::printf("native kernels (%s): %ld checks, %ld wrong\n", dustin_cpu_isas(), report.checks,
              report.failures);
  return report.failures == 0 ? 0 : 1;
}

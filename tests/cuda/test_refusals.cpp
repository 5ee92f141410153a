// What the CUDA kernels do not take is refused by name, and nothing is written.

#include <climits>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "inputs.h"

extern "C" void emulator_configure(int32_t order, int32_t copies, uint64_t seed,
                                   int64_t shared_memory);

namespace {

constexpr int kBatch = 2, kRows = 3, kBudget = 8, kWidth = 64;

Shape a_shape() {
  Shape shape;
  shape.dtype = DUSTIN_BFLOAT16;
  shape.head_dim = 64;
  shape.group = 2;
  shape.page_size = 8;
  shape.rows = kRows;
  shape.lengths = {20, 33};
  return shape;
}

// One valid call of every op, to be spoilt.
struct Calls {
  Random random{1};
  Shape shape = a_shape();
  Cache cache{shape, random};
  Rows q{shape, kRows, shape.heads()}, k{shape, kRows, shape.kv_heads}, v{shape, kRows, 2};
  Rows out{shape, kRows, shape.heads()};
  Guarded<float> scores{size_t(kBatch * kWidth), 7.0f};
  std::vector<int32_t> kv_heads{0, 0, 1, 1};
  Guarded<int32_t> indices{size_t(kBatch * kBudget)}, counts{size_t(kBatch), kBudget};
  Guarded<int32_t> chosen{size_t(kBatch * kBudget), 7}, chosen_counts{size_t(kBatch), 7};
  std::vector<char> memory = std::vector<char>(1 << 20);
  void* workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256);
  int64_t workspace_bytes = 1 << 19;

  DustinKvAppendParams kv_append{};
  DustinSrhScoreParams srh_score{};
  DustinSelectTokensParams select_tokens{};
  DustinDenseAttentionParams dense_attention{};
  DustinSparseAttentionParams sparse_attention{};

  Calls() {
    cache.randomize(random, kRows, 1);
    q.randomize(random, 1), k.randomize(random, 1), v.randomize(random, 1);
    for (int i = 0; i < kBatch * kBudget; ++i) indices[i] = i % kBudget * 2;
    kv_append.cache = srh_score.cache = dense_attention.cache = cache.view();
    kv_append.k = k.view();
    kv_append.v = v.view();
    kv_append.rows = srh_score.rows = dense_attention.rows = kRows;
    srh_score.queries = dense_attention.q = q.view();
    srh_score.kv_heads = kv_heads.data();
    srh_score.scores = scores.data();
    srh_score.scores_stride = srh_score.scores_width = kWidth;
    srh_score.query_heads = dense_attention.heads = shape.heads();
    srh_score.scale = dense_attention.scale = shape.scale();
    dense_attention.out = out.view();
    sparse_attention.attention = dense_attention;
    sparse_attention.indices = indices.data();
    sparse_attention.counts = counts.data();
    sparse_attention.indices_stride = sparse_attention.budget = kBudget;
    select_tokens.target_scores = select_tokens.draft_scores = scores.data();
    select_tokens.lengths = cache.lengths().data();
    select_tokens.indices = chosen.data();
    select_tokens.counts = chosen_counts.data();
    select_tokens.target_stride = select_tokens.draft_stride = kWidth;
    select_tokens.target_width = select_tokens.draft_width = kWidth;
    select_tokens.indices_stride = select_tokens.budget = kBudget;
    select_tokens.batch = kBatch;
    select_tokens.lookahead = 2;
    select_tokens.sink = 1;
    select_tokens.window = 2;
  }

  std::vector<char> everything_written() const {
    std::vector<char> all = cache.copy();
    const auto add = [&](const void* data, size_t bytes) {
      all.insert(all.end(), static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
    };
    const std::vector<char> elements = out.elements().copy();
    add(elements.data(), elements.size());
    add(scores.data(), scores.size() * sizeof(float));
    add(chosen.data(), chosen.size() * sizeof(int32_t));
    add(chosen_counts.data(), chosen_counts.size() * sizeof(int32_t));
    return all;
  }
};

using Call = std::function<int32_t(Calls&)>;
struct Op {
  const char* name;
  Call call;
  std::function<DustinKvCache&(Calls&)> cache;
  std::function<int64_t(Calls&)> workspace;  // none where it takes none
};

const std::vector<Op> kOps = {
    {"kv_append", [](Calls& c) { return dustin_cuda_kv_append(&c.kv_append, nullptr); },
     [](Calls& c) -> auto& { return c.kv_append.cache; }, nullptr},
    {"srh_score",
     [](Calls& c) {
       return dustin_cuda_srh_score(&c.srh_score, c.workspace, c.workspace_bytes, nullptr);
     },
     [](Calls& c) -> auto& { return c.srh_score.cache; },
     [](Calls& c) { return dustin_cuda_srh_score_workspace(&c.srh_score); }},
    {"dense_attention",
     [](Calls& c) {
       return dustin_cuda_dense_attention(&c.dense_attention, c.workspace, c.workspace_bytes,
                                          nullptr);
     },
     [](Calls& c) -> auto& { return c.dense_attention.cache; },
     [](Calls& c) { return dustin_cuda_dense_attention_workspace(&c.dense_attention); }},
    {"sparse_attention",
     [](Calls& c) {
       return dustin_cuda_sparse_attention(&c.sparse_attention, c.workspace, c.workspace_bytes,
                                           nullptr);
     },
     [](Calls& c) -> auto& { return c.sparse_attention.attention.cache; },
     [](Calls& c) { return dustin_cuda_sparse_attention_workspace(&c.sparse_attention); }},
};
const Op& op(const char* name) {
  for (const Op& op : kOps)
    if (!std::strcmp(op.name, name)) return op;
  std::abort();
}

// The call fails with `status`, says `words`, and writes nothing; so does the workspace query.
void refuses(const Op& op, const std::string& what, int32_t status, const char* words,
             const std::function<void(Calls&)>& spoil, bool query_too = true) {
  Calls calls;
  spoil(calls);
  const std::vector<char> before = calls.everything_written();
  Report::get().where = std::string(op.name) + ", " + what;
  const auto says = [&] {
    if (!std::strstr(dustin_last_error(), words)) check(false, dustin_last_error());
  };
  returned(op.call(calls), status);
  says();
  check(calls.everything_written() == before, "wrote something");
  if (!op.workspace || !query_too) return;
  check(op.workspace(calls) == -1, "has a workspace");
  says();
}

void test_caches() {
  for (const Op& op : kOps) {
    const auto spoilt = [&](const char* what, int32_t status, const char* words,
                            const std::function<void(DustinKvCache&)>& spoil) {
      refuses(op, what, status, words, [&](Calls& c) { spoil(op.cache(c)); });
    };
    spoilt("fp32", DUSTIN_UNSUPPORTED, "float32", [](auto& c) { c.dtype = DUSTIN_FLOAT32; });
    spoilt("dtype", DUSTIN_UNSUPPORTED, "dtype 3", [](auto& c) { c.dtype = 3; });
    for (const int dim : {1, 32, 72, 192, 512})
      spoilt("head size", DUSTIN_UNSUPPORTED, "head_dim", [&](auto& c) { c.head_dim = dim; });
    spoilt("no keys", DUSTIN_INVALID_ARGUMENT, "k cache", [](auto& c) { c.k = nullptr; });
    spoilt("lengths", DUSTIN_INVALID_ARGUMENT, "lengths", [](auto& c) { c.lengths = nullptr; });
    spoilt("keys' address", DUSTIN_UNSUPPORTED, "multiple of 16",
           [](auto& c) { c.k = static_cast<char*>(c.k) + 8; });
    spoilt("token stride", DUSTIN_UNSUPPORTED, "token_stride",
           [](auto& c) { c.token_stride += 4; });
    spoilt("head stride", DUSTIN_UNSUPPORTED, "head_stride", [](auto& c) { c.head_stride += 4; });
    spoilt("page stride", DUSTIN_UNSUPPORTED, "page_stride", [](auto& c) { c.page_stride += 4; });
    spoilt("batch", DUSTIN_UNSUPPORTED, "batch", [](auto& c) { c.batch = 65536; });
    spoilt("max_length", DUSTIN_INVALID_ARGUMENT, "max_length", [](auto& c) { c.max_length = -1; });
  }
}

void test_calls() {
  for (const char* name : {"dense_attention", "sparse_attention"}) {
    const auto params = [&](Calls& c) -> DustinDenseAttentionParams& {
      return name[0] == 'd' ? c.dense_attention : c.sparse_attention.attention;
    };
    refuses(op(name), "group", DUSTIN_UNSUPPORTED, "groups of at most 16",
            [&](Calls& c) { params(c).heads = 34; });
    refuses(op(name), "heads", DUSTIN_INVALID_ARGUMENT, "no multiple",
            [&](Calls& c) { params(c).heads = 3; });
    refuses(op(name), "q", DUSTIN_UNSUPPORTED, "multiple of 4",
            [&](Calls& c) { params(c).q.data = static_cast<char*>(params(c).q.data) + 2; });
    refuses(op(name), "out", DUSTIN_UNSUPPORTED, "row_stride",
            [&](Calls& c) { params(c).out.row_stride += 1; });
  }
  refuses(op("sparse_attention"), "no list", DUSTIN_INVALID_ARGUMENT, "indices",
          [](Calls& c) { c.sparse_attention.indices = nullptr; });
  refuses(op("srh_score"), "a KV head", DUSTIN_INVALID_ARGUMENT, "kv_heads[1]",
          [](Calls& c) { c.kv_heads[1] = 2; });
  refuses(op("srh_score"), "heads", DUSTIN_UNSUPPORTED, "at most 128", [](Calls& c) {
    c.kv_heads.assign(129, 0);
    c.srh_score.kv_heads = c.kv_heads.data();
    c.srh_score.query_heads = 129;
  });
  refuses(op("kv_append"), "k", DUSTIN_UNSUPPORTED, "k begins",
          [](Calls& c) { c.kv_append.k.data = static_cast<char*>(c.kv_append.k.data) + 2; });

  const auto long_history = [](Calls& c) {
    DustinDenseAttentionParams& p = c.dense_attention;
    p.cache.max_pages = 1000;
    c.workspace_bytes = dustin_cuda_dense_attention_workspace(&p);
    check(c.workspace_bytes > 0, "needs no workspace");
  };
  refuses(
      op("dense_attention"), "small workspace", DUSTIN_INVALID_ARGUMENT, "workspace has",
      [&](Calls& c) { long_history(c), --c.workspace_bytes; }, false);
  refuses(
      op("dense_attention"), "no workspace", DUSTIN_INVALID_ARGUMENT, "workspace is null",
      [&](Calls& c) { long_history(c), c.workspace = nullptr; }, false);
  refuses(
      op("dense_attention"), "workspace's address", DUSTIN_INVALID_ARGUMENT, "multiple of 256",
      [&](Calls& c) { long_history(c), c.workspace = static_cast<char*>(c.workspace) + 16; },
      false);

  Op select{"select_tokens",
            [](Calls& c) { return dustin_cuda_select_tokens(&c.select_tokens, nullptr); }, nullptr,
            nullptr};
  refuses(select, "sink and window", DUSTIN_INVALID_ARGUMENT, "exceed the budget",
          [](Calls& c) { c.select_tokens.sink = kBudget; });
  refuses(select, "width", DUSTIN_UNSUPPORTED, "shared memory",
          [](Calls& c) { c.select_tokens.target_width = c.select_tokens.draft_width = 1 << 20; });
}

// A GPU with little shared memory refuses what it has no room for.
void test_little_shared_memory() {
  emulator_configure(0, 1, 1, 16 << 10);
  for (const char* name : {"dense_attention", "sparse_attention"})
    refuses(
        op(name), "shared memory", DUSTIN_UNSUPPORTED, "this GPU has 16384", [](Calls&) {}, false);
  emulator_configure(0, 1, 1, 227 << 10);
}

}  // namespace

void test_refusals() {
  emulator_configure(0, 1, 1, 227 << 10);
  test_caches();
  test_calls();
  test_little_shared_memory();
  for (const Op& op : kOps) {  // what was spoilt above is right as it was
    Calls calls;
    Report::get().where = std::string(op.name) + ", unspoilt";
    succeeds(op.call(calls));
  }
}

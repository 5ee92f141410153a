// Wrong arguments: an error that says what is wrong, and nothing written.

#include <climits>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "inputs.h"

namespace {

constexpr int kBatch = 2, kRows = 3, kBudget = 8, kWidth = 64, kDim = 20;

Shape a_shape() {
  Shape shape;
  shape.head_dim = 24;
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
  Rows q{shape, kRows, shape.heads()}, k{shape, kRows, shape.kv_heads}, v = {shape, kRows, 2};
  Rows out{shape, kRows, shape.heads()};
  Guarded<float> lse{size_t(kBatch * kRows * shape.heads()), 7.0f};
  Guarded<float> scores{size_t(kBatch * kWidth), 7.0f};
  Guarded<int32_t> kv_heads{std::vector<int32_t>{0, 0, 1, 1}};
  Guarded<int32_t> indices{size_t(kBatch * kBudget)}, counts{size_t(kBatch), kBudget};
  Guarded<int32_t> chosen{size_t(kBatch * kBudget), 7}, chosen_counts{size_t(kBatch), 7};

  Guarded<float> hidden{size_t(kRows * 2 * kDim), 0.5f}, weight{size_t(kDim), 1.0f};
  Guarded<float> normed{size_t(kRows * kDim), 7.0f}, activated{size_t(kRows * kDim), 7.0f};
  Guarded<float> angles{size_t(kBatch * kRows * 24), 0.5f};

  DustinKvAppendParams kv_append{};
  DustinSrhScoreParams srh_score{};
  DustinSelectTokensParams select_tokens{};
  DustinDenseAttentionParams dense_attention{};
  DustinSparseAttentionParams sparse_attention{};
  DustinRmsNormParams rms_norm{};
  DustinRotateParams rotate{};
  DustinSiluMulParams silu_mul{};

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
    dense_attention.lse = lse.data();
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
    rms_norm = {hidden.data(), weight.data(), normed.data(), kRows, kDim, DUSTIN_FLOAT32, 1e-6f, 0};
    rotate = {q.view(),      angles.data(),  angles.data(),  kBatch, kRows,
              shape.heads(), shape.head_dim, DUSTIN_FLOAT32, 0};
    silu_mul = {hidden.data(), activated.data(), kRows, kDim, DUSTIN_FLOAT32};
  }

  std::vector<char> everything_written() const {
    std::vector<char> all = cache.copy();
    const auto add = [&](const void* data, size_t bytes) {
      all.insert(all.end(), static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
    };
    for (const Rows* rows : {&out, &q}) {
      const std::vector<char> elements = rows->elements().copy();
      add(elements.data(), elements.size());
    }
    add(normed.data(), normed.size() * sizeof(float));
    add(activated.data(), activated.size() * sizeof(float));
    add(lse.data(), lse.size() * sizeof(float));
    add(scores.data(), scores.size() * sizeof(float));
    add(chosen.data(), chosen.size() * sizeof(int32_t));
    add(chosen_counts.data(), chosen_counts.size() * sizeof(int32_t));
    return all;
  }
};

bool says_something() {
  const std::string message = dustin_last_error();
  return message.size() > 5 && message.find("another message") == std::string::npos;
}

using Call = std::function<int32_t(Calls&)>;
const Call kKvAppend = [](Calls& c) { return dustin_cpu_kv_append(&c.kv_append, 2); };
const Call kSrhScore = [](Calls& c) { return dustin_cpu_srh_score(&c.srh_score, 2); };
const Call kSelectTokens = [](Calls& c) { return dustin_cpu_select_tokens(&c.select_tokens, 2); };
const Call kDenseAttention = [](Calls& c) {
  return dustin_cpu_dense_attention(&c.dense_attention, 2);
};
const Call kSparseAttention = [](Calls& c) {
  return dustin_cpu_sparse_attention(&c.sparse_attention, 2);
};
const Call kRmsNorm = [](Calls& c) { return dustin_cpu_rms_norm(&c.rms_norm, 2); };
const Call kRotate = [](Calls& c) { return dustin_cpu_rotate(&c.rotate, 2); };
const Call kSiluMul = [](Calls& c) { return dustin_cpu_silu_mul(&c.silu_mul, 2); };

void refuses(const std::string& what, const Call& call, const std::function<void(Calls&)>& spoil,
             int32_t status = DUSTIN_INVALID_ARGUMENT) {
  Calls calls;
  spoil(calls);
  const std::vector<char> before = calls.everything_written();
  Report::get().where = "errors, " + what;
  dustin_cpu_use_isa("another message");
  returned(call(calls), status);
  check(says_something(), "no message");
  check(calls.everything_written() == before, "wrote something");
}

struct CacheUser {
  const char* name;
  Call call;
  std::function<DustinKvCache&(Calls&)> cache;
  int more;  // new tokens that it expects room for
};

const std::vector<CacheUser> kCacheUsers = {
    {"kv_append", kKvAppend, [](Calls& c) -> auto& { return c.kv_append.cache; }, kRows},
    {"srh_score", kSrhScore, [](Calls& c) -> auto& { return c.srh_score.cache; }, 0},
    {"dense_attention", kDenseAttention, [](Calls& c) -> auto& { return c.dense_attention.cache; },
     kRows},
    {"sparse_attention", kSparseAttention,
     [](Calls& c) -> auto& { return c.sparse_attention.attention.cache; }, kRows},
};

void test_wrong_caches() {
  for (const CacheUser& user : kCacheUsers) {
    const auto spoilt = [&](const char* what, const std::function<void(DustinKvCache&)>& spoil,
                            int32_t status = DUSTIN_INVALID_ARGUMENT) {
      const auto apply = [&](Calls& c) { spoil(user.cache(c)); };
      refuses(std::string(user.name) + ", " + what, user.call, apply, status);
    };
    spoilt("no keys", [](auto& c) { c.k = nullptr; });
    if (user.more != 0) spoilt("no values", [](auto& c) { c.v = nullptr; });
    spoilt("no page table", [](auto& c) { c.page_table = nullptr; });
    spoilt("no lengths", [](auto& c) { c.lengths = nullptr; });
    for (const int32_t dtype : {-1, 3, 1000})
      spoilt("dtype", [&](auto& c) { c.dtype = dtype; }, DUSTIN_UNSUPPORTED);
    spoilt("head size", [](auto& c) { c.head_dim = DUSTIN_MAX_HEAD_DIM + 1; }, DUSTIN_UNSUPPORTED);
    for (const int32_t size : {0, -1, INT_MIN}) {
      spoilt("no head size", [&](auto& c) { c.head_dim = size; });
      spoilt("no KV heads", [&](auto& c) { c.num_kv_heads = size; });
      spoilt("no page size", [&](auto& c) { c.page_size = size; });
      spoilt("no pages", [&](auto& c) { c.num_pages = size; });
      spoilt("no pages a row", [&](auto& c) { c.max_pages = size; });
      if (size < 0) spoilt("batch", [&](auto& c) { c.batch = size; });
    }
    spoilt("short page table", [](auto& c) { c.max_pages = 4; });

    for (const int32_t page : {-1, INT_MIN, INT_MAX, 1000})
      refuses(std::string(user.name) + ", page number", user.call,
              [&](Calls& c) { c.cache.table()[1] = page; });
    for (const int32_t length : {-1, INT_MIN, INT_MAX, INT_MAX - kRows, 1000})
      refuses(std::string(user.name) + ", length", user.call,
              [&](Calls& c) { c.cache.lengths()[1] = length; });
  }
}

void test_wrong_attention() {
  for (const bool sparse : {false, true}) {
    const auto spoilt = [&](const char* what,
                            const std::function<void(DustinDenseAttentionParams&)>& spoil) {
      refuses(std::string(sparse ? "sparse_attention, " : "dense_attention, ") + what,
              sparse ? kSparseAttention : kDenseAttention,
              [&](Calls& c) { spoil(sparse ? c.sparse_attention.attention : c.dense_attention); });
    };
    spoilt("no queries", [](auto& p) { p.q.data = nullptr; });
    spoilt("no output", [](auto& p) { p.out.data = nullptr; });
    spoilt("longer than max_length", [](auto& p) { p.cache.max_length = 1; });
    spoilt("max_length", [](auto& p) { p.cache.max_length = -1; });
    spoilt("heads that KV heads do not divide", [](auto& p) { p.heads = 3; });
    for (const int32_t size : {-1, INT_MIN}) {
      spoilt("rows", [&](auto& p) { p.rows = size; });
      spoilt("heads", [&](auto& p) { p.heads = size; });
    }
    spoilt("more tokens than are counted", [](auto& p) {
      p.cache.page_size = INT_MAX;
      p.rows = INT_MAX;
    });
    spoilt("more query rows than are counted", [](auto& p) {
      p.cache.page_size = INT_MAX;
      p.rows = INT_MAX / 2;
    });
  }
  const auto spoilt = [](const char* what, const std::function<void(Calls&)>& spoil) {
    refuses(std::string("sparse_attention, ") + what, kSparseAttention, spoil);
  };
  spoilt("no indices", [](Calls& c) { c.sparse_attention.indices = nullptr; });
  spoilt("no counts", [](Calls& c) { c.sparse_attention.counts = nullptr; });
  spoilt("budget", [](Calls& c) { c.sparse_attention.budget = -1; });
  spoilt("max_count", [](Calls& c) { c.sparse_attention.max_count = -1; });
  spoilt("more than max_count", [](Calls& c) { c.sparse_attention.max_count = 1; });
  for (const int32_t count : {-1, INT_MIN, kBudget + 1, INT_MAX})
    spoilt("count", [&](Calls& c) { c.counts[1] = count; });
  for (const int32_t index : {-1, INT_MIN, 33, INT_MAX})
    spoilt("index", [&](Calls& c) { c.indices[2 * kBudget - 1] = index; });
}

void test_wrong_kv_append() {
  const auto spoilt = [](const char* what, const std::function<void(Calls&)>& spoil) {
    refuses(std::string("kv_append, ") + what, kKvAppend, spoil);
  };
  spoilt("no new keys", [](Calls& c) { c.kv_append.k.data = nullptr; });
  spoilt("no new values", [](Calls& c) { c.kv_append.v.data = nullptr; });
  for (const int32_t rows : {-1, INT_MIN, INT_MAX, 1000})
    spoilt("rows", [&](Calls& c) { c.kv_append.rows = rows; });
}

void test_wrong_srh_score() {
  const auto spoilt = [](const char* what, const std::function<void(Calls&)>& spoil) {
    refuses(std::string("srh_score, ") + what, kSrhScore, spoil);
  };
  spoilt("no queries", [](Calls& c) { c.srh_score.queries.data = nullptr; });
  spoilt("no KV heads", [](Calls& c) { c.srh_score.kv_heads = nullptr; });
  spoilt("no scores", [](Calls& c) { c.srh_score.scores = nullptr; });
  spoilt("scores too narrow", [](Calls& c) { c.srh_score.scores_width = 32; });
  for (const int32_t size : {-1, INT_MIN}) {
    spoilt("rows", [&](Calls& c) { c.srh_score.rows = size; });
    spoilt("query heads", [&](Calls& c) { c.srh_score.query_heads = size; });
    spoilt("width", [&](Calls& c) { c.srh_score.scores_width = size; });
  }
  for (const int32_t head : {-1, 2, INT_MIN, INT_MAX})
    spoilt("KV head", [&](Calls& c) { c.kv_heads[3] = head; });
}

void test_wrong_select_tokens() {
  const auto spoilt = [](const char* what, const std::function<void(Calls&)>& spoil) {
    refuses(std::string("select_tokens, ") + what, kSelectTokens, spoil);
  };
  spoilt("no lengths", [](Calls& c) { c.select_tokens.lengths = nullptr; });
  spoilt("no indices", [](Calls& c) { c.select_tokens.indices = nullptr; });
  spoilt("no counts", [](Calls& c) { c.select_tokens.counts = nullptr; });
  spoilt("target too narrow", [](Calls& c) { c.select_tokens.target_width = 32; });
  spoilt("draft too narrow", [](Calls& c) { c.select_tokens.draft_width = 32; });
  spoilt("sink and window beyond the budget", [](Calls& c) { c.select_tokens.window = kBudget; });
  spoilt("sink that overflows", [](Calls& c) { c.select_tokens.sink = INT_MAX; });
  for (const int32_t size : {-1, INT_MIN}) {
    spoilt("batch", [&](Calls& c) { c.select_tokens.batch = size; });
    spoilt("budget", [&](Calls& c) { c.select_tokens.budget = size; });
    spoilt("lookahead", [&](Calls& c) { c.select_tokens.lookahead = size; });
    spoilt("sink", [&](Calls& c) { c.select_tokens.sink = size; });
    spoilt("window", [&](Calls& c) { c.select_tokens.window = size; });
    spoilt("target's width", [&](Calls& c) { c.select_tokens.target_width = size; });
    spoilt("draft's width", [&](Calls& c) { c.select_tokens.draft_width = size; });
    spoilt("length", [&](Calls& c) { c.cache.lengths()[0] = size; });
  }
}

void test_wrong_layers() {
  const auto norm = [](const char* what, const std::function<void(DustinRmsNormParams&)>& spoil,
                       int32_t status = DUSTIN_INVALID_ARGUMENT) {
    const auto apply = [&](Calls& c) { spoil(c.rms_norm); };
    refuses(std::string("rms_norm, ") + what, kRmsNorm, apply, status);
  };
  const auto rotate = [](const char* what, const std::function<void(DustinRotateParams&)>& spoil,
                         int32_t status = DUSTIN_INVALID_ARGUMENT) {
    const auto apply = [&](Calls& c) { spoil(c.rotate); };
    refuses(std::string("rotate, ") + what, kRotate, apply, status);
  };
  const auto silu = [](const char* what, const std::function<void(DustinSiluMulParams&)>& spoil,
                       int32_t status = DUSTIN_INVALID_ARGUMENT) {
    const auto apply = [&](Calls& c) { spoil(c.silu_mul); };
    refuses(std::string("silu_mul, ") + what, kSiluMul, apply, status);
  };
  norm("no input", [](auto& p) { p.x = nullptr; });
  norm("no weight", [](auto& p) { p.weight = nullptr; });
  norm("no output", [](auto& p) { p.out = nullptr; });
  rotate("no heads to turn", [](auto& p) { p.x.data = nullptr; });
  rotate("no cosines", [](auto& p) { p.cos = nullptr; });
  rotate("no sines", [](auto& p) { p.sin = nullptr; });
  silu("no input", [](auto& p) { p.x = nullptr; });
  silu("no output", [](auto& p) { p.out = nullptr; });
  for (const int32_t dtype : {-1, 3, INT_MAX}) {
    norm("dtype", [&](auto& p) { p.dtype = dtype; }, DUSTIN_UNSUPPORTED);
    rotate("dtype", [&](auto& p) { p.dtype = dtype; }, DUSTIN_UNSUPPORTED);
    silu("dtype", [&](auto& p) { p.dtype = dtype; }, DUSTIN_UNSUPPORTED);
  }
  for (const int32_t size : {0, -1, INT_MIN}) {
    norm("dim", [&](auto& p) { p.dim = size; });
    silu("dim", [&](auto& p) { p.dim = size; });
    rotate("head size", [&](auto& p) { p.head_dim = size; });
    if (size == 0) continue;  // no rows are no error
    norm("rows", [&](auto& p) { p.rows = size; });
    silu("rows", [&](auto& p) { p.rows = size; });
    rotate("batch", [&](auto& p) { p.batch = size; });
    rotate("rows", [&](auto& p) { p.rows = size; });
    rotate("heads", [&](auto& p) { p.heads = size; });
  }
  for (const int32_t dim : {23, DUSTIN_MAX_HEAD_DIM + 2})
    rotate("head size", [&](auto& p) { p.head_dim = dim; });
  const auto no_threads = [](const char* what, const Call& call) {
    refuses(std::string(what) + ", no threads", call, [](Calls&) {});
  };
  no_threads("rms_norm", [](Calls& c) { return dustin_cpu_rms_norm(&c.rms_norm, 0); });
  no_threads("rotate", [](Calls& c) { return dustin_cpu_rotate(&c.rotate, 0); });
  no_threads("silu_mul", [](Calls& c) { return dustin_cpu_silu_mul(&c.silu_mul, 0); });
}

void test_wrong_read_rows() {
  Guarded<uint64_t> memory(8, uint64_t{1});
  uint64_t sum = 7;
  const auto refused = [&](const char* what, int32_t status) {
    Report::get().where = std::string("errors, read_rows, ") + what;
    returned(status, DUSTIN_INVALID_ARGUMENT);
    check(says_something(), "no message");
    check(sum == 7, "wrote a sum");
  };
  refused("no base", dustin_cpu_read_rows(nullptr, 64, nullptr, 1, &sum, 1));
  refused("no sum", dustin_cpu_read_rows(memory.data(), 64, nullptr, 1, nullptr, 1));
  refused("count", dustin_cpu_read_rows(memory.data(), 64, nullptr, -1, &sum, 1));
  for (const int64_t bytes : {int64_t{-64}, int64_t{0}, int64_t{8}, int64_t{100}, INT64_MIN})
    refused("row size", dustin_cpu_read_rows(memory.data(), bytes, nullptr, 1, &sum, 1));
}

void test_nothing_at_all() {
  const auto refused = [](const char* what, int32_t status) {
    Report::get().where = std::string("errors, no parameters, ") + what;
    returned(status, DUSTIN_INVALID_ARGUMENT);
    check(says_something(), "no message");
  };
  refused("kv_append", dustin_cpu_kv_append(nullptr, 1));
  refused("srh_score", dustin_cpu_srh_score(nullptr, 1));
  refused("select_tokens", dustin_cpu_select_tokens(nullptr, 1));
  refused("dense_attention", dustin_cpu_dense_attention(nullptr, 1));
  refused("sparse_attention", dustin_cpu_sparse_attention(nullptr, 1));
  refused("rms_norm", dustin_cpu_rms_norm(nullptr, 1));
  refused("rotate", dustin_cpu_rotate(nullptr, 1));
  refused("silu_mul", dustin_cpu_silu_mul(nullptr, 1));
}

// No row at all is a batch like any other, and nothing is written for it.
void test_empty_batches() {
  const auto takes = [](const char* what, const Call& call,
                        const std::function<void(Calls&)>& empty) {
    Calls calls;
    empty(calls);
    const std::vector<char> before = calls.everything_written();
    Report::get().where = std::string("empty, ") + what;
    succeeds(call(calls));
    check(calls.everything_written() == before, "wrote something");
  };
  for (const CacheUser& user : kCacheUsers)
    takes(user.name, user.call, [&](Calls& c) { user.cache(c).batch = 0; });
  takes("select_tokens", kSelectTokens, [](Calls& c) { c.select_tokens.batch = 0; });
  takes("kv_append, no rows", kKvAppend, [](Calls& c) { c.kv_append.rows = 0; });
  takes("srh_score, no rows", kSrhScore, [](Calls& c) { c.srh_score.rows = 0; });
  takes("srh_score, no heads", kSrhScore, [](Calls& c) { c.srh_score.query_heads = 0; });
  takes("rms_norm, no rows", kRmsNorm, [](Calls& c) { c.rms_norm.rows = 0; });
  takes("silu_mul, no rows", kSiluMul, [](Calls& c) { c.silu_mul.rows = 0; });
  takes("rotate, no batch", kRotate, [](Calls& c) { c.rotate.batch = 0; });
  takes("rotate, no rows", kRotate, [](Calls& c) { c.rotate.rows = 0; });
  takes("rotate, no heads", kRotate, [](Calls& c) { c.rotate.heads = 0; });
}

void test_instruction_set_names() {
  const std::string used = dustin_cpu_isa();
  Report::get().where = "errors, instruction set";
  for (const char* name : {"", "mmx", "avx", "avx2 portable", "reference"}) {
    returned(dustin_cpu_use_isa(name), DUSTIN_UNSUPPORTED);
    check(says_something(), "no message");
  }
  returned(dustin_cpu_use_isa(nullptr), DUSTIN_INVALID_ARGUMENT);
  check(used == dustin_cpu_isa(), "changed the instruction set");
  check(dustin_abi_version() == DUSTIN_ABI_VERSION, "other ABI version");
}

}  // namespace

void test_errors() {
  test_instruction_set_names();
  for (const std::string& isa : instruction_sets()) {
    dustin_cpu_use_isa(isa.c_str());
    for (const Call& call : {kKvAppend, kSrhScore, kSelectTokens, kDenseAttention, kSparseAttention,
                             kRmsNorm, kRotate, kSiluMul}) {
      Calls calls;  // what the others spoil is right
      Report::get().where = "errors, the call to be spoilt";
      succeeds(call(calls));
    }
    test_nothing_at_all();
    test_wrong_caches();
    test_wrong_attention();
    test_wrong_kv_append();
    test_wrong_srh_score();
    test_wrong_select_tokens();
    test_wrong_layers();
    test_wrong_read_rows();
    test_empty_batches();
  }
}

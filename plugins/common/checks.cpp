#include "checks.h"

#include <climits>

#include "status.h"

namespace dustin {
namespace {

void check_cache(const DustinKvCache& cache, bool reads_values) {
  check_dtype(cache.dtype);
  refuse_below(cache.batch, 0, "batch");
  refuse_below(cache.num_pages, 1, "num_pages");
  refuse_below(cache.num_kv_heads, 1, "num_kv_heads");
  refuse_below(cache.page_size, 1, "page_size");
  refuse_below(cache.max_pages, 1, "max_pages");
  refuse_below(cache.max_length, 0, "max_length");
  refuse_below(cache.head_dim, 1, "head_dim");
  if (cache.head_dim > DUSTIN_MAX_HEAD_DIM)
    refuse<DUSTIN_UNSUPPORTED>("head_dim is ", cache.head_dim, ", at most ", DUSTIN_MAX_HEAD_DIM,
                               " is supported");
  if (cache.batch == 0) return;
  refuse_null(cache.k, "k cache");
  if (reads_values) refuse_null(cache.v, "v cache");
  refuse_null(cache.page_table, "page_table");
  refuse_null(cache.lengths, "lengths");
}

void check_count(int32_t rows, int32_t heads) {
  constexpr int kMargin = 4096;  // kernels round up
  if (int64_t{rows} * heads > INT_MAX - kMargin)
    refuse(rows, " rows of ", heads, " query heads are more than the kernels count");
}

}  // namespace

void check_dtype(int32_t dtype) {
  if (dtype < DUSTIN_FLOAT32 || dtype > DUSTIN_BFLOAT16)
    refuse<DUSTIN_UNSUPPORTED>("dtype ", dtype,
                               " is none of float32 (0), float16 (1), bfloat16 (2)");
}

bool check_arguments(const DustinKvAppendParams& p) {
  refuse_below(p.rows, 0, "rows");
  check_cache(p.cache, true);
  if (p.cache.batch == 0 || p.rows == 0) return false;
  refuse_null(p.k.data, "k");
  refuse_null(p.v.data, "v");
  return true;
}

bool check_arguments(const DustinSrhScoreParams& p) {
  refuse_below(p.rows, 0, "rows");
  refuse_below(p.query_heads, 0, "query_heads");
  refuse_below(p.scores_width, 0, "scores_width");
  check_cache(p.cache, false);
  check_count(p.rows, p.query_heads);
  if (p.cache.batch == 0 || p.rows == 0 || p.query_heads == 0) return false;
  refuse_null(p.queries.data, "queries");
  refuse_null(p.kv_heads, "kv_heads");
  refuse_null(p.scores, "scores");
  for (int i = 0; i < p.query_heads; i++)
    if (p.kv_heads[i] < 0 || p.kv_heads[i] >= p.cache.num_kv_heads)
      refuse("kv_heads[", i, "] is ", p.kv_heads[i], ", there are ", p.cache.num_kv_heads,
             " KV heads");
  return true;
}

bool check_arguments(const DustinSelectTokensParams& p) {
  refuse_below(p.batch, 0, "batch");
  refuse_below(p.budget, 0, "budget");
  refuse_below(p.lookahead, 0, "lookahead");
  refuse_below(p.sink, 0, "sink");
  refuse_below(p.window, 0, "window");
  if (int64_t{p.sink} + p.window > p.budget)
    refuse("sink ", p.sink, " and window ", p.window, " exceed the budget ", p.budget);
  if (p.batch == 0) return false;
  refuse_null(p.lengths, "lengths");
  refuse_null(p.counts, "counts");
  if (p.budget > 0) refuse_null(p.indices, "indices");
  return true;
}

bool check_arguments(const DustinDenseAttentionParams& p) {
  refuse_below(p.rows, 0, "rows");
  check_cache(p.cache, true);
  if (p.heads <= 0 || p.heads % p.cache.num_kv_heads != 0)
    refuse(p.heads, " query heads are no multiple of ", p.cache.num_kv_heads, " KV heads");
  check_count(p.rows, p.heads);
  if (p.cache.batch == 0 || p.rows == 0) return false;
  refuse_null(p.q.data, "q");
  refuse_null(p.out.data, "out");
  return true;
}

bool check_arguments(const DustinSparseAttentionParams& p) {
  if (!check_arguments(p.attention)) return false;
  refuse_null(p.counts, "counts");
  refuse_below(p.budget, 0, "budget");
  refuse_below(p.max_count, 0, "max_count");
  return true;
}

}  // namespace dustin

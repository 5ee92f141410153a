// srh_score: weights of every chunk of keys, each with the chunk's own maximum; then, with the
// maximum and the sum over all chunks known, their sum over rows.
#include <algorithm>
#include <climits>
#include <cmath>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "pool.h"

namespace dustin {
namespace {

constexpr int kKeysAChunk = 1024;
// Weights kept between the two halves; many heads are scored a few at a time.
constexpr int64_t kKeptFloats = int64_t{4} << 20;

// The query rows of one batch row that read one KV head.
struct Group {
  int b, kv_head;
  std::vector<const void*> queries;
  int chunks;
  int64_t weights;  // [chunks, rows, kKeysAChunk] in the scratch memory
  int64_t maxima;   // [chunks, rows], and the sums behind them
};

void run(const DustinSrhScoreParams& p, int32_t threads) {
  const DustinKvCache& c = p.cache;
  refuse_below(threads, 1, "threads");
  if (!check_arguments(p)) return;
  check_history(c, 0);
  for (int b = 0; b < c.batch; b++)
    if (c.lengths[b] > p.scores_width)
      refuse("lengths[", b, "] is ", c.lengths[b], ", scores has room for ", p.scores_width);

  const Isa& isa = dustin::isa();
  std::vector<Group> groups;
  for (int b = 0; b < c.batch; b++) {
    if (c.lengths[b] == 0) continue;
    for (int h = 0; h < c.num_kv_heads; h++) {
      Group group{b, h, {}, (c.lengths[b] + kKeysAChunk - 1) / kKeysAChunk, 0, 0};
      for (int r = 0; r < p.rows; r++)
        for (int i = 0; i < p.query_heads; i++)
          if (p.kv_heads[i] == h)
            group.queries.push_back(advance(
                p.queries.data,
                b * p.queries.batch_stride + r * p.queries.row_stride + i * p.queries.head_stride,
                c.dtype));
      if (!group.queries.empty()) groups.push_back(std::move(group));
    }
  }

  thread_local Arena kept;
  for (size_t first = 0, last = 0; first < groups.size(); first = last) {
    int64_t floats = 0;
    std::vector<std::pair<int, int>> tasks;  // group, chunk
    for (; last < groups.size(); last++) {
      Group& group = groups[last];
      const int64_t rows = group.queries.size();
      const int64_t size = group.chunks * rows * (kKeysAChunk + 2);
      if (last > first && floats + size > kKeptFloats) break;
      group.weights = floats;
      group.maxima = floats + group.chunks * rows * kKeysAChunk;
      floats += size;
      for (int chunk = 0; chunk < group.chunks; chunk++)
        tasks.emplace_back(static_cast<int>(last), chunk);
    }
    kept.reset(Arena::room<float>(floats));
    float* const memory = kept.take<float>(floats);

    parallel_for(static_cast<int>(tasks.size()), threads, [&](int i) {
      const Group& group = groups[tasks[i].first];
      const int chunk = tasks[i].second, rows = static_cast<int>(group.queries.size());
      ScoreTask task;
      task.tokens = tokens_of(c, group.b, group.kv_head);
      task.first_key = chunk * kKeysAChunk;
      task.last_key = std::min(task.first_key + kKeysAChunk, c.lengths[group.b]);
      task.queries = group.queries.data();
      task.rows = rows;
      task.head_dim = c.head_dim;
      task.scale = p.scale;
      task.weights = memory + group.weights + int64_t{chunk} * rows * kKeysAChunk;
      task.stride = kKeysAChunk;
      task.max = memory + group.maxima + int64_t{chunk} * rows;
      task.sum = task.max + int64_t{group.chunks} * rows;
      isa.score[c.dtype](task);
    });

    // In place of each chunk's maximum: what its weights must be multiplied with.
    for (size_t g = first; g < last; g++) {
      const Group& group = groups[g];
      const int rows = static_cast<int>(group.queries.size());
      float* const max = memory + group.maxima;
      const float* const sum = max + int64_t{group.chunks} * rows;
      for (int r = 0; r < rows; r++) {
        float top = max[r], total = 0.f;
        for (int chunk = 1; chunk < group.chunks; chunk++)
          top = std::fmax(top, max[chunk * rows + r]);
        for (int chunk = 0; chunk < group.chunks; chunk++) {
          float& m = max[chunk * rows + r];
          m = std::exp2(m - top);
          total += m * sum[chunk * rows + r];
        }
        for (int chunk = 0; chunk < group.chunks; chunk++) max[chunk * rows + r] /= total;
      }
    }

    // A row's chunks: its groups one after another, so that the order of sums is fixed.
    std::vector<std::pair<int, int>> sums;  // first group of a batch row, chunk
    for (size_t g = first; g < last; g++)
      if (g == first || groups[g].b != groups[g - 1].b)
        for (int chunk = 0; chunk < groups[g].chunks; chunk++)
          sums.emplace_back(static_cast<int>(g), chunk);
    parallel_for(static_cast<int>(sums.size()), threads, [&](int i) {
      const int chunk = sums[i].second, b = groups[sums[i].first].b;
      const int first_key = chunk * kKeysAChunk;
      for (size_t g = sums[i].first; g < last && groups[g].b == b; g++) {
        const Group& group = groups[g];
        const int rows = static_cast<int>(group.queries.size());
        isa.weigh(memory + group.weights + int64_t{chunk} * rows * kKeysAChunk, kKeysAChunk,
                  memory + group.maxima + int64_t{chunk} * rows, rows,
                  std::min(kKeysAChunk, c.lengths[b] - first_key),
                  p.scores + b * p.scores_stride + first_key);
      }
    });
  }
}

}  // namespace
}  // namespace dustin

extern "C" int32_t dustin_cpu_srh_score(const DustinSrhScoreParams* params, int32_t threads) {
  return dustin::guarded([&] {
    dustin::refuse_null(params, "params");
    dustin::run(*params, threads);
  });
}

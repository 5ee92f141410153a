// dense_attention and sparse_attention: cut into tasks, combine what parts of a row's keys gave.
#include <algorithm>
#include <climits>
#include <cmath>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "pool.h"

namespace dustin {
namespace {

// A task's keys and query rows: many enough that what is read once serves many, few enough that
// short batches still occupy every thread. Functions of the shape alone, so that results do not
// depend on the number of threads.
constexpr int kKeysATask = 1024;
constexpr int kRowsATask = 128;

// Query rows of one batch row and KV head, whose keys one or more tasks read.
struct Block {
  int b, h;
  int first_row, rows;
  int keys;  // that any of the rows sees
  int parts;
  int64_t results;  // where in the scratch memory its parts' results begin, in floats
  std::atomic<int> missing{0};
};

class Attention {
 public:
  Attention(const DustinDenseAttentionParams& p, const DustinSparseAttentionParams* sparse)
      : p_(p), sparse_(sparse), isa_(isa()) {}

  void run(int32_t threads) {
    refuse_below(threads, 1, "threads");
    if (sparse_ ? !check_arguments(*sparse_) : !check_arguments(p_)) return;
    check();
    const DustinKvCache& c = p_.cache;
    group_ = p_.heads / c.num_kv_heads;
    dim_padded_ = round_up(c.head_dim, isa_.dim_pad);
    const int rows = p_.rows * group_;
    row_blocks_ = (rows + kRowsATask - 1) / kRowsATask;
    blocks_ = std::vector<Block>(static_cast<size_t>(c.batch) * c.num_kv_heads * row_blocks_);
    std::vector<std::pair<int, int>> tasks;  // block, part
    int64_t floats = 0;
    for (int b = 0, i = 0; b < c.batch; b++)
      for (int h = 0; h < c.num_kv_heads; h++)
        for (int r = 0; r < row_blocks_; r++, i++) {
          Block& block = blocks_[i];
          block.b = b;
          block.h = h;
          block.first_row = r * kRowsATask;
          block.rows = std::min(kRowsATask, rows - block.first_row);
          block.keys = history(b) + (block.first_row + block.rows - 1) / group_ + 1;
          // Long prompts have query blocks enough.
          block.parts = row_blocks_ > 1 ? 1 : (block.keys + kKeysATask - 1) / kKeysATask;
          block.missing.store(block.parts, std::memory_order_relaxed);
          block.results = floats;
          floats += block.parts * result_size(block.rows);
          for (int part = 0; part < block.parts; part++) tasks.emplace_back(i, part);
        }
    thread_local Arena results;  // tasks on other threads write here: not task_arena()
    results.reset(Arena::room<float>(floats));
    results_ = results.take<float>(floats);
    // A thread takes a few tasks in a row, so that it can fetch the next one's first keys in time.
    const int count = static_cast<int>(tasks.size());
    const int in_a_row = std::max(1, std::min(4, count / 4 / threads));
    parallel_for((count + in_a_row - 1) / in_a_row, threads, [&](int run) {
      const int last = std::min(count, (run + 1) * in_a_row);
      AttendTask task = make(blocks_[tasks[run * in_a_row].first], tasks[run * in_a_row].second);
      for (int i = run * in_a_row; i < last; i++) {
        AttendTask following;
        if (i + 1 < last) following = make(blocks_[tasks[i + 1].first], tasks[i + 1].second);
        isa_.attend[p_.cache.dtype](task, i + 1 < last ? &following : nullptr);
        // Whoever finishes a block's last part combines them, always in the same order.
        Block& block = blocks_[tasks[i].first];
        if (block.missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(block);
        task = following;
      }
    });
  }

 private:
  // What the batch's data say.
  void check() const {
    const DustinKvCache& c = p_.cache;
    check_history(c, p_.rows);
    if (!sparse_) return;
    for (int b = 0; b < c.batch; b++) {
      const int count = sparse_->counts[b], length = c.lengths[b];
      if (count < 0 || count > length)
        refuse("counts[", b, "] is ", count, ", must be within 0 ... ", length,
               ", the row's history");
      const int most = sparse_->max_count > 0 ? sparse_->max_count : sparse_->budget;
      if (count > most) refuse("counts[", b, "] is ", count, ", max_count is ", most);
      if (count == length) continue;  // all of it: the list is not read
      if (count > sparse_->budget)
        refuse("counts[", b, "] is ", count, ", the index list holds ", sparse_->budget);
      refuse_null(sparse_->indices, "indices");
      const int32_t* indices = sparse_->indices + b * sparse_->indices_stride;
      bool fine = true;
      for (int j = 0; j < count; j++)
        fine &= static_cast<uint32_t>(indices[j]) < static_cast<uint32_t>(length);
      if (!fine)
        refuse("indices[", b, "] names a token outside 0 ... ", length - 1, ", the row's history");
    }
  }

  bool listed(int b) const { return sparse_ && sparse_->counts[b] != p_.cache.lengths[b]; }

  // History tokens that row b reads.
  int history(int b) const { return listed(b) ? sparse_->counts[b] : p_.cache.lengths[b]; }

  // Floats of one part's results: sums of values, largest logits, sums of weights.
  int64_t result_size(int rows) const {
    const int64_t padded = round_up(rows, isa_.row_pad);
    return padded * dim_padded_ + 2 * padded;
  }

  AttendTask make(const Block& block, int part) const {
    const DustinKvCache& c = p_.cache;
    float* const out = results_ + block.results + part * result_size(block.rows);
    const int padded = round_up(block.rows, isa_.row_pad);
    AttendTask task;
    task.tokens = tokens_of(c, block.b, block.h);
    task.indices = listed(block.b) ? sparse_->indices + block.b * sparse_->indices_stride : nullptr;
    task.history = history(block.b);
    task.length = c.lengths[block.b];
    task.first_key = static_cast<int>(int64_t{block.keys} * part / block.parts);
    task.last_key = static_cast<int>(int64_t{block.keys} * (part + 1) / block.parts);
    task.q = p_.q;
    task.q.data = advance(
        p_.q.data, block.b * p_.q.batch_stride + block.h * group_ * p_.q.head_stride, c.dtype);
    task.group = group_;
    task.first_row = block.first_row;
    task.rows = block.rows;
    task.head_dim = c.head_dim;
    task.scale = p_.scale;
    task.out = out;
    task.max = out + int64_t{padded} * dim_padded_;
    task.sum = task.max + padded;
    return task;
  }

  void finish(const Block& block) const {
    const int64_t size = result_size(block.rows);
    const int padded = round_up(block.rows, isa_.row_pad);
    float* const out = results_ + block.results;
    float* const max = out + int64_t{padded} * dim_padded_;
    float* const sum = max + padded;
    for (int r = 0; r < block.rows; r++) {
      float* const row = out + int64_t{r} * dim_padded_;
      for (int part = 1; part < block.parts; part++) {
        const float m = max[part * size + r];
        const float top = std::fmax(max[r], m);
        const float a = std::exp2(max[r] - top), b = std::exp2(m - top);
        isa_.merge(row, a, row + part * size, b, dim_padded_);
        max[r] = top;
        sum[r] = sum[r] * a + sum[part * size + r] * b;
      }
      const int token = (block.first_row + r) / group_;
      const int head = block.h * group_ + (block.first_row + r) % group_;
      isa_.scale_row[p_.cache.dtype](
          row, 1.f / sum[r], p_.cache.head_dim,
          advance(
              p_.out.data,
              block.b * p_.out.batch_stride + token * p_.out.row_stride + head * p_.out.head_stride,
              p_.cache.dtype));
      if (p_.lse)
        p_.lse[(int64_t{block.b} * p_.rows + token) * p_.heads + head] =
            (max[r] + std::log2(sum[r])) * kLn2;
    }
  }

  const DustinDenseAttentionParams& p_;
  const DustinSparseAttentionParams* const sparse_;
  const Isa& isa_;
  int group_ = 0, dim_padded_ = 0, row_blocks_ = 0;
  std::vector<Block> blocks_;
  float* results_ = nullptr;
};

}  // namespace
}  // namespace dustin

extern "C" {

int32_t dustin_cpu_dense_attention(const DustinDenseAttentionParams* params, int32_t threads) {
  return dustin::guarded([&] {
    dustin::refuse_null(params, "params");
    dustin::Attention(*params, nullptr).run(threads);
  });
}

int32_t dustin_cpu_sparse_attention(const DustinSparseAttentionParams* params, int32_t threads) {
  return dustin::guarded([&] {
    dustin::refuse_null(params, "params");
    dustin::Attention(params->attention, params).run(threads);
  });
}
}

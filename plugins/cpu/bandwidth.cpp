// What this memory gives to a loop that does nothing but read: the yardstick of the benchmarks.
#include <algorithm>

#include "dispatch.h"
#include "pool.h"

extern "C" int32_t dustin_cpu_read_rows(const void* base, int64_t row_bytes, const int64_t* rows,
                                        int64_t count, uint64_t* sum, int32_t threads) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(base, "base");
    refuse_null(sum, "sum");
    refuse_below(threads, 1, "threads");
    refuse_below(count, 0, "count");
    if (row_bytes <= 0 || row_bytes % 64) refuse("row_bytes is ", row_bytes, ", no multiple of 64");
    constexpr int64_t kRowsATask = 4096, kAhead = 16;
    const int64_t tasks = (count + kRowsATask - 1) / kRowsATask;
    std::atomic<uint64_t> total{0};
    parallel_for(static_cast<int>(tasks), threads, [&](int task) {
      const int64_t last = std::min<int64_t>(count, (task + 1) * kRowsATask);
      const auto row = [&](int64_t i) {
        return static_cast<const char*>(base) + (rows ? rows[i] : i) * row_bytes;
      };
      uint64_t part[8] = {};
      for (int64_t i = task * kRowsATask; i < last; i++) {
        const uint64_t* words = reinterpret_cast<const uint64_t*>(row(i));
        const char* next = row(std::min(i + kAhead, last - 1));
        for (int64_t w = 0; w < row_bytes / 8; w += 8) {
          __builtin_prefetch(next + w * 8, 0, 2);
          for (int k = 0; k < 8; k++) part[k] += words[w + k];
        }
      }
      uint64_t s = 0;
      for (const uint64_t x : part) s += x;
      total.fetch_add(s, std::memory_order_relaxed);
    });
    *sum = total;
  });
}

// Work over the caller's threads, and memory that threads keep between calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "dustin/kernels.h"

namespace dustin {

// Set by dustin_cpu_use_pool.
extern std::atomic<DustinParallel> g_parallel;

// Calls task(0) ... task(count - 1) on up to `threads` threads, whichever is free takes the next.
// Throws std::bad_alloc where a task did.
template <class Task>
void parallel_for(int count, int threads, const Task& task) {
  const DustinParallel parallel = g_parallel.load(std::memory_order_acquire);
  if (!parallel || threads <= 1 || count <= 1) {
    for (int i = 0; i < count; i++) task(i);
    return;
  }
  struct Shared {
    const Task& task;
    const int count;
    std::atomic<int> next{0};
    std::atomic<bool> out_of_memory{false};
  } shared{task, count};
  // Always the same number of threads: OpenMP ends and restarts threads when it changes.
  parallel(
      [](void* data) {
        Shared& s = *static_cast<Shared*>(data);
        try {
          for (int i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.task(i);
        } catch (const std::bad_alloc&) {  // must not leave through OpenMP's C frames
          s.out_of_memory.store(true, std::memory_order_relaxed);
        }
      },
      &shared, static_cast<unsigned>(threads), 0);
  if (shared.out_of_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

// Memory for one task, carved from a block that only grows and that the thread keeps. What the
// instruction sets call is inlined always: a copy made for one must not be linked into another.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { std::free(block_); }

  // Start anew with room for `bytes`; what was taken before is gone.
  void reset(size_t bytes);

  // Uninitialised room for `count` elements. reset() must have asked for it.
  template <class T>
  [[gnu::always_inline]] T* take(size_t count) {
    T* p = reinterpret_cast<T*>(block_ + used_);
    used_ += room<T>(count);
    return p;
  }

  // What take<T>(count) uses up.
  template <class T>
  [[gnu::always_inline]] static constexpr size_t room(size_t count) {
    return aligned(count * sizeof(T));
  }

 private:
  static constexpr size_t kAlignment = 64;
  [[gnu::always_inline]] static constexpr size_t aligned(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  char* block_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

// This thread's, for the task it runs.
Arena& task_arena();

}  // namespace dustin

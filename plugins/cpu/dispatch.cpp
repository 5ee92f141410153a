#include "dispatch.h"

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dustin {

extern const Isa kPortable;
#ifdef DUSTIN_HAVE_AVX2
extern const Isa kAvx2;
#endif
#ifdef DUSTIN_HAVE_AVX512
extern const Isa kAvx512;
#endif
#ifdef DUSTIN_HAVE_AVX512_BF16
extern const Isa kAvx512Bf16;
#endif
#ifdef DUSTIN_HAVE_AMX
extern const Isa kAmx;
#endif

std::atomic<DustinParallel> g_parallel{nullptr};

Arena& task_arena() {
  thread_local Arena arena;
  return arena;
}

void Arena::reset(size_t bytes) {
  used_ = 0;
  if (bytes <= size_) return;
  std::free(block_);
  size_ = 0;
  block_ = static_cast<char*>(std::aligned_alloc(kAlignment, aligned(bytes)));
  if (!block_) throw std::bad_alloc();
  size_ = aligned(bytes);
}

namespace {

// Whether this processor has an instruction set. Here and not beside the kernels: those files are
// compiled for processors that have it.
#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool amx_bf16 = d >> 22 & 1, amx_tile = d >> 24 & 1;
  // Tiles are 8 KiB of state a thread, which a process has to ask Linux for.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return amx_bf16 && amx_tile && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

struct Candidate {
  const Isa* isa;
  bool (*usable)();
};

// Best first.
constexpr Candidate kCompiled[] = {
#ifdef DUSTIN_HAVE_AMX
    {&kAmx, has_amx},
#endif
#ifdef DUSTIN_HAVE_AVX512_BF16
    {&kAvx512Bf16, has_avx512_bf16},
#endif
#ifdef DUSTIN_HAVE_AVX512
    {&kAvx512, has_avx512},
#endif
#ifdef DUSTIN_HAVE_AVX2
    {&kAvx2, has_avx2},
#endif
    {&kPortable, [] { return true; }},
};

struct Choice {
  std::string names;  // of the usable ones
  std::atomic<const Isa*> used{nullptr};

  Choice() {
    for (const auto& [isa, usable] : kCompiled)
      if (usable()) {
        if (!used) used = isa;
        names += (names.empty() ? "" : " ") + std::string(isa->name);
      }
    if (const char* wanted = std::getenv("DUSTIN_CPU_ISA"))
      if (const Isa* found = find(wanted)) used = found;  // Python refuses unknown names
  }

  static const Isa* find(const char* name) {
    for (const auto& [isa, usable] : kCompiled)
      if (!std::strcmp(isa->name, name) && usable()) return isa;
    return nullptr;
  }
};

Choice& choice() {
  static Choice instance;
  return instance;
}

}  // namespace

const Isa& isa() { return *choice().used.load(std::memory_order_relaxed); }

void check_history(const DustinKvCache& cache, int new_tokens) {
  for (int b = 0; b < cache.batch; b++) {
    if (cache.lengths[b] < 0) refuse("lengths[", b, "] is ", cache.lengths[b]);
    if (cache.max_length > 0 && cache.lengths[b] > cache.max_length)
      refuse("lengths[", b, "] is ", cache.lengths[b], ", max_length ", cache.max_length);
    const int64_t tokens = int64_t{cache.lengths[b]} + new_tokens;
    if (tokens > INT_MAX) refuse("row ", b, " has ", tokens, " tokens, at most ", INT_MAX);
    const int64_t pages = (tokens + cache.page_size - 1) / cache.page_size;
    if (pages > cache.max_pages)
      refuse("row ", b, " needs ", pages, " pages for ", tokens, " tokens, its page table has ",
             cache.max_pages);
    const int32_t* table = cache.page_table + b * cache.page_table_stride;
    // One pass without branches: page_size 1 has as many entries as tokens.
    bool fine = true;
    for (int64_t i = 0; i < pages; i++)
      fine &= static_cast<uint32_t>(table[i]) < static_cast<uint32_t>(cache.num_pages);
    if (!fine) refuse("page_table[", b, "] names a page outside 0 ... ", cache.num_pages - 1);
  }
}

}  // namespace dustin

extern "C" {

void dustin_cpu_use_pool(DustinParallel parallel) {
  dustin::g_parallel.store(parallel, std::memory_order_release);
}

const char* dustin_cpu_isas(void) { return dustin::choice().names.c_str(); }

const char* dustin_cpu_isa(void) { return dustin::isa().name; }

int32_t dustin_cpu_use_isa(const char* name) {
  return dustin::guarded([&] {
    dustin::refuse_null(name, "name");
    const dustin::Isa* found = dustin::Choice::find(name);
    if (!found) dustin::refuse<DUSTIN_UNSUPPORTED>(name, " is not among ", dustin::choice().names);
    dustin::choice().used = found;
  });
}
}

// Runs the CUDA kernels of plugins/cuda on the host, thread for thread.
//
// Every CUDA thread is a fiber. A warp's lanes run until each of them stands at the same function
// of the whole warp (a shuffle, a matrix product, ...), which is then carried out for all 32 at
// once; a block's warps meet at __syncthreads. In which order they run, and when asynchronous
// copies land, is chosen from outside (`emulator_configure`): what a program without enough
// barriers or waits computes depends on that, and the tests run every order.
//
// Found besides: shared memory that was not written (it holds NaN), accesses past its end (the page
// behind it is unreadable), copies and matrix loads outside of it or from addresses that are not
// multiples of 16, warps and blocks whose threads stand at different places, failed DUSTIN_ASSERTs.
//
// Not modelled: memory ordering between blocks and between a warp's lanes, bank conflicts, registers,
// speed. That hardware lays out matrix fragments as written here is checked by tests/gpu alone.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

#include "number.h"
#include "status.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulator {

enum class Order : int { kForward, kBackward, kRandom, kOneWarpAtATime };
enum class Copies : int { kEager, kDeferred, kRandom };

struct Settings {
  Order order = Order::kForward;
  Copies copies = Copies::kDeferred;
  uint64_t seed = 1;
  int64_t shared_memory = 227 << 10;  // of a block, as on compute capability 9.0
};
Settings& settings();

struct Place {
  dim3 thread, block, grid, threads;
};
const Place& place();

// What lanes hand in to a function of the whole warp, and what they get.
struct Exchange {
  alignas(16) std::array<uint32_t, 16> in, out;
};
using Collective = void (*)(Exchange* lanes);  // of 32

// Waits until all lanes of the warp have come to `function`, which runs once for them.
Exchange& collect(Collective function, const std::array<uint32_t, 16>& in);

void sync_threads();
[[noreturn]] void fail(const char* what);

char* shared_memory();
int64_t shared_size();
void copy_async(void* shared, const void* global, bool valid);
void commit_copies();
void wait_for_copies(int pending);

void run(const std::function<void()>& kernel, dim3 grid, int threads, int64_t shared_bytes);

// ---- functions of the whole warp ----

void shuffle(Exchange* lanes);
void ballot(Exchange* lanes);
void meet(Exchange* lanes);
void multiply_add_float16(Exchange* lanes);
void multiply_add_bfloat16(Exchange* lanes);
void load_matrices(Exchange* lanes);
void load_matrices_transposed(Exchange* lanes);

inline int lane() { return static_cast<int>(place().thread.x % 32); }

template <class V>
V shuffle_from(V x, int source) {
  static_assert(sizeof(V) == 4);
  std::array<uint32_t, 16> in{};
  std::memcpy(&in[0], &x, 4);
  in[1] = static_cast<uint32_t>(source);
  std::memcpy(&x, &collect(shuffle, in).out[0], 4);
  return x;
}

}  // namespace emulator

#define threadIdx (emulator::place().thread)
#define blockIdx (emulator::place().block)
#define blockDim (emulator::place().threads)
#define gridDim (emulator::place().grid)
inline void __syncthreads() { emulator::sync_threads(); }
inline void __syncwarp() { emulator::collect(emulator::meet, {}); }

#define DUSTIN_KERNEL(threads, blocks) void
#define DUSTIN_GRID_CONSTANT
#define DUSTIN_DEVICE inline
#define DUSTIN_HOST_DEVICE inline
#define DUSTIN_ASSERT(condition) ((condition) ? (void)0 : emulator::fail("assertion: " #condition))

namespace dustin::cuda {

using std::max;
using std::min;

inline char* shared_memory() { return emulator::shared_memory(); }
inline void copy_async(void* shared, const void* global, bool valid) {
  emulator::copy_async(shared, global, valid);
}
inline void commit_copies() { emulator::commit_copies(); }
inline void wait_for_copies(int pending) { emulator::wait_for_copies(pending); }

inline void load_matrices(uint32_t (&out)[4], const void* row, emulator::Collective function) {
  std::array<uint32_t, 16> in{};
  std::memcpy(&in[0], &row, sizeof row);
  std::memcpy(out, &emulator::collect(function, in).out[0], sizeof out);
}
inline void load_matrices(uint32_t (&out)[4], const void* shared_row) {
  load_matrices(out, shared_row, emulator::load_matrices);
}
inline void load_matrices_transposed(uint32_t (&out)[4], const void* shared_row) {
  load_matrices(out, shared_row, emulator::load_matrices_transposed);
}

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16>;

template <class T>
void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                  uint32_t b1) {
  std::array<uint32_t, 16> in{a0, a1, a2, a3, b0, b1};
  std::memcpy(&in[8], c, sizeof c);
  const auto function =
      kIsHalf<T> ? emulator::multiply_add_float16 : emulator::multiply_add_bfloat16;
  std::memcpy(c, &emulator::collect(function, in).out[0], sizeof c);
}

template <class T>
uint32_t pack(float low, float high) {
  const auto round = [](float x) { return uint32_t{kIsHalf<T> ? half_of(x) : bfloat16_of(x)}; };
  return round(low) | round(high) << 16;
}

template <class Vector>
Vector load_once(const Vector* global) {
  if (reinterpret_cast<uintptr_t>(global) % sizeof(Vector) != 0)
    emulator::fail("a vector load from an address that is not a multiple of its size");
  return *global;
}

inline float power_of_2(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.f / x; }
template <class V>
V shuffle_xor(V x, int mask) {
  return emulator::shuffle_from(x, emulator::lane() ^ mask);
}
template <class V>
V shuffle_up(V x, int by) {
  const int source = emulator::lane() - by;
  return emulator::shuffle_from(x, source < 0 ? emulator::lane() : source);
}
template <class V>
V shuffle(V x, int lane) {
  return emulator::shuffle_from(x, lane & 31);
}
inline uint32_t ballot(bool x) { return emulator::collect(emulator::ballot, {x}).out[0]; }
inline bool any_of_warp(bool x) { return ballot(x) != 0; }

inline int population(uint32_t x) { return __builtin_popcount(x); }
inline int lowest_bit(uint32_t x) { return __builtin_ffs(static_cast<int>(x)) - 1; }
inline uint32_t bits_of(float x) { return ::bits_of(x); }
inline void add_shared(int* shared, int x) { *shared += x; }

inline int64_t shared_memory_of_a_block() { return emulator::settings().shared_memory; }

template <class Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, int64_t shared_bytes, void*,
            const Params& params) {
  if (shared_bytes > emulator::settings().shared_memory)
    refuse<DUSTIN_CUDA_ERROR>("kernel launch: ", shared_bytes, " bytes of shared memory");
  emulator::run([&] { kernel(params); }, grid, threads, shared_bytes);
}

}  // namespace dustin::cuda

extern "C" {

// Marks an emulated library.
DUSTIN_API int32_t dustin_cuda_emulated(void);

// In which order threads run from now on and when copies land (the enumerations above), the seed of
// what is random, and the shared memory of a block in bytes.
DUSTIN_API void emulator_configure(int32_t order, int32_t copies, uint64_t seed,
                                   int64_t shared_memory);
}

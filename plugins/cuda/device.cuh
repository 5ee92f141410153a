// What a kernel takes from the machine, behind names that exist twice: here for nvcc, and in
// tests/cuda/emulator.h for a host compiler, so that the same kernels run in the test suite.
//
// Beside these, kernels use threadIdx, blockIdx, __syncthreads and __syncwarp, and the full-warp
// functions below. All their shared memory is the dynamic one.
#pragma once

#include <cstdint>

// How T-typed tensors are stored, two elements a word, the first one in the lower half.
namespace dustin::cuda {
struct Float16 {};
struct BFloat16 {};
}  // namespace dustin::cuda

#ifndef __CUDACC__
#include "emulator.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cassert>

#include "status.h"

#define DUSTIN_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define DUSTIN_GRID_CONSTANT __grid_constant__
#define DUSTIN_DEVICE __device__ __forceinline__
#define DUSTIN_HOST_DEVICE __host__ __device__ inline

// Stops a debug build where what lies on the device is out of range.
#ifdef DUSTIN_CUDA_DEBUG
#define DUSTIN_ASSERT(condition) assert(condition)
#else
#define DUSTIN_ASSERT(condition) ((void)0)
#endif

namespace dustin::cuda {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

// The block's dynamic shared memory, aligned to 16 bytes.
DUSTIN_DEVICE char* shared_memory() {
  extern __shared__ uint4 dustin_shared[];
  return reinterpret_cast<char*>(dustin_shared);
}

DUSTIN_DEVICE unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Begins to copy 16 bytes, or to write 16 zero bytes where nothing is valid to copy. Both addresses
// are multiples of 16.
DUSTIN_DEVICE void copy_async(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

// Ends a group of this thread's copies.
DUSTIN_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until all but the last `pending` (0 ... 3) groups of this thread have landed. Other threads'
// copies are seen after a barrier.
DUSTIN_DEVICE void wait_for_copies(int pending) {
  if (pending == 0)
    asm volatile("cp.async.wait_group 0;\n" ::: "memory");
  else if (pending == 1)
    asm volatile("cp.async.wait_group 1;\n" ::: "memory");
  else if (pending == 2)
    asm volatile("cp.async.wait_group 2;\n" ::: "memory");
  else
    asm volatile("cp.async.wait_group 3;\n" ::: "memory");
}

// Four 8 x 8 matrices; lane 8 i + r gives the address of row r of matrix i. Lane l receives
// elements 2 (l % 4) and the next one of row l / 4 of matrix i in out[i].
DUSTIN_DEVICE void load_matrices(uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// The same of the transposed matrices.
DUSTIN_DEVICE void load_matrices_transposed(uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// c += a b with a 16 x 16, b 16 x 8, c 16 x 8. With g = lane / 4 and t = lane % 4 a lane holds
//   a[i]: row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next
//   b0, b1: column g, rows 2 t and the next, and 8 rows on
//   c[i]: row g + 8 (i / 2), column 2 t + i % 2
template <class T>
DUSTIN_DEVICE void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1);
template <>
DUSTIN_DEVICE void multiply_add<BFloat16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
DUSTIN_DEVICE void multiply_add<Float16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two numbers rounded to T, in one word.
template <class T>
DUSTIN_DEVICE uint32_t pack(float low, float high);
template <>
DUSTIN_DEVICE uint32_t pack<BFloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
DUSTIN_DEVICE uint32_t pack<Float16>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Memory that is read once and by nobody else: past the first-level cache.
DUSTIN_DEVICE uint4 load_once(const uint4* global) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(global));
  return x;
}
DUSTIN_DEVICE uint2 load_once(const uint2* global) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n"
               : "=r"(x.x), "=r"(x.y)
               : "l"(global));
  return x;
}

// 2^x; 0 for -inf.
DUSTIN_DEVICE float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to the last bit but one.
DUSTIN_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

template <class V>
DUSTIN_DEVICE V shuffle_xor(V x, int mask) {
  return __shfl_xor_sync(kWholeWarp, x, mask);
}
template <class V>
DUSTIN_DEVICE V shuffle_up(V x, int by) {
  return __shfl_up_sync(kWholeWarp, x, by);
}
template <class V>
DUSTIN_DEVICE V shuffle(V x, int lane) {
  return __shfl_sync(kWholeWarp, x, lane);
}
DUSTIN_DEVICE uint32_t ballot(bool x) { return __ballot_sync(kWholeWarp, x); }
DUSTIN_DEVICE bool any_of_warp(bool x) { return __any_sync(kWholeWarp, x); }

DUSTIN_DEVICE int population(uint32_t x) { return __popc(x); }
DUSTIN_DEVICE int lowest_bit(uint32_t x) { return __ffs(static_cast<int>(x)) - 1; }
DUSTIN_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
DUSTIN_DEVICE void add_shared(int* shared, int x) { atomicAdd(shared, x); }

// ---- host side ----

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  // The error stays with the runtime otherwise, and the next caller would take it for its own.
  cudaGetLastError();
  refuse<DUSTIN_CUDA_ERROR>(what, ": ", cudaGetErrorString(error));
}

// Bytes of shared memory that a block may have on the current device.
inline int64_t shared_memory_of_a_block() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "no CUDA device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  return bytes;
}

// Queues a kernel.
template <class Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, int64_t shared_bytes, void* stream,
            const Params& params) {
  constexpr int64_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "cudaFuncSetAttribute");
  const cudaLaunchConfig_t config{grid,
                                  dim3(threads),
                                  static_cast<size_t>(shared_bytes),
                                  static_cast<cudaStream_t>(stream),
                                  nullptr,
                                  0};
  check(cudaLaunchKernelEx(&config, kernel, params), "kernel launch");
}

}  // namespace dustin::cuda

#endif  // __CUDACC__

namespace dustin::cuda {

// Which warp of its block this is. By a shuffle, so that the compiler knows that all lanes have the
// same and branch alike.
DUSTIN_DEVICE int warp_of_block() { return shuffle(static_cast<int>(threadIdx.x / 32), 0); }

}  // namespace dustin::cuda

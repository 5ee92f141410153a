// What the plugins call of the CUDA runtime, on host memory: the emulated build's stand-in.
#include <cuda_runtime_api.h>

#include <cstring>

namespace {

bool is_missing(const void* data, size_t bytes) { return !data && bytes > 0; }

}  // namespace

extern "C" {

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  if (is_missing(data, bytes)) return cudaErrorInvalidValue;
  if (bytes > 0) std::memset(data, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  if (kind != cudaMemcpyDeviceToDevice || is_missing(to, bytes) || is_missing(from, bytes))
    return cudaErrorInvalidValue;
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument";
}
}

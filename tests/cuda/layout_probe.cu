// Where mma and ldmatrix keep their elements on hardware, against what tests/cuda/emulator.cpp says.
//
//   nvcc -std=c++17 -arch=native -I. -Iplugins/include -Iplugins/cuda -Iplugins/common
//     tests/cuda/layout_probe.cu -o probe
//
// Prints "layout ok", or what lies elsewhere. Elements are small integers, so every product is
// exact, and what is right is computed here from the matrices. A host compiler makes of the same
// file a program that asks the emulator; make emulated runs it.
#include <cstdio>
#include <cstring>
#include <exception>

#include "plugins/cuda/device.cuh"

namespace dustin::cuda {
namespace {

constexpr int kLanes = 32;

// One 16 x 16 matrix A, 16 x 8 matrix B and 16 x 8 matrix C, and what the machine made of them.
struct Probe {
  uint16_t a[16][16];
  uint16_t b[16][8];
  uint16_t numbers[16][16];  // 1, 2, ...: where an element of `loaded` comes from
  float c[16][8];
  float product[16][8];          // C + A B
  float by_matrix_loads[16][8];  // the same, with A and B loaded by ldmatrix
  uint32_t loaded[kLanes][4];    // `numbers` by ldmatrix, as a lane got them
  uint32_t transposed[kLanes][4];
};

struct ProbeParams {
  Probe* probe;
};

DUSTIN_DEVICE uint32_t two(uint16_t low, uint16_t high) { return low | uint32_t{high} << 16; }

template <class T>
DUSTIN_KERNEL(kLanes, 1)
probe_kernel(const DUSTIN_GRID_CONSTANT ProbeParams p) {
  Probe& probe = *p.probe;
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;

  // From memory, element by element, as device.cuh describes the fragments.
  uint32_t a[4], b[2];
  float c[4];
  for (int i = 0; i < 4; ++i) {
    const uint16_t* const row = probe.a[g + 8 * (i % 2)] + 2 * t + 8 * (i / 2);
    a[i] = two(row[0], row[1]);
    c[i] = probe.c[g + 8 * (i / 2)][2 * t + i % 2];
  }
  for (int i = 0; i < 2; ++i) b[i] = two(probe.b[2 * t + 8 * i][g], probe.b[2 * t + 8 * i + 1][g]);
  multiply_add<T>(c, a[0], a[1], a[2], a[3], b[0], b[1]);
  for (int i = 0; i < 4; ++i) probe.product[g + 8 * (i / 2)][2 * t + i % 2] = c[i];

  // Through shared memory: A and the numbers 16 x 16 in rows of 16, B in rows of 8 behind them.
  uint16_t* const shared_a = reinterpret_cast<uint16_t*>(shared_memory());
  uint16_t* const shared_numbers = shared_a + 256;
  uint16_t* const shared_b = shared_numbers + 256;
  for (int i = lane; i < 256; i += kLanes) {
    shared_a[i] = probe.a[i / 16][i % 16];
    shared_numbers[i] = probe.numbers[i / 16][i % 16];
    if (i < 128) shared_b[i] = probe.b[i / 8][i % 8];
  }
  __syncthreads();
  // Quarters in the order of a's words: top left, bottom left, top right, bottom right.
  const int place = (lane % 16) * 16 + lane / 16 * 8;
  load_matrices(probe.loaded[lane], shared_numbers + place);
  load_matrices_transposed(probe.transposed[lane], shared_numbers + place);

  load_matrices(a, shared_a + place);
  uint32_t words[4];
  load_matrices_transposed(words, shared_b + lane % 16 * 8);
  for (int i = 0; i < 4; ++i) c[i] = probe.c[g + 8 * (i / 2)][2 * t + i % 2];
  multiply_add<T>(c, a[0], a[1], a[2], a[3], words[0], words[1]);
  for (int i = 0; i < 4; ++i) probe.by_matrix_loads[g + 8 * (i / 2)][2 * t + i % 2] = c[i];
}

// Small integers as the upper bits of an fp32 number and as fp16.
uint16_t bits_of_integer(int x, BFloat16) {
  const float value = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}
uint16_t bits_of_integer(int x, Float16) {
  if (x == 0) return 0;
  int magnitude = x < 0 ? -x : x, exponent = 0;
  while (magnitude >> (exponent + 1)) ++exponent;
  const int mantissa = (magnitude << (10 - exponent)) & 0x3ff;
  return static_cast<uint16_t>((x < 0 ? 0x8000 : 0) | (exponent + 15) << 10 | mantissa);
}

#ifdef __CUDACC__
// Host and device take turns over one copy of it.
class Shared {
 public:
  Shared() { check(cudaMallocManaged(&probe_, sizeof(Probe)), "cudaMallocManaged"); }
  ~Shared() { cudaFree(probe_); }
  Probe* get() const { return probe_; }
  static void wait() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

 private:
  Probe* probe_ = nullptr;
};
#else
class Shared {
 public:
  Probe* get() { return &probe_; }
  static void wait() {}

 private:
  Probe probe_;
};
#endif

template <class T>
int wrong_of(const char* name) {
  int a[16][16], b[16][8], wrong = 0;
  Shared shared;
  Probe& probe = *shared.get();
  std::memset(&probe, 0, sizeof probe);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      a[i][j] = (7 * i + 3 * j) % 17 - 8;
      probe.a[i][j] = bits_of_integer(a[i][j], T{});
      probe.numbers[i][j] = static_cast<uint16_t>(16 * i + j + 1);
      if (j >= 8) continue;
      b[i][j] = (5 * i + 11 * j) % 13 - 6;
      probe.b[i][j] = bits_of_integer(b[i][j], T{});
      probe.c[i][j] = static_cast<float>(100 * i + j);
    }
  launch(probe_kernel<T>, dim3(1), kLanes, (256 + 256 + 128) * 2, nullptr, ProbeParams{&probe});
  Shared::wait();

  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      int sum = 100 * i + j;
      for (int k = 0; k < 16; ++k) sum += a[i][k] * b[k][j];
      const auto compare = [&](float found, const char* what) {
        if (found == static_cast<float>(sum)) return;
        std::printf("%s: row %d, column %d of %s is %g, not %d\n", name, i, j, what, found, sum);
        ++wrong;
      };
      compare(probe.product[i][j], "mma");
      compare(probe.by_matrix_loads[i][j], "mma behind ldmatrix");
    }
  for (int lane = 0; lane < kLanes; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int half = 0; half < 2; ++half) {
        const int major = lane / 4, minor = 2 * (lane % 4) + half;
        const int top = matrix % 2 * 8, left = matrix / 2 * 8;
        const auto compare = [&](uint32_t word, int row, int column, const char* what) {
          const int found = static_cast<int>(word >> 16 * half & 0xffff);
          const int right = 16 * (top + row) + left + column + 1;
          if (found == right) return;
          std::printf("%s: lane %d, word %d, half %d of %s is %d, not %d\n", name, lane, matrix,
                      half, what, found, right);
          ++wrong;
        };
        compare(probe.loaded[lane][matrix], major, minor, "ldmatrix");
        compare(probe.transposed[lane][matrix], minor, major, "ldmatrix.trans");
      }
  return wrong;
}

}  // namespace
}  // namespace dustin::cuda

int main() {
  using namespace dustin::cuda;
  try {
    const int wrong = wrong_of<BFloat16>("bfloat16") + wrong_of<Float16>("float16");
    if (wrong > 0) return 1;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  std::printf("layout ok\n");
}

// What the CUDA kernels take of what the C ABI can say.
#pragma once

#include "dustin/kernels.h"

namespace dustin::cuda {

constexpr int kHeadDims[] = {64, 80, 96, 128, 256};
constexpr int kMaxGroup = 16;  // query heads a KV head

// Refuses caches of a dtype, head size, alignment or batch size that the kernels do not take.
void check_supported(const DustinKvCache& cache, bool reads_values);

// Refuses rows of heads that do not lie at multiples of four bytes.
void check_supported(const DustinRows& rows, const char* name);

// Refuses a workspace that is too small or not aligned.
void check_workspace(const void* workspace, int64_t bytes, int64_t needed);

// The largest history that a row can have, `rows` new tokens behind it.
int64_t longest_history(const DustinKvCache& cache, int32_t rows);

}  // namespace dustin::cuda

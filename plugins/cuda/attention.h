// Between the C ABI of attention and its kernels, which are compiled one head size a file.
#pragma once

#include "attention.cuh"

namespace dustin::cuda {

// Queues the attention of one call; fills in p.stages.
template <int D>
void launch_attention(AttentionParams p, void* stream);

}  // namespace dustin::cuda

#include "attention_launch.cuh"

template void dustin::cuda::launch_attention<64>(AttentionParams p, void* stream);

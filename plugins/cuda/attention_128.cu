#include "attention_launch.cuh"

template void dustin::cuda::launch_attention<128>(AttentionParams p, void* stream);

#include "attention_launch.cuh"

template void dustin::cuda::launch_attention<256>(AttentionParams p, void* stream);

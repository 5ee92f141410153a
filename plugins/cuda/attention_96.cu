#include "attention_launch.cuh"

template void dustin::cuda::launch_attention<96>(AttentionParams p, void* stream);

#include "attention_launch.cuh"

template void dustin::cuda::launch_attention<80>(AttentionParams p, void* stream);

// The body of launch_attention<D>; attention_<D>.cu instantiates it.
#pragma once

#include "attention.h"
#include "status.h"

namespace dustin::cuda {

template <class T, class Shape>
void launch_attention(AttentionParams p, void* stream) {
  const int64_t room = shared_memory_of_a_block();
  p.stages = Shape::kWantedStages;
  while (p.stages > 2 && Shape::shared_bytes(p.stages) > room) --p.stages;
  if (Shape::shared_bytes(p.stages) > room)
    refuse<DUSTIN_UNSUPPORTED>("attention with head_dim ", Shape::kDim, " takes ",
                               Shape::shared_bytes(p.stages),
                               " bytes of shared memory a block, this GPU has ", room);
  const int64_t all_rows = int64_t{p.rows} * p.group;
  const int64_t row_blocks = (all_rows + Shape::kRows - 1) / Shape::kRows;
  launch(attention_kernel<T, Shape>,
         dim3(static_cast<unsigned>(row_blocks * p.max_parts), p.cache.num_kv_heads, p.cache.batch),
         Shape::kThreads, Shape::shared_bytes(p.stages), stream, p);
  if (p.max_parts == 1) return;
  launch(join_parts_kernel<T, Shape::kDim>,
         dim3(static_cast<unsigned>((all_rows * p.cache.num_kv_heads + 3) / 4), p.cache.batch), 128,
         0, stream, p);
}

template <class T, int D>
void launch_attention_as(const AttentionParams& p, void* stream) {
  constexpr int kWindow = 16;  // tokens; more are a prompt
  if (p.rows * p.group <= FewRows<D>::kRows)
    launch_attention<T, FewRows<D>>(p, stream);
  else if (p.rows <= kWindow)
    launch_attention<T, WindowRows<D>>(p, stream);
  else
    launch_attention<T, ManyRows<D>>(p, stream);
}

template <int D>
void launch_attention(AttentionParams p, void* stream) {
  if (p.cache.dtype == DUSTIN_FLOAT16)
    launch_attention_as<Float16, D>(p, stream);
  else
    launch_attention_as<BFloat16, D>(p, stream);
}

}  // namespace dustin::cuda

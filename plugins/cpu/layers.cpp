// rms_norm, rotate, silu_mul: rows over threads where there are many.
#include <algorithm>

#include "dispatch.h"
#include "pool.h"

namespace dustin {
namespace {

// Rows in, rows out: rms_norm and silu_mul.
template <class Params>
void check_rows(const Params& p, int32_t threads) {
  refuse_below(threads, 1, "threads");
  check_dtype(p.dtype);
  refuse_below(p.rows, 0, "rows");
  refuse_below(p.dim, 1, "dim");
  if (p.rows == 0) return;
  refuse_null(p.x, "x");
  refuse_null(p.out, "out");
}

// Calls body(row) for all rows of `row_elements` each; a decoding step's few stay on this thread,
// which is done with them before another wakes up.
template <class Body>
void each_row(int64_t rows, int64_t row_elements, int32_t threads, const Body& body) {
  constexpr int64_t kElementsATask = 32 << 10;
  const int64_t rows_a_task = std::max<int64_t>(1, kElementsATask / row_elements);
  const int64_t tasks = (rows + rows_a_task - 1) / rows_a_task;
  parallel_for(static_cast<int>(tasks), tasks < 4 ? 1 : threads, [&](int task) {
    const int64_t last = std::min(rows, (task + 1) * rows_a_task);
    for (int64_t r = task * rows_a_task; r < last; r++) body(r);
  });
}

}  // namespace
}  // namespace dustin

extern "C" {

int32_t dustin_cpu_rms_norm(const DustinRmsNormParams* params, int32_t threads) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(params, "params");
    const DustinRmsNormParams& p = *params;
    check_rows(p, threads);
    if (p.rows == 0) return;
    refuse_null(p.weight, "weight");
    const auto norm = isa().rms_norm[p.dtype];
    each_row(p.rows, p.dim, threads, [&](int64_t r) {
      norm(advance(p.x, r * p.dim, p.dtype), p.weight, p.eps, p.dim,
           advance(p.out, r * p.dim, p.dtype));
    });
  });
}

int32_t dustin_cpu_rotate(const DustinRotateParams* params, int32_t threads) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(params, "params");
    const DustinRotateParams& p = *params;
    refuse_below(threads, 1, "threads");
    check_dtype(p.dtype);
    refuse_below(p.batch, 0, "batch");
    refuse_below(p.rows, 0, "rows");
    refuse_below(p.heads, 0, "heads");
    refuse_below(p.head_dim, 2, "head_dim");
    if (p.head_dim % 2 || p.head_dim > DUSTIN_MAX_HEAD_DIM)
      refuse("head_dim is ", p.head_dim, ", must be even and at most ", DUSTIN_MAX_HEAD_DIM);
    if (p.batch == 0 || p.rows == 0 || p.heads == 0) return;
    refuse_null(p.x.data, "x");
    refuse_null(p.cos, "cos");
    refuse_null(p.sin, "sin");
    const auto rotate = isa().rotate[p.dtype];
    const int64_t rows = int64_t{p.batch} * p.rows;
    each_row(rows, int64_t{p.heads} * p.head_dim, threads, [&](int64_t r) {
      const int64_t place = r / p.rows * p.x.batch_stride + r % p.rows * p.x.row_stride;
      for (int h = 0; h < p.heads; h++)
        rotate(advance(p.x.data, place + h * p.x.head_stride, p.dtype),
               advance(p.cos, r * p.head_dim, p.dtype), advance(p.sin, r * p.head_dim, p.dtype),
               p.head_dim);
    });
  });
}

int32_t dustin_cpu_silu_mul(const DustinSiluMulParams* params, int32_t threads) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(params, "params");
    const DustinSiluMulParams& p = *params;
    check_rows(p, threads);
    if (p.rows == 0) return;
    const auto silu_mul = isa().silu_mul[p.dtype];
    each_row(p.rows, p.dim, threads, [&](int64_t r) {
      silu_mul(advance(p.x, 2 * r * p.dim, p.dtype), p.dim, advance(p.out, r * p.dim, p.dtype));
    });
  });
}
}

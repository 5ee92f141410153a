// What the instruction sets implement, and the table that holds one of them.
#pragma once

#include <cstdint>

#include "dustin/kernels.h"
#include "element.h"

namespace dustin {

// The tokens of one row and one KV head in a paged cache.
struct Tokens {
  const void* k;  // the head's first element of page 0
  const void* v;
  const int32_t* pages;
  int64_t page_stride, token_stride;  // elements
  int32_t page_size;

  // Where position p begins, in elements after k or v. Inlined always, as all that instruction sets
  // share: a copy made for one must not be linked into another.
  [[gnu::always_inline]] int64_t offset(int p) const {
    if (p < page_size) return pages[0] * page_stride + p * token_stride;
    return pages[p / page_size] * page_stride + (p % page_size) * token_stride;
  }
};

// Query rows of one batch row and KV head against a part of its keys. Row r is query head r % group
// of token r / group; keys are the history's (all, or those listed) and then the new tokens'.
struct AttendTask {
  Tokens tokens;
  const int32_t* indices;  // [history] or null for the whole history
  int history;             // history keys
  int length;              // position of the first new token
  int first_key, last_key;
  DustinRows q;  // data at the batch row and the KV head's first query head
  int group, first_row, rows;
  int head_dim;
  float scale;
  // Results over these keys: sum of weights * values (not divided), in units of 2^max; the largest
  // logit times log2(e); sum of the weights.
  float* out;  // [padded rows, padded head_dim]
  float* max;  // [padded rows]
  float* sum;  // [padded rows]
};

// Logits of query rows of one batch row and KV head on consecutive history tokens, turned into
// weights 2^(x - max of this chunk).
struct ScoreTask {
  Tokens tokens;
  int first_key, last_key;
  const void* const* queries;  // [rows], D elements each
  int rows;
  int head_dim;
  float scale;
  float* weights;  // [rows, stride]
  int64_t stride;
  float* max;  // [rows], logits times log2(e)
  float* sum;  // [rows], of the weights
};

struct Isa {
  const char* name;
  int row_pad;  // query rows are padded to a multiple of it
  int dim_pad;  // head sizes to a multiple of it
  // By DustinDtype. `following`, where not null, is what this thread does next.
  void (*attend[3])(const AttendTask& task, const AttendTask* following);
  void (*score[3])(const ScoreTask&);
  // dst[0 .. head_dim) = src * factor, in the element type.
  void (*scale_row[3])(const float* src, float factor, int head_dim, void* dst);
  // dst[d] = dst[d] * a + src[d] * b for count a multiple of lanes.
  void (*merge)(float* dst, float a, const float* src, float b, int count);
  // scores[j] += sum over rows of factors[r] * weights[r * stride + j].
  void (*weigh)(const float* weights, int64_t stride, const float* factors, int rows, int count,
                float* scores);
  // One row, one head, one row.
  void (*rms_norm[3])(const void* x, const void* weight, float eps, int dim, void* out);
  void (*rotate[3])(void* x, const void* cos, const void* sin, int dim);
  void (*silu_mul[3])(const void* x, int dim, void* out);
};

}  // namespace dustin

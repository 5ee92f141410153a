/* The five ops of Dustin behind one C ABI.
 *
 * Plain-old-data parameter structs, raw pointers, sizes and strides: no torch, no TensorRT. Python
 * reaches it with ctypes, TensorRT plugins link it, and the CUDA kernels take the same structs.
 *
 * Conventions
 *   B batch rows, w new tokens a row, Hq query heads, Hkv KV heads, D head size, N history.
 *   Query head h reads KV head h / (Hq / Hkv).
 *   Strides count elements, not bytes. The D elements of one head are contiguous.
 *   Every function returns a DustinStatus. Arguments are checked before anything is written; after
 *   an error `dustin_last_error` says what is wrong.
 *   Results depend on a row's own data only: not on its neighbours, nor on the number of threads.
 */
#ifndef DUSTIN_KERNELS_H_
#define DUSTIN_KERNELS_H_

#include <stdint.h>

#if defined(_WIN32)
#define DUSTIN_API __declspec(dllexport)
#else
#define DUSTIN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change to the structs or functions below. */
#define DUSTIN_ABI_VERSION 2

/* Largest head size the kernels take. */
#define DUSTIN_MAX_HEAD_DIM 512

typedef enum DustinStatus {
  DUSTIN_OK = 0,
  DUSTIN_INVALID_ARGUMENT = 1, /* null pointer, negative size, index out of range, ... */
  DUSTIN_UNSUPPORTED = 2,      /* a dtype, head size or instruction set that is not there */
  DUSTIN_OUT_OF_MEMORY = 3,    /* no scratch memory */
  DUSTIN_CUDA_ERROR = 4        /* the CUDA runtime refused a launch */
} DustinStatus;

typedef enum DustinDtype {
  DUSTIN_FLOAT32 = 0,
  DUSTIN_FLOAT16 = 1,
  DUSTIN_BFLOAT16 = 2
} DustinDtype;

/* Rows of heads, [B, rows, heads, D]: queries, new keys and values, outputs. */
typedef struct DustinRows {
  void* data; /* not written where it is an input */
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
} DustinRows;

/* A paged KV cache and the batch that reads it.
 *
 * Token t of row b and KV head h begins at
 *   data + page_table[b * page_table_stride + t / page_size] * page_stride
 *        + h * head_stride + (t % page_size) * token_stride
 * for data = k and v alike. Contiguous pages [num_pages, Hkv, page_size, D] are the usual case; the
 * strides also reach a pool that interleaves layers, keys and values.
 */
typedef struct DustinKvCache {
  void* k;
  void* v;                   /* may be null for srh_score, which reads keys only */
  const int32_t* page_table; /* [B, max_pages] */
  const int32_t* lengths;    /* [B], history tokens before this call */
  int64_t page_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t page_table_stride;
  int32_t dtype; /* DustinDtype, also of queries, new rows and outputs */
  int32_t batch; /* B */
  int32_t num_pages;
  int32_t num_kv_heads; /* Hkv */
  int32_t page_size;    /* tokens */
  int32_t head_dim;     /* D */
  int32_t max_pages;
  int32_t
      max_length; /* no lengths[b] is larger; 0 where nothing less than the page table bounds them */
} DustinKvCache;

/* Write w new keys and values a row at positions lengths[b] ... lengths[b] + w - 1. */
typedef struct DustinKvAppendParams {
  DustinKvCache cache;
  DustinRows k; /* [B, w, Hkv, D] */
  DustinRows v; /* [B, w, Hkv, D] */
  int32_t rows; /* w */
  int32_t reserved;
} DustinKvAppendParams;

/* scores[b, j] += sum over heads and rows of softmax_j(q . k_j * scale), j < lengths[b].
 * (Dustin, arXiv 2606.24957, steps 1 and 2.) Each KV head's keys are read once. */
typedef struct DustinSrhScoreParams {
  DustinKvCache cache;
  DustinRows queries;      /* [B, R, P, D] */
  const int32_t* kv_heads; /* [P], in host memory: the KV head that each query head reads */
  float* scores;           /* [B, scores_width], added to in place; from lengths[b] on untouched */
  int64_t scores_stride;
  int32_t scores_width;
  int32_t rows;        /* R */
  int32_t query_heads; /* P */
  float scale;
} DustinSrhScoreParams;

/* sink u window u top-m of draft_scores u fill by target_scores: exactly min(budget, lengths[b])
 * distinct indices, ascending, -1 pads. Ties go to the lower index; NaN counts as the largest score.
 * (Dustin, step 3.) Without draft_scores lookahead is ignored; without target_scores draft_scores
 * fill; without both the window grows to budget - sink. */
typedef struct DustinSelectTokensParams {
  const float* target_scores; /* [B, target_width] or null */
  const float* draft_scores;  /* [B, draft_width] or null */
  const int32_t* lengths;     /* [B] */
  int32_t* indices;           /* [B, budget] */
  int32_t* counts;            /* [B] */
  int64_t target_stride;
  int64_t draft_stride;
  int64_t indices_stride;
  int32_t target_width;
  int32_t draft_width;
  int32_t batch;
  int32_t budget;    /* k, sink and window included */
  int32_t lookahead; /* m */
  int32_t sink;
  int32_t window;
  int32_t reserved;
} DustinSelectTokensParams;

/* w queries a row over the whole history and, causally, the w new tokens, whose keys and values are
 * in the cache already: query i reads positions 0 ... lengths[b] + i. */
typedef struct DustinDenseAttentionParams {
  DustinKvCache cache;
  DustinRows q;   /* [B, w, Hq, D] */
  DustinRows out; /* [B, w, Hq, D] */
  float* lse;     /* [B, w, Hq], contiguous: log-sum-exp of the scaled logits; or null */
  int32_t rows;   /* w */
  int32_t heads;  /* Hq */
  float scale;
  int32_t reserved;
} DustinDenseAttentionParams;

/* The same over the history tokens listed in indices. (Dustin, step 4.) Where counts[b] equals
 * lengths[b] the whole history is read, with the very result of dense_attention; only then may it
 * exceed the budget. */
typedef struct DustinSparseAttentionParams {
  DustinDenseAttentionParams attention;
  const int32_t* indices; /* [B, budget], distinct positions < lengths[b]; past counts[b] ignored */
  const int32_t* counts;  /* [B] */
  int64_t indices_stride;
  int32_t budget;
  int32_t max_count; /* no counts[b] is larger; 0 for the budget */
} DustinSparseAttentionParams;

/* What went wrong in the last call of this thread that returned an error; never null. */
DUSTIN_API const char* dustin_last_error(void);

/* DUSTIN_ABI_VERSION of the library. */
DUSTIN_API int32_t dustin_abi_version(void);

/* ---- CPU -------------------------------------------------------------------------------------- */

/* Runs body(data) once on each of `threads` threads and waits; the signature of GOMP_parallel, so
 * that the kernels can run on the very OpenMP pool that torch uses. */
typedef void (*DustinParallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

/* Take this pool from now on; null runs everything on the calling thread. */
DUSTIN_API void dustin_cpu_use_pool(DustinParallel parallel);

/* Names of the instruction sets that are compiled in and that this processor has, best first,
 * parted by spaces: of "amx avx512_bf16 avx512 avx2 portable". */
DUSTIN_API const char* dustin_cpu_isas(void);

/* The one in use: the best, or what the environment variable DUSTIN_CPU_ISA named at load time. */
DUSTIN_API const char* dustin_cpu_isa(void);

/* Use another. DUSTIN_UNSUPPORTED where it is not among dustin_cpu_isas. */
DUSTIN_API int32_t dustin_cpu_use_isa(const char* name);

/* `threads` is the most that a call may occupy, the calling one included. */
DUSTIN_API int32_t dustin_cpu_kv_append(const DustinKvAppendParams* params, int32_t threads);
DUSTIN_API int32_t dustin_cpu_srh_score(const DustinSrhScoreParams* params, int32_t threads);
DUSTIN_API int32_t dustin_cpu_select_tokens(const DustinSelectTokensParams* params,
                                            int32_t threads);
DUSTIN_API int32_t dustin_cpu_dense_attention(const DustinDenseAttentionParams* params,
                                              int32_t threads);
DUSTIN_API int32_t dustin_cpu_sparse_attention(const DustinSparseAttentionParams* params,
                                               int32_t threads);

/* What lies between a decoder layer's matrix products, for CPUs, where at a few rows a call of a
 * general operator costs more than its work. Everything fp32 inside. */

/* out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. */
typedef struct DustinRmsNormParams {
  const void* x;      /* [rows, dim], contiguous */
  const void* weight; /* [dim] */
  void* out;          /* [rows, dim], contiguous; may be x */
  int64_t rows;
  int32_t dim;
  int32_t dtype; /* DustinDtype, of all three */
  float eps;
  int32_t reserved;
} DustinRmsNormParams;

/* Rotary embedding in place: for the halves (a, b) of a head, (a cos_a - b sin_a, b cos_b + a sin_b). */
typedef struct DustinRotateParams {
  DustinRows x;    /* [B, rows, heads, D] */
  const void* cos; /* [B, rows, D], contiguous */
  const void* sin;
  int32_t batch;
  int32_t rows;
  int32_t heads;
  int32_t head_dim; /* even, at most DUSTIN_MAX_HEAD_DIM */
  int32_t dtype;    /* DustinDtype, of all three */
  int32_t reserved;
} DustinRotateParams;

/* out[r, i] = silu(x[r, i]) * x[r, dim + i]: a gated MLP's activation. */
typedef struct DustinSiluMulParams {
  const void* x; /* [rows, 2 * dim], contiguous */
  void* out;     /* [rows, dim], contiguous */
  int64_t rows;
  int32_t dim;
  int32_t dtype; /* DustinDtype, of both */
} DustinSiluMulParams;

DUSTIN_API int32_t dustin_cpu_rms_norm(const DustinRmsNormParams* params, int32_t threads);
DUSTIN_API int32_t dustin_cpu_rotate(const DustinRotateParams* params, int32_t threads);
DUSTIN_API int32_t dustin_cpu_silu_mul(const DustinSiluMulParams* params, int32_t threads);

/* Read `count` rows of `row_bytes` bytes at base + rows[i] * row_bytes, or one after another where
 * rows is null, and add up their 64-bit words in *sum: what benchmarks take as the memory's
 * bandwidth for streams and for random rows. row_bytes is a multiple of 64. */
DUSTIN_API int32_t dustin_cpu_read_rows(const void* base, int64_t row_bytes, const int64_t* rows,
                                        int64_t count, uint64_t* sum, int32_t threads);

/* ---- CUDA -------------------------------------------------------------------------------------- */

/* In a library of its own, for NVIDIA GPUs of compute capability 8.0 and later. The structs are the
 * same; every pointer in them is device memory, but for kv_heads, which is read during the call.
 *
 * A call queues kernels on `stream` (a cudaStream_t) and does nothing else: it allocates nothing,
 * copies nothing and waits for nothing. So it can be captured in a CUDA graph and replayed over
 * other lengths, counts, indices and page tables: how it is launched follows from the struct alone,
 * with max_length and max_count as bounds of what lies on the device.
 *
 * float16 and bfloat16; head sizes 64, 80, 96, 128 and 256; up to 16 query heads a KV head; up to
 * DUSTIN_CUDA_MAX_SCORED_HEADS query heads a scoring call. k, v and their strides are multiples of
 * 16 bytes, those of other rows of heads of 4. What is not supported is refused, as on the CPU. What
 * lies on the device cannot be checked here: lengths, counts, indices and page tables that are out
 * of range stop a debug build (DUSTIN_CUDA_DEBUG) by an assertion and are undefined behaviour in
 * others. */
#define DUSTIN_CUDA_MAX_SCORED_HEADS 128

/* Bytes of device memory, aligned to 256, that a call with these params takes as `workspace`: often
 * 0. A function of shapes alone. -1 after an error. */
DUSTIN_API int64_t dustin_cuda_srh_score_workspace(const DustinSrhScoreParams* params);
DUSTIN_API int64_t dustin_cuda_dense_attention_workspace(const DustinDenseAttentionParams* params);
DUSTIN_API int64_t
dustin_cuda_sparse_attention_workspace(const DustinSparseAttentionParams* params);

DUSTIN_API int32_t dustin_cuda_kv_append(const DustinKvAppendParams* params, void* stream);
DUSTIN_API int32_t dustin_cuda_srh_score(const DustinSrhScoreParams* params, void* workspace,
                                         int64_t workspace_bytes, void* stream);
DUSTIN_API int32_t dustin_cuda_select_tokens(const DustinSelectTokensParams* params, void* stream);
DUSTIN_API int32_t dustin_cuda_dense_attention(const DustinDenseAttentionParams* params,
                                               void* workspace, int64_t workspace_bytes,
                                               void* stream);
DUSTIN_API int32_t dustin_cuda_sparse_attention(const DustinSparseAttentionParams* params,
                                                void* workspace, int64_t workspace_bytes,
                                                void* stream);

#ifdef __cplusplus
}
#endif

#endif /* DUSTIN_KERNELS_H_ */

"""`srh_score`: attention mass that a few semantic retrieval heads put on each history token."""

from __future__ import annotations

from array import array
from struct import Struct

from torch import Tensor

from dustin_trt.ops import cuda, native
from dustin_trt.ops._library import define
from dustin_trt.ops._paging import history
from dustin_trt.ops._params import (
    CACHE,
    ROWS,
    cache_fields,
    dense_rows,
    rows_fields,
    score_fields,
)


def reference(
    queries: Tensor,
    kv_heads: list[int],
    k_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    scores: Tensor,
) -> None:
    """Add one layer's attention to `scores`, in place.

    `scores[b, j] += Σ_heads Σ_rows softmax_j(q · k_j · scale)` over `j < lengths[b]`
    (Dustin, step 2 for the target, step 1 for the draft's R lookahead queries).

    Parameters
    ----------
    queries : Tensor `[B, R, P, D]`, R rows of P query heads, after rotary embedding
    kv_heads : the KV head that each of the P query heads reads
    k_cache : Tensor `[pages, Hkv, page_size, D]`
    page_table : Tensor `[B, max_pages]` int32
    lengths : Tensor `[B]` int32; scores at and past `lengths[b]` are left alone
    scale : logit scale, usually `D ** -0.5`
    scores : Tensor `[B, N]` fp32, accumulated in place
    """
    groups: dict[int, list[int]] = {}
    for column, kv_head in enumerate(kv_heads):
        groups.setdefault(kv_head, []).append(column)
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        keys = history(k_cache, page_table[b], length)
        for kv_head, columns in groups.items():
            # Every query head and every row of a group shares one pass over K.
            rows = queries[b][:, columns].flatten(0, 1).float()
            logits = (rows @ keys[kv_head].float().T) * scale
            scores[b, :length] += logits.softmax(-1).sum(0)


_PARAMS = Struct(f"@{CACHE}{ROWS}2Pq3if")


def _cpu(
    queries: Tensor,
    kv_heads: list[int],
    k_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    scores: Tensor,
) -> None:
    # Queries of another dtype would lose digits on their way into the kernel.
    if not native.takes(k_cache) or queries.dtype is not k_cache.dtype:
        return reference(queries, kv_heads, k_cache, page_table, lengths, scale, scores)
    queries, heads = dense_rows(queries, k_cache.dtype), array("i", kv_heads)
    params = _pack(queries, heads, k_cache, page_table, lengths, scale, scores)
    native.call("dustin_cpu_srh_score", params)


def _cuda(
    queries: Tensor,
    kv_heads: list[int],
    k_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    scores: Tensor,
) -> None:
    queries, heads = dense_rows(queries, queries.dtype), array("i", kv_heads)
    arguments = (k_cache, page_table, lengths, scale, scores)
    if queries.dtype is not k_cache.dtype:
        return reference(queries, kv_heads, *arguments)
    cuda.run(
        "srh_score",
        lambda: (_pack(queries, heads, *arguments), None),
        lambda: reference(queries, kv_heads, *arguments),
        k_cache,
    )


def _pack(
    queries: Tensor,
    heads: array,
    k_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    scores: Tensor,
) -> bytes:
    """`DustinSrhScoreParams`; `queries` as `dense_rows` returns them, `heads` of C integers."""
    batch, rows, query_heads, _ = queries.shape
    if len(heads) != query_heads:
        raise ValueError(f"queries have {query_heads} heads, kv_heads names {len(heads)}")
    cache, device = cache_fields(k_cache, None, page_table, lengths), k_cache.device
    added, stride, width = score_fields(scores, batch, device)
    return _PARAMS.pack(
        *cache, *rows_fields(queries, cache, "queries", device),
        heads.buffer_info()[0], added, stride, width, rows, query_heads, scale,
    )  # fmt: skip


srh_score = define(
    "srh_score",
    "(Tensor queries, int[] kv_heads, Tensor k_cache, Tensor page_table, Tensor lengths, "
    "float scale, Tensor(a!) scores) -> ()",
    reference,
    cpu=_cpu,
    cuda=_cuda,
    shape=lambda queries, kv_heads, k_cache, page_table, lengths, scale, scores: None,
)

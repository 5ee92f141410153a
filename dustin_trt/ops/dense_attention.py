"""`dense_attention`: w queries over the whole history and, causally, the w new tokens."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch
from torch import Tensor

from dustin_trt.ops import cuda, native
from dustin_trt.ops._attend import (
    Attend,
    attend_cpu,
    attend_reference,
    empty_like_queries,
)
from dustin_trt.ops._library import define
from dustin_trt.ops._paging import history
from dustin_trt.ops._params import CACHE, ROWS, cache_fields, dense_rows, rows_fields


def _implementation(attend: Attend) -> Callable[..., tuple[Tensor, Tensor]]:
    def dense_attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend to positions `0 … lengths[b] + i` for query i; the new K and V are cached already.

        Parameters
        ----------
        q : Tensor `[B, w, Hq, D]`, after rotary embedding
        k_cache, v_cache : Tensor `[pages, Hkv, page_size, D]`
        page_table : Tensor `[B, max_pages]` int32
        lengths : Tensor `[B]` int32, history length before the w new tokens
        scale : logit scale

        Returns
        -------
        out : Tensor `[B, w, Hq, D]`
        lse : Tensor `[B, w, Hq]` fp32
        """
        out, lse = empty_like_queries(q)
        for b, length in enumerate(lengths.tolist()):
            n = length + q.shape[1]
            k, v = (history(cache, page_table[b], n)[None] for cache in (k_cache, v_cache))
            out[b : b + 1], lse[b : b + 1] = attend(q[b : b + 1], k, v, scale)
        return out, lse

    return dense_attention


reference = _implementation(attend_reference)
_torch_cpu = _implementation(attend_cpu)

_PARAMS = Struct(f"@{CACHE}{ROWS}{ROWS}P2ifi")


def prepare(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor, bytes]:
    """Outputs to write, and `DustinDenseAttentionParams`; `q` as `dense_rows` returns it."""
    rows, w, heads, dim = q.shape
    cache, device = cache_fields(k_cache, v_cache, page_table, lengths), k_cache.device
    queries = rows_fields(q, cache, "q", device)
    # Of the ways to allocate, those which take least: a call must not cost more than the work.
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(rows, w, heads, dtype=torch.float32, device=device)
    params = _PARAMS.pack(
        *cache, *queries,
        out.data_ptr(), w * heads * dim, heads * dim, dim, lse.data_ptr(), w, heads, scale, 0,
    )  # fmt: skip
    return out, lse, params


def _cpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if q.dtype is not k_cache.dtype:  # which neither the kernels nor torch's take
        return reference(q, k_cache, v_cache, page_table, lengths, scale)
    if not native.takes(k_cache):
        return _torch_cpu(q, k_cache, v_cache, page_table, lengths, scale)
    q = dense_rows(q, q.dtype)
    out, lse, params = prepare(q, k_cache, v_cache, page_table, lengths, scale)
    native.call("dustin_cpu_dense_attention", params)
    return out, lse


def _cuda(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    arguments = (dense_rows(q, q.dtype), k_cache, v_cache, page_table, lengths, scale)
    if q.dtype is not k_cache.dtype:
        return reference(*arguments)

    def prepared() -> tuple[bytes, tuple[Tensor, Tensor]]:
        out, lse, params = prepare(*arguments)
        return params, (out, lse)

    return cuda.run("dense_attention", prepared, lambda: reference(*arguments), k_cache)


dense_attention = define(
    "dense_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor lengths, float scale) "
    "-> (Tensor, Tensor)",
    reference,
    cpu=_cpu,
    cuda=_cuda,
    shape=lambda q, k_cache, v_cache, page_table, lengths, scale: empty_like_queries(q),
)

"""`sparse_attention`: w queries over an index list of the history and the w new tokens."""

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
from dustin_trt.ops._paging import gather, history, token_rows
from dustin_trt.ops._params import dense_rows, list_fields
from dustin_trt.ops.dense_attention import prepare


def _implementation(attend: Attend) -> Callable[..., tuple[Tensor, Tensor]]:
    def sparse_attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor,
        indices: Tensor, counts: Tensor, scale: float, max_count: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend to the indexed history and, causally, to the w new tokens (step 4).

        Parameters
        ----------
        q : Tensor `[B, w, Hq, D]`, after rotary embedding
        k_cache, v_cache : Tensor `[pages, Hkv, page_size, D]`, the new K and V included
        page_table : Tensor `[B, max_pages]` int32
        lengths : Tensor `[B]` int32, history length before the w new tokens
        indices : Tensor `[B, k]` int32, distinct history positions, ascending; -1 pads
        counts : Tensor `[B]` int32, how many of a row's indices count; where it equals the row's
            length the whole history is read, exactly as by `dense_attention`
        scale : logit scale
        max_count : no count is larger; 0 for k. Only a row that reads its whole history may exceed
            k. What lies on a GPU cannot be looked at before the kernels are launched.

        Returns
        -------
        out : Tensor `[B, w, Hq, D]`
        lse : Tensor `[B, w, Hq]` fp32
        """
        out, lse = empty_like_queries(q)
        w, caches = q.shape[1], (k_cache, v_cache)
        by_count: dict[int, list[int]] = {}
        for b, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
            if count == length:  # the whole history: read it in place, exactly as dense does
                k, v = (history(cache, page_table[b], length + w)[None] for cache in caches)
                out[b : b + 1], lse[b : b + 1] = attend(q[b : b + 1], k, v, scale)
            else:
                by_count.setdefault(count, []).append(b)
        for count, batch in by_count.items():
            new = lengths[batch, None].long() + torch.arange(w, device=q.device)
            positions = torch.cat([indices[batch, :count].long(), new], 1)
            rows = token_rows(k_cache, page_table[batch], positions)
            k, v = (gather(cache, rows) for cache in caches)
            out[batch], lse[batch] = attend(q[batch], k, v, scale)
        return out, lse

    return sparse_attention


reference = _implementation(attend_reference)
_torch_cpu = _implementation(attend_cpu)

_LIST = Struct("@2Pq2i")
"""What `DustinSparseAttentionParams` has behind `DustinDenseAttentionParams`."""


def _cpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor,
    indices: Tensor, counts: Tensor, scale: float, max_count: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.dtype is not k_cache.dtype:  # which neither the kernels nor torch's take
        return reference(q, k_cache, v_cache, page_table, lengths, indices, counts, scale)
    if not native.takes(k_cache):
        return _torch_cpu(q, k_cache, v_cache, page_table, lengths, indices, counts, scale)
    q = dense_rows(q, q.dtype)
    out, lse, params = prepare(q, k_cache, v_cache, page_table, lengths, scale)
    params += _pack_list(indices, counts, q, k_cache.device, max_count)
    native.call("dustin_cpu_sparse_attention", params)
    return out, lse


def _cuda(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor,
    indices: Tensor, counts: Tensor, scale: float, max_count: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    where = (dense_rows(q, q.dtype), k_cache, v_cache, page_table, lengths)
    if q.dtype is not k_cache.dtype:
        return reference(*where, indices, counts, scale)

    def prepared() -> tuple[bytes, tuple[Tensor, Tensor]]:
        out, lse, params = prepare(*where, scale)
        return params + _pack_list(indices, counts, q, k_cache.device, max_count), (out, lse)

    return cuda.run(
        "sparse_attention", prepared, lambda: reference(*where, indices, counts, scale), k_cache
    )


def _pack_list(
    indices: Tensor, counts: Tensor, q: Tensor, device: torch.device, max_count: int
) -> bytes:
    listed, counted, batch, stride, budget = list_fields(indices, counts, device)
    if batch != q.shape[0]:
        raise ValueError(f"indices have {batch} rows, q has {q.shape[0]}")
    return _LIST.pack(listed, counted, stride, budget, max_count)


sparse_attention = define(
    "sparse_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor lengths, "
    "Tensor indices, Tensor counts, float scale, int max_count=0) -> (Tensor, Tensor)",
    reference,
    cpu=_cpu,
    cuda=_cuda,
    shape=lambda q, *arguments: empty_like_queries(q),
)

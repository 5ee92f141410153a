"""`kv_append`: write the new tokens' keys and values into the paged cache."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from dustin_trt.ops import cuda, native
from dustin_trt.ops._library import define
from dustin_trt.ops._params import CACHE, ROWS, cache_fields, dense_rows, rows_fields


def reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor
) -> None:
    """Write `w` rows a slot at positions `lengths[b] … lengths[b] + w - 1`, in place.

    Parameters
    ----------
    k, v : Tensor `[B, w, Hkv, D]`
    k_cache, v_cache : Tensor `[pages, Hkv, page_size, D]`, written in place
    page_table : Tensor `[B, max_pages]` int32
    lengths : Tensor `[B]` int32, tokens cached before this call
    """
    page_size = k_cache.shape[2]
    positions = lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    page = page_table.gather(1, positions // page_size).long()
    offset = positions % page_size
    # Advanced indices around a slice put the indexed dimensions first: [B, w, Hkv, D].
    k_cache[page, :, offset] = k.to(k_cache.dtype)
    v_cache[page, :, offset] = v.to(v_cache.dtype)


_PARAMS = Struct(f"@{CACHE}{ROWS}{ROWS}2i")


def _cpu(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor
) -> None:
    if not native.takes(k_cache):
        return reference(k, v, k_cache, v_cache, page_table, lengths)
    k, v = dense_rows(k, k_cache.dtype), dense_rows(v, k_cache.dtype)
    native.call("dustin_cpu_kv_append", _pack(k, v, k_cache, v_cache, page_table, lengths))


def _cuda(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor
) -> None:
    where = (k_cache, v_cache, page_table, lengths)
    k, v = dense_rows(k, k_cache.dtype), dense_rows(v, k_cache.dtype)
    cuda.run(
        "kv_append", lambda: (_pack(k, v, *where), None), lambda: reference(k, v, *where), k_cache
    )


def _pack(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor
) -> bytes:
    """`DustinKvAppendParams`; `k` and `v` as `dense_rows` returns them."""
    cache, device = cache_fields(k_cache, v_cache, page_table, lengths), k_cache.device
    shape = _, w, heads, _ = k.shape
    if v.shape != shape or heads != k_cache.shape[1]:
        raise ValueError(f"k {[*shape]}, v {[*v.shape]} and caches {[*k_cache.shape]} do not match")
    rows = (*rows_fields(k, cache, "k", device), *rows_fields(v, cache, "v", device))
    return _PARAMS.pack(*cache, *rows, w, 0)


kv_append = define(
    "kv_append",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, "
    "Tensor lengths) -> ()",
    reference,
    cpu=_cpu,
    cuda=_cuda,
    shape=lambda k, v, k_cache, v_cache, page_table, lengths: None,
)

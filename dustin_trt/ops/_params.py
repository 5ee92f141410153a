"""The fields of the C ABI's parameter structs (`plugins/include/dustin/kernels.h`), from tensors.

The same for CPU and CUDA kernels. The structs travel as bytes: one pack is far cheaper than thirty
ctypes fields.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Codes of `DustinDtype`."""

CACHE = "4P4q8i"
"""Layout of `DustinKvCache`, for `struct`; `cache_fields` fills it."""
_BATCH, _HEAD_DIM = 9, 13  # places in it
ROWS = "P3q"
"""Layout of `DustinRows`; `rows_fields` fills it."""


def cache_fields(
    k: Tensor, v: Tensor | None, page_table: Tensor, lengths: Tensor
) -> tuple[int, ...]:
    """Values for `CACHE`.

    Parameters
    ----------
    k, v : Tensor `[pages, Hkv, page_size, D]`, of equal strides; v None where it is not read
    page_table : Tensor `[B, max_pages]` int32
    lengths : Tensor `[B]` int32, contiguous
    """
    pages, heads, page_size, dim = k.shape
    page, head, token, element = strides = k.stride()
    dtype, device = k.dtype, k.device
    if element != 1 and dim > 1:
        raise ValueError(f"the cache must have contiguous heads: {_describe(k)}")
    if v is not None and (
        v.dtype is not dtype or v.stride() != strides or v.shape != k.shape or v.device != device
    ):
        raise ValueError(f"k and v cache must be alike: {_describe(k)}, {_describe(v)}")
    table, rows, batch, stride, max_pages = list_fields(page_table, lengths, device)
    return (
        k.data_ptr(), 0 if v is None else v.data_ptr(), table, rows, page, head, token, stride,
        DTYPES[dtype], batch, pages, heads, page_size, dim, max_pages, 0,
    )  # fmt: skip


def list_fields(
    table: Tensor, rows: Tensor, device: torch.device
) -> tuple[int, int, int, int, int]:
    """Addresses of `table [B, n]` and `rows [B]`, both int32; B, the table's row stride, and n."""
    batch, width = table.shape
    stride, column = table.stride()
    if (
        table.dtype is not torch.int32
        or rows.dtype is not torch.int32
        or rows.numel() != batch
        or not rows.is_contiguous()
        or (column != 1 and width > 1)
        or table.device != device
        or rows.device != device
    ):
        raise ValueError(
            "page_table and lengths, or indices and counts, must be [B, n] and [B] of torch.int32, "
            f"contiguous, on {device}: {_describe(table)}, {_describe(rows)}"
        )
    return table.data_ptr(), rows.data_ptr(), batch, stride, width


def score_fields(scores: Tensor, batch: int, device: torch.device) -> tuple[int, int, int]:
    """Address, row stride and width of `scores [B, N]` fp32."""
    rows, width = scores.shape
    stride, column = scores.stride()
    if (
        scores.dtype is not torch.float32
        or rows != batch
        or (column != 1 and width > 1)
        or scores.device != device
    ):
        raise ValueError(
            f"scores must be [{batch}, N] of torch.float32, contiguous in each row, on {device}: "
            f"{_describe(scores)}"
        )
    return scores.data_ptr(), stride, width


def rows_fields(
    x: Tensor, cache: tuple[int, ...], name: str, device: torch.device
) -> tuple[int, int, int, int]:
    """Values for `ROWS`: `x [B, rows, heads, D]` from `dense_rows`, of the cache's B and D."""
    rows, _, _, dim = x.shape
    batch_stride, row, head, _ = x.stride()
    if rows != cache[_BATCH] or dim != cache[_HEAD_DIM] or x.device != device:
        raise ValueError(
            f"{name} must be [{cache[_BATCH]}, rows, heads, {cache[_HEAD_DIM]}] on {device}: "
            f"{_describe(x)}"
        )
    return x.data_ptr(), batch_stride, row, head


def dense_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x [B, rows, heads, D]` in `dtype` with contiguous heads; a copy only where it must be.

    The caller keeps it until the kernel, which has but its address, returns.
    """
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride()[3] == 1 else x.contiguous()


def _describe(x: Tensor) -> str:
    return f"{[*x.shape]} of {x.dtype} on {x.device}, strides {[*x.stride()]}"

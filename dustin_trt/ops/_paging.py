"""Reading a paged cache: the one place that turns token positions into memory."""

from __future__ import annotations

import torch
from torch import Tensor


def history(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one row, `[Hkv, length, D]`.

    A view when the row lives in one page (a contiguous cache); a copy otherwise.

    Parameters
    ----------
    cache : Tensor `[pages, Hkv, page_size, D]`
    pages : Tensor `[max_pages]` int32, the row's line of the page table
    length : tokens wanted
    """
    _, heads, page_size, dim = cache.shape
    if length <= page_size:
        return cache[int(pages[0]), :, :length]
    used = pages[: -(-length // page_size)].long()
    return cache[used].transpose(0, 1).reshape(heads, -1, dim)[:, :length]


def token_rows(cache: Tensor, pages: Tensor, positions: Tensor) -> Tensor:
    """Where tokens lie in `cache.view(-1, D)`, `[R, Hkv, n]` int64.

    Parameters
    ----------
    cache : Tensor `[pages, Hkv, page_size, D]`
    pages : Tensor `[R, max_pages]` int32, R lines of the page table
    positions : Tensor `[R, n]` int64
    """
    _, heads, page_size, _ = cache.shape
    page = pages.gather(1, positions // page_size).long()
    first = page * (heads * page_size) + positions % page_size
    return first[:, None] + page_size * torch.arange(heads, device=cache.device)[:, None]


def gather(cache: Tensor, rows: Tensor) -> Tensor:
    """The tokens at `token_rows`, copied to `[R, Hkv, n, D]`."""
    dim = cache.shape[3]
    return cache.view(-1, dim).index_select(0, rows.flatten()).view(*rows.shape, dim)

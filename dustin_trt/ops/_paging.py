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


def gather(cache: Tensor, pages: Tensor, positions: Tensor) -> Tensor:
    """The tokens at `positions [n]` of one row, copied to `[Hkv, n, D]`."""
    page_size = cache.shape[2]
    if page_size > 1 and pages.shape[0] == 1:
        return cache[int(pages[0])].index_select(1, positions)
    page = pages[torch.div(positions, page_size, rounding_mode="floor")].long()
    return cache[page, :, positions % page_size].transpose(0, 1)

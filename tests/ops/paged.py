"""A paged cache built token by token, and attention as the textbook writes it, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LAYOUTS = {
    "one page a row": None,
    "pages of 1": 1,
    "pages of 7": 7,
    "pages of 16": 16,
}


@dataclass
class Paged:
    """The same tokens twice: paged, and as one plain array a row.

    k_cache, v_cache : Tensor `[pages, Hkv, page_size, D]`, NaN where no token is
    page_table : Tensor `[B, max_pages]` int32, pages in random order
    k, v : Tensor `[Hkv, n, D]` a row
    """

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    k: list[Tensor]
    v: list[Tensor]

    def place(self, row: int, position: int) -> tuple[int, slice, int]:
        """Where a token lies in the caches."""
        page_size = self.k_cache.shape[2]
        return int(self.page_table[row, position // page_size]), slice(None), position % page_size


def paged(
    sizes: list[int],
    kv_heads: int,
    dim: int,
    *,
    page_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paged:
    """Random keys and values of `sizes[b]` tokens a row."""
    generator = torch.Generator().manual_seed(seed)
    page_size = page_size or max(*sizes, 1)
    per_row = max(1, -(-max(sizes) // page_size))
    order = torch.randperm(len(sizes) * per_row + 2, generator=generator)
    table = order[: len(sizes) * per_row].view(len(sizes), per_row).int()
    shape = (len(order), kv_heads, page_size, dim)
    cache = Paged(
        torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype),
        table, [], [],
    )  # fmt: skip
    for row, size in enumerate(sizes):
        for rows, store in ((cache.k, cache.k_cache), (cache.v, cache.v_cache)):
            tokens = torch.randn(kv_heads, size, dim, generator=generator).to(dtype)
            rows.append(tokens)
            for position in range(size):
                store[cache.place(row, position)] = tokens[:, position]
    return cache


def queries(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Random queries, large enough that attention is far from uniform."""
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, history: list[int], first_new: int, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """One row: query i reads the tokens of `history` and new tokens `first_new … first_new + i`."""
    w, heads, dim = q.shape
    group = heads // k.shape[0]
    q64, k64, v64 = (x.double().numpy() for x in (q, k, v))
    out, lse = np.empty((w, heads, dim)), np.empty((w, heads))
    for i in range(w):
        read = [*history, *range(first_new, first_new + i + 1)]
        for h in range(heads):
            logits = k64[h // group][read] @ q64[i, h] * scale
            top = logits.max()
            weights = np.exp(logits - top)
            out[i, h] = weights @ v64[h // group][read] / weights.sum()
            lse[i, h] = top + np.log(weights.sum())
    return out, lse

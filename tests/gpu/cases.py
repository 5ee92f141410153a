"""Random batches: ragged, paged, with NaN wherever no token is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu import right
from dustin_trt import ops
from tests.gpu.device import DEVICE

DIMS = (64, 80, 96, 128, 256)
GROUPS = {1: (2, 2), 2: (4, 2), 3: (9, 3), 4: (8, 2), 5: (5, 1), 6: (6, 1), 7: (28, 4), 8: (16, 2),
          16: (16, 1)}  # fmt: skip
"""Query and KV heads by group."""
PAGES = (None, 1, 7, 16, 64)
"""Tokens a page; None is one page a row."""


@dataclass
class Case:
    """A batch and its cache.

    q : Tensor `[B, w, Hq, D]`
    k_new, v_new : Tensor `[B, w, Hkv, D]`, cached already
    k_cache, v_cache, page_table, lengths : as the ops take them
    """

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    lengths: Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[3] ** -0.5)

    @property
    def cache(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_cache, self.v_cache, self.page_table, self.lengths

    @property
    def w(self) -> int:
        return self.q.shape[1]

    def dense(self) -> tuple[Tensor, Tensor]:
        return ops.dense_attention(self.q, *self.cache, self.scale)

    def sparse(self, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return ops.sparse_attention(self.q, *self.cache, indices, counts, self.scale)

    def read(self, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[Hkv, n, D]` of these tokens of a row."""
        pages = self.page_table[row]
        return tuple(right.tokens(x, pages, positions) for x in (self.k_cache, self.v_cache))

    def right(self, row: int, history: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, float64, when a row reads these history tokens."""
        length = int(self.lengths[row])
        new = torch.arange(length, length + self.w, device=DEVICE)
        k, v = self.read(row, torch.cat([history.long(), new]))
        return right.attention(self.q[row], k, v, self.scale, new=self.w)

    def row(self, row: int) -> Case:
        """That row alone, on the same cache."""
        one = slice(row, row + 1)
        return Case(
            self.q[one], self.k_new[one], self.v_new[one], self.k_cache, self.v_cache,
            self.page_table[one], self.lengths[one],
        )  # fmt: skip


def make(
    lengths: list[int], *, w: int = 5, heads: tuple[int, int] = (8, 2), dim: int = 128,
    page_size: int | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0,
    room: int = 0,
) -> Case:  # fmt: skip
    """A batch of rows with so many history tokens and w new ones.

    Parameters
    ----------
    room : tokens a row's pages could hold besides
    """
    generator = torch.Generator().manual_seed(seed)
    batch, (query_heads, kv_heads) = len(lengths), heads
    longest = max(lengths) + w + room
    size = page_size or longest
    pages = -(-longest // size)
    order = torch.randperm(batch * pages + 2, generator=generator)[: batch * pages]
    table = order.view(batch, pages)
    pools, new_rows = [], []
    for _ in range(2):
        tokens = torch.randn(batch, kv_heads, pages * size, dim, generator=generator).to(dtype)
        new = torch.empty(batch, w, kv_heads, dim, dtype=dtype)
        pool = torch.full((batch * pages + 2, kv_heads, size, dim), torch.nan, dtype=dtype)
        for b, length in enumerate(lengths):
            new[b] = tokens[b, :, length : length + w].transpose(0, 1)
            tokens[b, :, length + w :] = torch.nan
            pool[table[b]] = tokens[b].view(kv_heads, pages, size, dim).transpose(0, 1)
        pools.append(pool.to(DEVICE))
        new_rows.append(new.to(DEVICE))
    # Large enough that attention is far from uniform.
    q = 2 * torch.randn(batch, w, query_heads, dim, generator=generator)
    return Case(
        q.to(dtype).to(DEVICE), *new_rows, *pools, table.int().to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


def choose(lengths: list[int], budget: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random `indices [B, budget]`, ascending, -1 behind, and `counts [B]`."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((len(lengths), budget), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        count = min(budget, length)
        chosen = torch.randperm(length, generator=generator)[:count].sort().values
        indices[b, :count] = chosen.int()
    counts = torch.tensor([min(budget, length) for length in lengths], dtype=torch.int32)
    return indices.to(DEVICE), counts.to(DEVICE)

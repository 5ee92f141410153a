"""Random inputs of one layer, in as many sets as it takes to leave the L2 cache cold."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dustin_trt.evaluation.bench.shapes import Shape

_TIMES_THE_CACHE = 4


def sets_for(touched: float, l2: int, least: int = 2) -> int:
    """How many sets of `touched` bytes a call are four times the L2 cache."""
    return max(least, math.ceil(_TIMES_THE_CACHE * l2 / max(1.0, touched)))


class Layer:
    """Caches of one layer's keys and values, pages and lengths of a batch.

    Parameters
    ----------
    page_size : tokens a page, scattered over the pool; None for one page a row
    values : False leaves the values out, where only keys are read
    copies : of the caches

    Attributes
    ----------
    k, v : list of Tensor `[pages, Hkv, page_size, D]`, one a copy
    page_table : Tensor `[B, max_pages]` int32
    lengths : Tensor `[B]` int32
    """

    def __init__(
        self, shape: Shape, context: int, batch: int, w: int, *, device: str, copies: int = 1,
        page_size: int | None = None, values: bool = True, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.shape, self.context, self.batch, self.w = shape, context, batch, w
        self.device, self.dtype = device, dtype
        size = page_size or context + w
        pages = -(-(context + w) // size)
        pool = (batch * pages, shape.num_kv_heads, size, shape.head_dim)
        self.k = [random(pool, device, dtype, seed) for seed in range(copies)]
        self.v = [random(pool, device, dtype, 99 + s) for s in range(copies)] if values else self.k
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0))
        self.page_table = order.view(batch, pages).int().to(device)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        if page_size is None:  # the baselines take the pool itself, so row b is page b
            self.page_table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]

    @property
    def scale(self) -> float:
        """Of the logits."""
        return float(self.shape.head_dim**-0.5)

    def queries(self, rows: int, count: int, heads: int | None = None) -> list[Tensor]:
        """`count` different queries `[B, rows, heads, D]`."""
        size = (self.batch, rows, heads or self.shape.num_heads, self.shape.head_dim)
        return [random(size, self.device, self.dtype, 1000 + seed) for seed in range(count)]

    def cache(self, turn: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, pages and lengths for the call of this turn."""
        copy = turn % len(self.k)
        return self.k[copy], self.v[copy], self.page_table, self.lengths


def random(
    size: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """Normal random numbers, made where they are used."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)


def random_tokens(context: int, batch: int, count: int, device: str, seed: int) -> Tensor:
    """`[B, count]` int32, ascending, distinct tokens of the history, others in every row."""
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.rand(batch, context, generator=generator, device=device).argsort(1)
    return order[:, :count].sort(1).values.int()

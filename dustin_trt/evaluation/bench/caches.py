"""KV caches that are not in the processor's own cache when a benchmark reads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dustin_trt.evaluation import machine
from dustin_trt.evaluation.bench.shapes import Shape
from dustin_trt.kv_cache import PagedKVCache

_TIMES_THE_CACHE = 4
_BLOCK = 4_194_301  # elements; prime, so that rows of equal values are far apart and few


class CacheRing:
    """The caches of several layers, used in turn.

    A model comes back to a layer's keys and values only after it has read those of every other
    layer and all its weights, so a benchmark that calls an op on one cache again and again times
    the processor's cache. Here every call takes the next layer, and together they are four times
    the last-level cache.

    Parameters
    ----------
    shape : model whose layer it is
    context : history tokens N
    batch : B
    window : w new tokens after the history
    dtype : of keys and values
    keys_only : leave the values out, where only scoring reads the cache

    Attributes
    ----------
    page_table : Tensor `[B, 1]` int32, one page a row
    lengths : Tensor `[B]` int32, all N
    position : the layer whose turn is next
    """

    def __init__(
        self,
        shape: Shape,
        context: int,
        batch: int,
        window: int,
        dtype: torch.dtype,
        *,
        keys_only: bool = False,
    ) -> None:
        cache = PagedKVCache(
            num_layers=_copies(shape, context, batch, window, dtype, keys_only),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_slots=batch,
            capacity=context + window,
            dtype=dtype,
        )
        for slot in range(batch):
            cache.reserve(slot, context + window)
        cache.lengths[:] = context
        self.k, self.v = cache.k, cache.k if keys_only else cache.v
        self.page_table, self.lengths = cache.page_table, cache.lengths
        self.position = 0
        values = RandomValues(dtype)
        for tensor in cache.k if keys_only else [*cache.k, *cache.v]:
            values.fill(tensor)

    def turn(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, Hkv, N + w, D]` of the layer whose turn it is."""
        layer = self.position
        self.position = (layer + 1) % len(self.k)
        return self.k[layer], self.v[layer]


def ring_bytes(
    shape: Shape,
    context: int,
    batch: int,
    window: int,
    dtype: torch.dtype,
    *,
    keys_only: bool = False,
) -> int:
    """What a `CacheRing` of these arguments takes."""
    copies = _copies(shape, context, batch, window, dtype, keys_only)
    return copies * _layer_bytes(shape, context, batch, window, dtype, keys_only)


def _copies(
    shape: Shape, context: int, batch: int, window: int, dtype: torch.dtype, keys_only: bool
) -> int:
    layer = _layer_bytes(shape, context, batch, window, dtype, keys_only)
    return max(3, math.ceil(_TIMES_THE_CACHE * machine.last_level_cache() / layer))


def _layer_bytes(
    shape: Shape, context: int, batch: int, window: int, dtype: torch.dtype, keys_only: bool
) -> int:
    row = shape.num_kv_heads * shape.head_dim * dtype.itemsize
    return (1 if keys_only else 2) * batch * (context + window) * row


class RandomValues:
    """Normal random numbers: a block of them again and again, in memory of its own each time.

    Drawing every value would take minutes; what matters is that every row is there to be read.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
        self._used = 0

    def fill(self, tensor: Tensor, scale: float = 1.0) -> None:
        """Overwrite a contiguous tensor; its values get the standard deviation `scale`."""
        flat = tensor.view(-1)
        while len(flat):
            part = self._block[self._used : self._used + len(flat)]
            torch.mul(part, scale, out=flat[: len(part)])
            self._used = (self._used + len(part)) % _BLOCK
            flat = flat[len(part) :]

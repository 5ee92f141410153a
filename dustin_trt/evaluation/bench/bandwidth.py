"""What the memory gives: the roof that every kernel's bytes a second are held against."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dustin_trt.evaluation import machine
from dustin_trt.evaluation.bench.timing import Spread
from dustin_trt.ops import native


def reader() -> str:
    """What reads the memory here, in one phrase."""
    if native.isas():
        return "the native row reader (reads and adds up, no more)"
    return "torch (sum of int64 for streams; index_select, which also writes, for rows)"


def read_stream(tensors: Sequence[Tensor]) -> None:
    """Read contiguous tensors from beginning to end."""
    for tensor in tensors:
        if native.isas():
            native.read_rows(tensor, _whole_rows(tensor))
        else:
            tensor.view(-1).view(torch.int64).sum()


def read_rows(tensors: Sequence[Tensor], rows: Tensor) -> None:
    """Read the same `rows [n]` int64 of each `[…, D]` tensor, seen as rows of D elements."""
    for tensor in tensors:
        table = tensor.view(-1, tensor.shape[-1])
        size = tensor.shape[-1] * tensor.itemsize
        if native.isas() and size % 64 == 0:
            native.read_rows(table, size, rows)
        else:
            table.index_select(0, rows)


def random_rows(context: int, batch: int, kv_heads: int, capacity: int, count: int) -> Tensor:
    """Rows of a cache `[B, Hkv, capacity, D]` as a selection of `count` random tokens reads them.

    Every row of the batch has its own tokens, the same for all KV heads, ascending.

    Returns
    -------
    Tensor `[B * Hkv * count]` int64
    """
    tokens = torch.stack([torch.randperm(context)[:count].sort().values for _ in range(batch)])
    heads = capacity * torch.arange(batch * kv_heads).view(batch, kv_heads, 1)
    return (heads + tokens[:, None]).flatten()


def stream_bandwidth(rounds: int = 7) -> Spread:
    """Bytes a second of reading memory from beginning to end, from far more than the cache."""
    size = max(2**30, 2 * machine.last_level_cache())
    memory = torch.ones(size // 8, dtype=torch.int64)
    rates = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        read_stream([memory])
        rates.append(size / (time.perf_counter() - started))
    return Spread.of(rates[1:])


def _whole_rows(tensor: Tensor) -> int:
    """The largest row of up to 4 KiB that divides a tensor's bytes."""
    return next(size for size in (4096, 2048, 1024, 512, 256, 128, 64) if not tensor.nbytes % size)

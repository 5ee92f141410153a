"""A prompt cached in chunks, on any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dustin_trt.engines.base import Prefill
from dustin_trt.kv_cache import PagedKVCache


def prefill_in_chunks(
    cache: PagedKVCache,
    slot: int,
    tokens: Sequence[int],
    run: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    chunk: int,
    progress: Callable[[int], None] | None = None,
) -> Prefill:
    """Cache what `slot` does not hold of `tokens` yet; see `Engine.prefill`.

    Parameters
    ----------
    run : caches a window `[1, w]` int64 after the slot's history, reading everything, and returns
        logits `[V]` and retrieval-head queries `[P, D]` of its last token
    chunk : tokens of a window at most
    progress : called with the tokens done after each chunk
    """
    # The last token always runs: its logits and queries are what the caller came for.
    reused = min(cache.resident_prefix(slot, tokens), len(tokens) - 1)
    cache.lengths[slot] = reused
    cache.resident[slot] = list(tokens[:reused])
    for start in range(reused, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits, queries = run(torch.tensor([part], device=cache.lengths.device))
        cache.lengths[slot] = start + len(part)
        cache.resident[slot] += part
        if progress:
            progress(start + len(part))
    return Prefill(logits, queries, reused)

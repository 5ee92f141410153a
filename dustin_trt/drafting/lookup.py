"""Prompt lookup: what followed the last tokens where they stood before is the draft."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from dustin_trt.drafting.base import Batch, Drafter, Proposal


class LookupDrafter(Drafter):
    """n-gram prompt lookup (Saxena 2023, "Prompt Lookup Decoding").

    Costs next to nothing and has no attention, hence no lookahead scores.

    Parameters
    ----------
    max_ngram : longest run of last tokens that is looked up; shorter ones follow down to 1
    """

    def __init__(self, max_ngram: int = 3) -> None:
        if max_ngram < 1:
            raise ValueError(f"lookup needs n-grams of at least 1 token, not {max_ngram}")
        self.max_ngram = max_ngram
        self._indexes: dict[int, _NgramIndex] = {}

    def admit(self, slot: int, tokens: Sequence[int], reserve: int) -> None:
        """Start an index of the prompt's n-grams."""
        self._indexes[slot] = _NgramIndex(self.max_ngram)

    def release(self, slot: int) -> None:
        """Drop the index."""
        self._indexes.pop(slot, None)

    def propose(self, batch: Batch, gamma: int) -> Proposal:
        """Copy what followed the most recent earlier occurrence of the longest n-gram."""
        started = time.perf_counter()
        limits = batch.limits.clamp(max=gamma).tolist()
        drafts = [
            self._indexes[slot].continuation(tokens, limit)
            for slot, tokens, limit in zip(batch.slots.tolist(), batch.tokens, limits, strict=True)
        ]
        width = max(map(len, drafts))
        padded = [draft + [0] * (width - len(draft)) for draft in drafts]
        device = batch.last.device
        return Proposal(
            tokens=torch.tensor(padded, dtype=torch.long, device=device).view(len(drafts), width),
            counts=torch.tensor([len(draft) for draft in drafts], device=device),
            probs=None,
            lookahead_scores=None,
            seconds={"draft": time.perf_counter() - started},
        )


class _NgramIndex:
    """Where each n-gram of a growing sequence was last followed by something."""

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def continuation(self, tokens: Sequence[int], limit: int) -> list[int]:
        for end in range(self._indexed + 1, len(tokens)):  # n-grams with a token after them
            for n in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._indexed = len(tokens) - 1
        for n in range(min(self._max_ngram, len(tokens)), 0, -1):
            followed = self._ends.get(tuple(tokens[-n:]))
            if followed is not None:
                return list(tokens[followed : followed + limit])
        return []

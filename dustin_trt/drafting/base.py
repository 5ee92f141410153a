"""What the loop and a drafter tell each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_trt.sampling import SamplingBatch


@dataclass(frozen=True)
class Batch:
    """The rows of one step, as the five parts of it see them.

    slots : Tensor `[B]` int64
    last : Tensor `[B]` int64, last committed token, not cached yet
    previous : Tensor `[B]` int64, the token before it, the last one cached
    limits : Tensor `[B]` int64, drafts a row may still have accepted (length limit less one)
    history_queries : Tensor `[B, P, D]`, the target's retrieval-head queries of `previous`
    uniforms : Tensor `[B, 2Γ+1]` fp64 in [0, 1): Γ for drafting, Γ for accepting, 1 for the rest
    sampling : how each row samples
    tokens : all of each row's tokens, prompt and generated, `last` included
    """

    slots: Tensor
    last: Tensor
    previous: Tensor
    limits: Tensor
    history_queries: Tensor
    uniforms: Tensor
    sampling: SamplingBatch
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one step.

    tokens : Tensor `[B, Γ]` int64; columns past `counts` are padding
    counts : Tensor `[B]` int64, drafts of each row
    probs : Tensor `[B, Γ, V]` fp32, the distributions the tokens were sampled from; None when they
        were not sampled (greedy rows, n-gram lookup)
    lookahead_scores : Tensor `[B, N]` fp32, `S_draft`; None when the drafter has no attention
    seconds : time by part: "draft", "score"
    """

    tokens: Tensor
    counts: Tensor
    probs: Tensor | None
    lookahead_scores: Tensor | None
    seconds: dict[str, float]

    def window(self, last: Tensor) -> Tensor:
        """`[last, d_1 … d_Γ]`, `[B, 1+Γ]`: what a verification pass runs.

        Past its drafts a row repeats its last token: masked attention still multiplies what is
        there by 0, so a neighbour's longer draft must not choose it.
        """
        columns = torch.arange(self.tokens.shape[1], device=last.device)
        drafts = torch.where(columns < self.counts[:, None], self.tokens, last[:, None])
        return torch.cat([last[:, None], drafts], 1)


class Drafter(ABC):
    """Where draft tokens come from."""

    def admit(self, slot: int, tokens: Sequence[int], reserve: int) -> None:  # noqa: B027
        """A prompt enters `slot`, to grow to `reserve` tokens at most."""

    @abstractmethod
    def propose(self, batch: Batch, gamma: int) -> Proposal:
        """Draft up to `gamma` tokens a row, never more than `batch.limits`."""

    def commit(self, slots: Tensor, counts: Tensor) -> None:  # noqa: B027
        """`counts [B]` tokens of the window were committed."""

    def release(self, slot: int) -> None:  # noqa: B027
        """The sequence in `slot` ended."""


def no_drafts(batch: Batch) -> Proposal:
    """A proposal without a token."""
    rows = len(batch.slots)
    empty = torch.empty(rows, 0, dtype=torch.long, device=batch.last.device)
    counts = torch.zeros(rows, dtype=torch.long, device=batch.last.device)
    return Proposal(empty, counts, None, None, {})

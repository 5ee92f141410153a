"""What a choice of heads and numbers is worth on some samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dustin_trt.calibration.samples import Samples, columns
from dustin_trt.config import Head
from dustin_trt.engines.selecting import join_and_select
from dustin_trt.metrics import (
    attention_recovery_rate,
    oracle_indices,
    windowed_attention_recovery_rate,
)


@dataclass(frozen=True)
class Choice:
    """What a search decides.

    share : of the lookahead: of the tokens chosen by score ("split"), or its weight ("sum")
    """

    target_heads: tuple[Head, ...] = ()
    draft_heads: tuple[Head, ...] = ()
    join: Literal["split", "sum"] = "sum"
    share: float = 0.5
    sink: int = 4
    window: int = 16
    gamma: int = 4

    def replace(self, **changes: object) -> Choice:
        """A copy with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def lookahead_tokens(self, budget: int) -> int:
        """M at a budget."""
        return round(self.share * max(0, budget - self.sink - self.window))


@dataclass(frozen=True)
class Value:
    """What a choice reaches, means over windows and budgets.

    arr : windowed attention recovery rate on texts
    oracle : the oracle's
    recall : share of the answer's tokens that were chosen, on prompts
    total : `arr / oracle + recall_weight · recall`
    """

    arr: float
    oracle: float
    recall: float
    total: float


def history_scores(samples: Samples, heads: Sequence[Head]) -> Tensor | None:
    """`S_target [S, N]` fp32 of some candidate heads; None without heads."""
    if not heads:
        return None
    return samples.history[:, columns(samples.target_heads, heads)].float().sum(1)


def lookahead_scores(samples: Samples, heads: Sequence[Head], gamma: int) -> Tensor | None:
    """`S_draft [S, N]` fp32 of some candidate heads over Γ draft steps; None without heads."""
    if not heads:
        return None
    chosen = columns(samples.draft_heads, heads)
    return samples.lookahead[:, :gamma, chosen].float().sum((1, 2))


def select(
    history: Tensor | None, lookahead: Tensor | None, lengths: Tensor, choice: Choice, budget: int
) -> tuple[Tensor, Tensor]:
    """The tokens a verification pass would read, as the engine chooses them.

    Returns
    -------
    indices, counts : see `ops.select_tokens`
    """
    sink = min(choice.sink, budget)
    return join_and_select(
        history,
        lookahead,
        lengths,
        budget=budget,
        lookahead_tokens=choice.lookahead_tokens(budget),
        sink=sink,
        window=min(choice.window, budget - sink),
        join=choice.join,
        lookahead_weight=choice.share,
    )


def recall(samples: Samples, indices: Tensor, counts: Tensor) -> Tensor:
    """Share of each window's answer tokens `[S]` that are among the chosen."""
    wanted = samples.span.float()
    return attention_recovery_rate(wanted, indices, counts)


def window_arr(samples: Samples, indices: Tensor, gamma: int) -> Tensor:
    """Windowed attention recovery rate `[S]` of a window of `gamma + 1` tokens."""
    return windowed_attention_recovery_rate(samples.truth[:, : gamma + 1], indices)


def oracle(samples: Samples, budget: int, gamma: int) -> Tensor:
    """The best rate `[S]` any one set of `budget` tokens reaches."""
    return window_arr(samples, oracle_indices(samples.truth[:, : gamma + 1], budget), gamma)


class Judge:
    """Values choices on fixed samples.

    Parameters
    ----------
    samples : of texts and prompts, in any order
    budgets : valued equally
    recall_weight : of recall against recovery
    """

    def __init__(
        self, samples: Iterable[Samples], budgets: Sequence[int], recall_weight: float
    ) -> None:
        samples = list(samples)
        self.texts = [some for some in samples if not some.is_prompt]
        self.prompts = [some for some in samples if some.is_prompt]
        self.budgets = tuple(budgets)
        self.recall_weight = recall_weight
        self._oracle: dict[int, float] = {}
        self._shares: dict[int, list[Tensor]] = {}

    def value(
        self,
        choice: Choice,
        scores: Sequence[tuple[Tensor | None, Tensor | None]] | None = None,
    ) -> Value:
        """What a choice is worth.

        Parameters
        ----------
        choice : heads and numbers
        scores : `S_target` and `S_draft` of `texts` and then `prompts`, where the caller has them
        """
        every = [*self.texts, *self.prompts]
        if scores is None:
            scores = [
                (
                    history_scores(some, choice.target_heads),
                    lookahead_scores(some, choice.draft_heads, choice.gamma),
                )
                for some in every
            ]
        arr, found = [], []
        for budget in self.budgets:
            shares = iter(self._mean_shares(choice.gamma))
            for some, (history, ahead) in zip(every, scores, strict=True):
                chosen = select(history, ahead, some.lengths, choice, budget)
                if some.is_prompt:
                    found.append(recall(some, *chosen))
                else:
                    arr.append(attention_recovery_rate(next(shares), *chosen))
        best = self.oracle(choice.gamma)
        mean_arr = float(torch.cat(arr).mean()) if arr else 1.0
        mean_recall = float(torch.cat(found).mean()) if found else 1.0
        total = mean_arr / best + self.recall_weight * mean_recall
        return Value(mean_arr, best, mean_recall, total)

    def oracle(self, gamma: int) -> float:
        """Mean rate of the oracle over texts and budgets."""
        if gamma not in self._oracle:
            rates = [oracle(some, k, gamma) for k in self.budgets for some in self.texts]
            self._oracle[gamma] = float(torch.cat(rates).mean()) if rates else 1.0
        return self._oracle[gamma]

    def _mean_shares(self, gamma: int) -> list[Tensor]:
        """Each text's attention `[S, N]` as shares of its step's, mean over the window.

        A mean of ratios with one numerator set is the ratio of the mean shares, so that a window is
        summed over its steps once and not for every choice.
        """
        if gamma not in self._shares:
            self._shares[gamma] = [
                (steps / steps.sum(-1, keepdim=True)).mean(1)
                for steps in (some.truth[:, : gamma + 1] for some in self.texts)
            ]
        return self._shares[gamma]

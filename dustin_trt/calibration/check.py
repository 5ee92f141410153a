"""The check: the chosen configuration on texts and pass keys that the search never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dustin_trt.calibration.pair import SLOT, Pair
from dustin_trt.calibration.profile import Tell, cache_history
from dustin_trt.calibration.samples import Samples
from dustin_trt.calibration.value import (
    Choice,
    history_scores,
    lookahead_scores,
    oracle,
    select,
    window_arr,
)
from dustin_trt.engines.base import Dense, Indices
from dustin_trt.metrics import attention_recovery_rate, greedy_agreement, kl_divergence

ORACLE, CHOSEN, HISTORY, LOOKAHEAD = "oracle", "chosen", "history", "lookahead"
ALL, ALL_HISTORY, ALL_LOOKAHEAD = "all heads", "all heads, history", "all heads, lookahead"
STREAMING = "sink + window"
POLICIES = (ORACLE, CHOSEN, HISTORY, LOOKAHEAD, ALL, ALL_HISTORY, ALL_LOOKAHEAD, STREAMING)


@dataclass(frozen=True)
class Policies:
    """Ways to choose the tokens of some samples, all at the same sink, window and Γ.

    "lookahead" is by the chosen draft heads, or, where none was worth its bytes, by all of them;
    "all heads" sums both signals, half each.
    """

    samples: Samples
    choice: Choice

    def signals(self, policy: str) -> tuple[Tensor | None, Tensor | None]:
        """`S_target` and `S_draft`, `[S, N]` each, that a policy chooses by."""
        samples, choice = self.samples, self.choice
        history = history_scores(samples, choice.target_heads)
        ahead = lookahead_scores(samples, choice.draft_heads, choice.gamma)
        every, every_ahead = samples.ages[:, 0], samples.lookahead_all[:, : choice.gamma].sum(1)
        return {
            CHOSEN: (history, ahead),
            HISTORY: (history, None),
            LOOKAHEAD: (None, every_ahead if ahead is None else ahead),
            ALL: (every, every_ahead),
            ALL_HISTORY: (every, None),
            ALL_LOOKAHEAD: (None, every_ahead),
            STREAMING: (None, None),
        }[policy]

    def indices(self, policy: str, budget: int) -> tuple[Tensor, Tensor]:
        """What a policy reads, see `ops.select_tokens`."""
        if policy == ORACLE:
            truth = self.samples.truth[:, : self.choice.gamma + 1].mean(1)
            bare = self.choice.replace(sink=0, window=0)
            return select(truth, None, self.samples.lengths, bare, budget)
        choice = self.choice.replace(join="sum", share=0.5) if policy == ALL else self.choice
        return select(*self.signals(policy), self.samples.lengths, choice, budget)

    def arr(self, policy: str, budget: int) -> Tensor:
        """Windowed attention recovery rate `[S]`."""
        if policy == ORACLE:
            return oracle(self.samples, budget, self.choice.gamma)
        return window_arr(self.samples, self.indices(policy, budget)[0], self.choice.gamma)

    def age_arr(self, age: int, budget: int) -> Tensor:
        """The rate `[S]` of choosing by every target head's query so many tokens back (number)."""
        chosen = select(self.samples.ages[:, age], None, self.samples.lengths, self.choice, budget)
        return window_arr(self.samples, chosen[0], self.choice.gamma)

    def layer_arr(self, policy: str, budget: int) -> list[float]:
        """Mean rate of each target layer, where `samples.by_layer` is there."""
        indices, counts = self.indices(policy, budget)
        layers = self.samples.by_layer.unbind(1)
        return [float(attention_recovery_rate(one, indices, counts).mean()) for one in layers]

    def coverage(self, budget: int) -> Tensor:
        """What the guard would see at run time: the chosen heads' history score that is read."""
        history = history_scores(self.samples, self.choice.target_heads)
        assert history is not None
        return attention_recovery_rate(history, *self.indices(CHOSEN, budget))


@torch.inference_mode()
def fidelity(
    pair: Pair,
    tokens: list[int],
    policies: Policies,
    names: Sequence[str],
    budgets: Sequence[int],
    tell: Tell,
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Compare the logits of sparse and full verification at each window of one sequence.

    Windows are verified teacher-forced, each after a history that was cached densely.

    Returns
    -------
    (policy, budget) to a list over windows of (KL(full ‖ sparse) in nats, share of equal greedy
    tokens), means over the window's tokens
    """
    target, samples = pair.target, policies.samples
    found: dict[tuple[str, int], list[tuple[float, float]]] = {
        (name, budget): [] for name in names for budget in budgets
    }
    chosen = {key: policies.indices(*key) for key in found}
    end = int(samples.lengths[-1]) + policies.choice.gamma + 1
    cache_history(target, tokens[:end], end, tell)
    # The last window first: its sparse passes leave keys and values behind that no other may read.
    for number in reversed(range(len(samples))):
        at = int(samples.lengths[number])
        window = torch.tensor([tokens[at : at + policies.choice.gamma + 1]])
        target.cache.lengths[0] = at
        full = target.verify(SLOT, window, Dense()).logits[0]
        for key, (indices, counts) in chosen.items():
            reading = Indices(indices[number][None], counts[number][None])
            sparse = target.verify(SLOT, window, reading).logits[0]
            found[key].append(
                (
                    float(kl_divergence(full, sparse).mean()),
                    float(greedy_agreement(full, sparse).float().mean()),
                )
            )
        tell(window.shape[1] * (1 + len(found)))
    return {key: values[::-1] for key, values in found.items()}


def acceptance(samples: Sequence[Samples], gamma: int) -> dict[str, Any]:
    """How far greedy verification follows the draft, by position and by Γ, on text windows."""
    accepted = torch.cat([some.accepted for some in samples if not some.is_prompt]).float()
    longest = samples[0].gamma
    reached = [float((accepted >= place).float().mean()) for place in range(1, longest + 1)]
    tau = {place: 1 + sum(reached[:place]) for place in range(1, longest + 1)}
    before = [1.0, *reached[:-1]]
    return {
        "by_position": [
            now / past if past else 0.0 for now, past in zip(reached, before, strict=True)
        ],
        "rate": sum(reached[:gamma]) / gamma,
        "tau": tau[gamma],
        "tau_by_gamma": {str(place): value for place, value in tau.items()},
    }


def guard_threshold(coverage: Tensor, share: float) -> float | None:
    """The coverage below which at most a share of these windows lie; None without windows.

    Rounded down to four digits, so that a window at the threshold itself stays sparse. Windows that
    were read whole have coverage 1 and say nothing: leave them out.
    """
    if not len(coverage):
        return None
    ordered = coverage.sort().values
    value = float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
    return int(value * 10_000) / 10_000

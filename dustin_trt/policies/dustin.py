"""Dustin: the target's last attention and the draft's lookahead choose what is read."""

from __future__ import annotations

from typing import Literal, get_args

from dustin_trt.config import DustinConfig
from dustin_trt.drafting.base import Batch, Proposal
from dustin_trt.engines.base import Dustin, Engine, Selection
from dustin_trt.policies.base import Policy

Signal = Literal["hybrid", "history", "lookahead"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)


class DustinPolicy(Policy):
    """Draft-augmented sparse verification (arXiv 2606.24957).

    Parameters
    ----------
    config : heads, budget, how it is shared, and the guard
    signal : "hybrid" (both), "history" (the target's query of the last accepted token) or
        "lookahead" (the draft's attention while it drafted); the latter two are the paper's
        ablations, and "history" serves drafters without attention

    Notes
    -----
    With "history" what is read is settled before anything is drafted, so sampled outputs follow
    the sparse verifier's distribution exactly. The lookahead looks at the drafts, hence what is
    read, and with it the verifier, depends on which drafts were sampled: rejection sampling is
    then exact for each window's own verifier, but no longer for one fixed distribution. The paper
    does not discuss this; greedy decoding is not concerned.

    The configuration's guard judges what was chosen, so it depends on the drafts exactly where that
    does. Its measure is the history score: with "lookahead" there is none, and no row is guarded.
    """

    name = "dustin"

    def __init__(self, config: DustinConfig, signal: Signal = "hybrid") -> None:
        super().__init__(config)
        self.signal = signal
        self.needs_history = signal in ("hybrid", "history")
        self.needs_lookahead = signal in ("hybrid", "lookahead")

    def plan(self, target: Engine, batch: Batch, proposal: Proposal) -> Selection:
        """The signals and the budget; the engine scores and selects."""
        config = self.config
        return Dustin(
            history_queries=batch.history_queries if self.needs_history else None,
            lookahead_scores=proposal.lookahead_scores if self.needs_lookahead else None,
            budget=config.budget,
            lookahead=config.lookahead_tokens,
            sink=config.sink,
            window=config.window,
            join=config.join,
            lookahead_weight=config.lookahead_weight,
            guard=config.guard,
        )

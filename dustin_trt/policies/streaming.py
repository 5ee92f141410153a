"""Sink and window only: StreamingLLM's attention pattern as a verifier."""

from __future__ import annotations

from dustin_trt.drafting.base import Batch, Proposal
from dustin_trt.engines.base import Engine, Selection, Window
from dustin_trt.policies.base import Policy


class StreamingPolicy(Policy):
    """The first `sink` and the last `budget - sink` tokens (StreamingLLM, arXiv 2309.17453).

    What a selection by score must beat: it cannot see anything in between.
    """

    name = "streaming"

    def plan(self, target: Engine, batch: Batch, proposal: Proposal) -> Selection:
        """Sink and recent tokens of each row."""
        return Window(self.config.budget, self.config.sink)

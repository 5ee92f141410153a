"""Sink and window only: StreamingLLM's attention pattern as a verifier."""

from __future__ import annotations

from dustin_trt import ops
from dustin_trt.drafting.base import Batch, Proposal
from dustin_trt.engines.base import Engine, Indices, Selection
from dustin_trt.policies.base import Policy


class StreamingPolicy(Policy):
    """The first `sink` and the last `budget - sink` tokens (StreamingLLM, arXiv 2309.17453).

    What a selection by score must beat: it cannot see anything in between.
    """

    name = "streaming"

    def plan(self, target: Engine, batch: Batch, proposal: Proposal) -> Selection:
        """Sink and recent tokens of each row."""
        lengths = target.cache.lengths[batch.slots]
        config = self.config
        return Indices(
            *ops.select_tokens(None, None, lengths, config.budget, 0, config.sink, config.window)
        )

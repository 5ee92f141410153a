"""Read everything: classic speculative decoding, and plain decoding without a drafter."""

from __future__ import annotations

from dustin_trt.drafting.base import Batch, Proposal
from dustin_trt.engines.base import Dense, Engine, Selection
from dustin_trt.policies.base import Policy


class DensePolicy(Policy):
    """Full verification (Leviathan et al., arXiv 2211.17192): lossless."""

    name = "dense"

    def plan(self, target: Engine, batch: Batch, proposal: Proposal) -> Selection:
        """The whole history."""
        return Dense()

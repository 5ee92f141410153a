"""The oracle peeks at the attention it is about to save: for measuring only."""

from __future__ import annotations

from dustin_trt import ops
from dustin_trt.drafting.base import Batch, Proposal
from dustin_trt.engines.base import Dense, Engine, Indices, Selection
from dustin_trt.policies.base import Policy


class OraclePolicy(Policy):
    """`TopK_k` of the window's own mean attention over all layers and heads.

    Bounds every policy, and costs more than full verification: it runs one first. What it reads
    depends on the drafts, as with the lookahead of `DustinPolicy`.
    """

    name = "oracle"

    def plan(self, target: Engine, batch: Batch, proposal: Proposal) -> Selection:
        """Verify densely, look at the attention, choose."""
        window = proposal.window(batch.last)
        heads = target.spec.all_heads()
        peek = target.verify(batch.slots, window, Dense(), heads=heads)
        scores = target.attention_scores(
            batch.slots, peek.srh_queries, rows=proposal.counts + 1, heads=heads
        )
        lengths = target.cache.lengths[batch.slots]
        return Indices(*ops.select_tokens(scores, None, lengths, self.config.budget, 0, 0, 0))

"""No drafts: every step commits the one token the verifier chooses (plain decoding)."""

from __future__ import annotations

from dustin_trt.drafting.base import Batch, Drafter, Proposal, no_drafts


class NoDrafter(Drafter):
    """Plain autoregressive decoding as a drafter that proposes nothing."""

    def propose(self, batch: Batch, gamma: int) -> Proposal:
        """No tokens."""
        return no_drafts(batch)

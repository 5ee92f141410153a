"""What a step reads, in bytes: the cost that decode is bound by where long contexts matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dustin_trt.config import Head, ModelSpec


@dataclass(frozen=True)
class CostModel:
    """Bytes of weights, keys and values that one row's share of a step reads.

    Deliberately without a clock, so that the same recipe gives the same configuration on every
    machine. It is the limit of a machine whose arithmetic is free; where matrix products cost more
    than their weights' bytes (small caches, many rows), drafts cost more than it says.

    Parameters
    ----------
    target, draft : shapes
    target_weights, draft_weights : bytes of weights that a pass reads
    element : bytes of a cached number
    batch : rows that share a pass over the weights
    context : history tokens a row
    draft_window : history tokens the draft itself reads, 0 for all
    """

    target: ModelSpec
    draft: ModelSpec
    target_weights: int
    draft_weights: int
    element: int
    batch: int
    context: int
    draft_window: int

    def kv_head_bytes(self, role: str) -> int:
        """Bytes of scoring one KV head: its keys, once, whatever the queries."""
        return self.context * self._spec(role).head_dim * self.element

    def scoring_bytes(self, target_heads: Iterable[Head], draft_heads: Iterable[Head]) -> int:
        """Bytes of scoring the history with these heads."""
        return self.target.num_kv_heads_of(target_heads) * self.kv_head_bytes(
            "target"
        ) + self.draft.num_kv_heads_of(draft_heads) * self.kv_head_bytes("draft")

    def full_attention_bytes(self) -> int:
        """Bytes of keys and values that full verification reads."""
        return self.context * self._token_bytes("target")

    def plain_bytes(self) -> float:
        """Bytes of a plain decoding step, for its one token."""
        return self.target_weights / self.batch + self.full_attention_bytes()

    def step_bytes(
        self,
        gamma: int,
        budget: int,
        target_heads: Iterable[Head],
        draft_heads: Iterable[Head],
    ) -> float:
        """Bytes of a step: Γ draft passes, scoring, one sparse verification."""
        drafted = min(self.context, self.draft_window or self.context)
        draft = self.draft_weights / self.batch + drafted * self._token_bytes("draft")
        read = min(self.context, budget) * self._token_bytes("target")
        scored = self.scoring_bytes(target_heads, draft_heads)
        return gamma * draft + self.target_weights / self.batch + read + scored

    def _token_bytes(self, role: str) -> int:
        spec = self._spec(role)
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.element

    def _spec(self, role: str) -> ModelSpec:
        return self.target if role == "target" else self.draft

"""Drafts from a language model: a separate one, or the target without some layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dustin_trt.drafting.base import Batch, Drafter, Proposal, no_drafts
from dustin_trt.engines.base import Dense, Engine, Lookahead, Selection, Window
from dustin_trt.engines.graphs import Outputs
from dustin_trt.sampling import best, draft_probabilities, sample


class DraftModel(Drafter):
    """A separate draft model with its own cache.

    Parameters
    ----------
    engine : the draft model; its retrieval heads give the lookahead scores
    target_vocab_size : width of the target's logits; a draft vocabulary padded to another width is
        cut or filled up to it, so that nothing is drafted that the target does not have
    lookahead : whether to score the history with the queries of the drafts
    cache_window : history tokens the draft itself reads, sink included (MagicDec, arXiv
        2408.11049); None reads all. Its cache keeps everything either way: the lookahead scores
        the whole history.
    sink : of them, the first ones
    prefill_chunk : prompt tokens a forward pass
    """

    def __init__(
        self,
        engine: Engine,
        target_vocab_size: int,
        *,
        lookahead: bool = False,
        cache_window: int | None = None,
        sink: int = 4,
        prefill_chunk: int = 512,
    ) -> None:
        if cache_window is not None and cache_window <= sink:
            raise ValueError(f"draft window {cache_window} must be larger than its sink {sink}")
        self.engine = engine
        self.lookahead = lookahead
        self.target_vocab_size = target_vocab_size
        self.reading: Selection = Window(cache_window, sink) if cache_window else Dense()
        self.prefill_chunk = prefill_chunk

    def admit(self, slot: int, tokens: Sequence[int], reserve: int) -> None:
        """Prefill the draft's own cache."""
        last = self.engine.spec.vocab_size - 1
        self.engine.cache.reserve(slot, reserve)
        self.engine.prefill(slot, [min(t, last) for t in tokens], chunk=self.prefill_chunk)
        # The first step runs the prompt's last token again and reads its window only, so what it
        # writes there is not what a later prompt with the same beginning may reuse.
        self.engine.cache.resident[slot].pop()

    def commit(self, slots: Tensor, counts: Tensor) -> None:
        """Move the draft's lengths with the target's."""
        self.engine.commit(slots, counts)

    def propose(self, batch: Batch, gamma: int) -> Proposal:
        """Γ forward passes; the queries they leave behind score the history in one go."""
        started = time.perf_counter()
        counts = batch.limits.clamp(max=gamma)
        # A row at its limit still looks ahead from its last token, so that what it reads does not
        # depend on whether its neighbours draft.
        looks = counts.clamp(min=1) if self.lookahead else counts
        drafts = counts.tolist()
        wanted = [max(count, int(self.lookahead)) for count in drafts]
        steps, width = max(wanted), max(drafts)
        if steps == 0:
            return no_drafts(batch)
        recorded = self.engine.graphs.fixed
        if recorded:
            steps = width = gamma  # one graph, whatever the rows' limits
        rows = looks if self.lookahead and min(wanted) < steps else None
        probs = None
        if recorded and bool(batch.sampling.greedy.all()):
            tokens, scores = self._greedy(batch, steps, rows)
            drafted = time.perf_counter()
        else:
            lookahead = self._look(batch.slots, rows)
            tokens, probs = self.roll_out(batch, steps, lookahead)
            drafted = time.perf_counter()
            scores = lookahead.scores() if lookahead else None
        return Proposal(
            tokens=tokens[:, :width],
            counts=counts,
            probs=None if probs is None else probs[:, :width],
            lookahead_scores=scores,
            seconds={"draft": drafted - started, "score": time.perf_counter() - drafted},
        )

    def roll_out(
        self, batch: Batch, steps: int, lookahead: Lookahead | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Draft `steps` tokens a row, each from the one before.

        Returns
        -------
        tokens : Tensor `[B, steps]` int64
        probs : Tensor `[B, steps, V]` fp32, what they were sampled from; None when greedy
        """
        probs: list[Tensor] = []

        def choose(i: int, logits: Tensor) -> Tensor:
            p = draft_probabilities(logits, batch.sampling)
            if p is not None:
                probs.append(p)
            return sample(logits, p, batch.uniforms[:, i], batch.sampling)

        window = self._first_window(batch.previous, batch.last)
        tokens = self._chain(batch.slots, window, steps, choose, lookahead)
        return tokens, torch.stack(probs, 1) if probs else None

    def _greedy(
        self, batch: Batch, steps: int, rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Greedy drafts `[B, steps]` and their lookahead scores `[B, N]`, recorded as one graph."""

        def body(
            slots: Tensor, previous: Tensor, last: Tensor, rows: Tensor | None = None
        ) -> Outputs:
            window = self._first_window(previous, last)
            lookahead = self._look(slots, rows)
            tokens = self._chain(slots, window, steps, lambda _, logits: best(logits), lookahead)
            return tokens, lookahead.scores() if lookahead else None

        inputs = {"slots": batch.slots, "previous": batch.previous, "last": batch.last}
        if rows is not None:
            inputs["rows"] = rows
        key = ("draft", steps, self.lookahead, self.reading, self.engine.srh_heads)
        outputs: Any = self.engine.graphs.run(key, body, inputs)
        tokens, scores = outputs
        return tokens, scores

    def _chain(
        self,
        slots: Tensor,
        window: Tensor,
        steps: int,
        choose: Callable[[int, Tensor], Tensor],
        lookahead: Lookahead | None,
    ) -> Tensor:
        """Run `window [B, 1 or 2]`, then each token that `choose` makes of step i's logits.

        Returns
        -------
        Tensor `[B, steps]` int64
        """
        tokens: list[Tensor] = []
        for i in range(steps):
            offset = i + 1 - window.shape[1]
            # Tokens of a target with a wider vocabulary mean nothing to the draft: any will do.
            window = window.clamp(max=self.engine.spec.vocab_size - 1)
            logits = self.engine.propose_step(slots, window, offset, self.reading, lookahead)
            # A draft that overflows is a bad draft, no more: verification judges what it proposes.
            # The bounds leave room for the division by a temperature.
            logits = logits.nan_to_num(posinf=1e30, neginf=-1e30)
            tokens.append(choose(i, _fit_vocabulary(logits, self.target_vocab_size)))
            window = tokens[-1][:, None]
        return torch.stack(tokens, 1)

    def _look(self, slots: Tensor, rows: Tensor | None) -> Lookahead | None:
        return self.engine.look_ahead(slots, rows) if self.lookahead else None

    def _first_window(self, previous: Tensor, last: Tensor) -> Tensor:
        # When every draft of the last step was accepted, its last one is not in this cache yet.
        # Running the token before `last` again repairs that for all rows alike.
        return torch.stack([previous, last], 1)


class LayerSkipDraft(DraftModel):
    """The target without some layers, on the target's own cache.

    It reads the history the target wrote, and its own drafts' keys lie where verification
    overwrites them: no second prefill, nothing to commit, and its lookahead scores the target's
    own keys (Draft & Verify, arXiv 2309.08168).
    """

    def admit(self, slot: int, tokens: Sequence[int], reserve: int) -> None:
        """The target's prefill serves both."""

    def commit(self, slots: Tensor, counts: Tensor) -> None:
        """The target's lengths serve both."""

    def _first_window(self, previous: Tensor, last: Tensor) -> Tensor:
        return last[:, None]


def _fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Cut or fill `[B, V_draft]` logits to the target's width; filled tokens have no chance."""
    missing = size - logits.shape[1]
    if missing <= 0:
        return logits[:, :size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))

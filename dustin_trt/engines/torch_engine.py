"""The torch backend: any machine torch runs on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dustin_trt import ops
from dustin_trt.config import Head
from dustin_trt.engines.base import (
    Dense,
    Indices,
    Lookahead,
    Prefill,
    Selection,
    Verification,
    Window,
)
from dustin_trt.engines.graphs import Graphs, NoGraphs, Outputs, Recorder, StepGraphs
from dustin_trt.engines.prefill import prefill_in_chunks
from dustin_trt.engines.selecting import join_and_select
from dustin_trt.kv_cache import PagedKVCache
from dustin_trt.metrics import attention_recovery_rate
from dustin_trt.models.causal_lm import CausalLM

_DIAGNOSED_AT_ONCE = 512  # tokens


@dataclass(frozen=True)
class _Reading:
    """A selection carried out.

    chosen : which history tokens, of guarded rows all; None for all of them in every row
    max_count : no row reads more; 0 for as many as `chosen` has room for
    coverage : Tensor `[B]`, as in `Verification`
    guarded : Tensor `[B]` bool, as in `Verification`
    """

    chosen: Indices | None
    max_count: int
    coverage: Tensor
    guarded: Tensor


@dataclass(frozen=True)
class _LayerHeads:
    """Retrieval heads of one layer.

    heads : Tensor `[P]` int64, their numbers in it
    kv_heads : the KV head that each reads
    places : Tensor `[P]` int64, their places among all heads asked for
    """

    layer: int
    heads: Tensor
    kv_heads: list[int]
    places: Tensor


@dataclass(frozen=True)
class _Plan:
    """A selection but for its tensors: what shapes the launches that carry it out."""

    kind: type
    numbers: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, selection: Selection) -> tuple[_Plan, dict[str, Tensor]]:
        """The plan, and the tensors by name."""
        parts = vars(selection).items()
        numbers = tuple((name, value) for name, value in parts if not isinstance(value, Tensor))
        tensors = {name: value for name, value in parts if isinstance(value, Tensor)}
        return cls(type(selection), numbers), tensors

    def selection(self, tensors: dict[str, Tensor]) -> Selection:
        """The selection with these tensors."""
        selection: Selection = self.kind(**dict(self.numbers), **tensors)
        return selection


class TorchEngine:
    """A `CausalLM` and a cache.

    Parameters
    ----------
    model : the decoder
    cache : where its keys and values live; two engines may share one (a layer-skipping self-draft
        reads the target's history and writes its drafts where verification overwrites them)
    srh_heads : semantic retrieval heads whose queries every pass returns
    recorder : records passes and replays them, see `StepGraphs`; None runs them as they come
    """

    def __init__(
        self,
        model: CausalLM,
        cache: PagedKVCache,
        srh_heads: tuple[Head, ...] = (),
        recorder: Recorder | None = None,
    ) -> None:
        model.spec.check_heads(srh_heads, "srh_heads")
        self.model = model
        self.spec = model.spec
        self.cache = cache
        self.srh_heads = srh_heads
        self.graphs: Graphs = StepGraphs(recorder) if recorder else NoGraphs()
        self._by_layer: dict[tuple[Head, ...], list[_LayerHeads]] = {}

    @torch.inference_mode()
    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        chunk: int,
        progress: Callable[[int], None] | None = None,
    ) -> Prefill:
        """See `Engine.prefill`; `progress` is called with the tokens done after each chunk."""
        row = torch.tensor([slot], device=self._device)

        def run(window: Tensor) -> tuple[Tensor, Tensor]:
            step = _Step(self, row, 0, None, self.srh_heads, last_only=True)
            positions = step.positions(window.shape[1])
            logits = self.model.forward(window, positions, step, last_only=True)
            return logits[0, -1], step.queries()[0, -1]

        return prefill_in_chunks(self.cache, slot, tokens, run, chunk=chunk, progress=progress)

    @torch.inference_mode()
    def verify(
        self,
        slots: Tensor,
        tokens: Tensor,
        selection: Selection,
        heads: tuple[Head, ...] | None = None,
    ) -> Verification:
        """See `Engine.verify`."""
        clock = _Clock()
        heads = self.srh_heads if heads is None else heads
        plan, tensors = _Plan.of(selection)

        def body(slots: Tensor, tokens: Tensor, **tensors: Tensor) -> Outputs:
            reading = self._select(slots, plan.selection(tensors), clock)
            step = _Step(self, slots, 0, reading, heads)
            logits = self.model.forward(tokens, step.positions(tokens.shape[1]), step)
            counts, indices = self.cache.lengths[slots], None
            if reading.chosen:
                counts, indices = reading.chosen.counts, reading.chosen.indices
            return logits, step.queries(), reading.coverage, reading.guarded, counts, indices

        inputs = {"slots": slots, "tokens": tokens, **tensors}
        key = ("verify", plan, heads, self.srh_heads)
        outputs: Any = self.graphs.run(key, body, inputs)
        clock.lap("verify")
        logits, queries, coverage, guarded, counts, indices = outputs
        return Verification(logits, queries, coverage, guarded, counts, indices, clock.seconds)

    def look_ahead(self, slots: Tensor, rows: Tensor | None = None) -> TorchLookahead:
        """See `Engine.look_ahead`."""
        return TorchLookahead(self, slots, rows)

    @torch.inference_mode()
    def propose_step(
        self,
        slots: Tensor,
        tokens: Tensor,
        offset: int,
        selection: Selection,
        lookahead: Lookahead | None = None,
    ) -> Tensor:
        """See `Engine.propose_step`."""
        plan, tensors = _Plan.of(selection)

        def body(slots: Tensor, tokens: Tensor, **tensors: Tensor) -> Outputs:
            reading = self._select(slots, plan.selection(tensors), _Clock(), offset)
            step = _Step(self, slots, offset, reading, self.srh_heads, last_only=True)
            positions = step.positions(tokens.shape[1])
            logits = self.model.forward(tokens, positions, step, last_only=True)
            return logits[:, -1], step.queries()[:, -1]

        inputs = {"slots": slots, "tokens": tokens, **tensors}
        outputs: Any = self.graphs.run(("propose", plan, offset, self.srh_heads), body, inputs)
        logits, queries = outputs
        if lookahead is not None:
            assert isinstance(lookahead, TorchLookahead)
            lookahead.queries.append(queries)
        return logits

    @torch.inference_mode()
    def attention_scores(
        self,
        slots: Tensor,
        queries: Tensor,
        rows: Tensor | None = None,
        heads: tuple[Head, ...] | None = None,
    ) -> Tensor:
        """See `Engine.attention_scores`."""
        heads = self.srh_heads if heads is None else heads

        def body(slots: Tensor, queries: Tensor, rows: Tensor | None = None) -> Outputs:
            return (self._scores(slots, queries, rows, heads),)

        inputs = {"slots": slots, "queries": queries}
        if rows is not None:
            inputs["rows"] = rows
        (scores,) = self.graphs.run(("scores", heads), body, inputs)
        assert scores is not None
        return scores

    def _scores(
        self, slots: Tensor, queries: Tensor, rows: Tensor | None, heads: tuple[Head, ...]
    ) -> Tensor:
        pages, lengths = self.cache.rows(slots)
        width = self.cache.capacity if self.graphs.fixed else int(lengths.max())
        scores = torch.zeros(len(slots), width, device=self._device)
        counts: Iterable[int] = [queries.shape[1]]
        if rows is not None:
            counts = range(1, queries.shape[1] + 1) if self.graphs.fixed else rows.unique().tolist()
        for count in counts:
            # Rows that score with another number of queries have nothing to read in this turn.
            history = lengths if rows is None else lengths.masked_fill(rows != count, 0)
            for part in self.heads_by_layer(heads):
                ops.srh_score(
                    queries[:, :count].index_select(2, part.places),
                    part.kv_heads,
                    self.cache.k[part.layer],
                    pages,
                    history,
                    self.spec.head_dim**-0.5,
                    scores,
                )
        return scores

    def commit(self, slots: Tensor, counts: Tensor) -> None:
        """See `Engine.commit`."""
        self.cache.lengths[slots] += counts.to(self.cache.lengths.dtype)

    def non_finite_place(self, slot: int, tokens: Tensor) -> str:
        """See `Engine.non_finite_place`; reads densely, and runs long prompts in parts."""
        row = torch.tensor([slot], device=self._device)
        length = self.cache.lengths[slot].clone()
        place = None
        for part in tokens.to(self._device).split(_DIAGNOSED_AT_ONCE):
            step = _Step(self, row, 0, None, (), last_only=True)
            place = self.model.first_non_finite(part[None], step.positions(len(part)), step)
            if place:
                break
            self.cache.lengths[slot] += len(part)
        self.cache.lengths[slot] = length
        return place or "sparse attention"

    @property
    def _device(self) -> torch.device:
        return self.cache.lengths.device

    def heads_by_layer(self, heads: tuple[Head, ...]) -> list[_LayerHeads]:
        """Heads by layer; kept, since tensors of Python numbers cannot be made while recording."""
        if heads not in self._by_layer:
            layers: dict[int, list[int]] = {}
            for column, head in enumerate(heads):
                layers.setdefault(head.layer, []).append(column)
            self._by_layer[heads] = [
                _LayerHeads(
                    layer,
                    torch.tensor([heads[c].head for c in columns], device=self._device),
                    [self.spec.kv_head(heads[c].head) for c in columns],
                    torch.tensor(columns, device=self._device),
                )
                for layer, columns in sorted(layers.items())
            ]
        return self._by_layer[heads]

    def _select(
        self, slots: Tensor, selection: Selection, clock: _Clock, offset: int = 0
    ) -> _Reading:
        """Carry out a selection for tokens at `lengths + offset`; scored is the history alone."""
        unknown = torch.full((len(slots),), float("nan"), device=self._device)
        guarded = torch.zeros(len(slots), dtype=torch.bool, device=self._device)
        if isinstance(selection, Dense):
            return _Reading(None, 0, torch.ones_like(unknown), guarded)
        if isinstance(selection, Indices):
            return _Reading(selection, 0, unknown, guarded)

        lengths = self.cache.lengths[slots]
        if isinstance(selection, Window):
            before, size, sink = lengths + offset, selection.size, selection.sink
            chosen = ops.select_tokens(None, None, before, size, 0, sink, 0)
            return _Reading(Indices(*chosen), 0, unknown, guarded)
        target_scores, draft_scores = None, selection.lookahead_scores
        if not self.graphs.fixed and int(lengths.max()) <= selection.budget:
            draft_scores = None  # everything will be read, so nothing needs a score
        elif selection.history_queries is not None:
            queries = selection.history_queries[:, None]
            target_scores = self._scores(slots, queries, None, self.srh_heads)
        clock.lap("score")

        indices, counts = join_and_select(
            target_scores,
            draft_scores,
            lengths,
            budget=selection.budget,
            lookahead_tokens=selection.lookahead,
            sink=selection.sink,
            window=selection.window,
            join=selection.join,
            lookahead_weight=selection.lookahead_weight,
        )
        coverage, max_count = unknown, 0
        if target_scores is not None:
            coverage = attention_recovery_rate(target_scores, indices, counts)
        whole = counts == lengths
        coverage = torch.where(whole, torch.ones_like(coverage), coverage)
        if selection.guard and target_scores is not None:
            # A coverage just below 1 can round to 1, which a guard of 1 must not let pass.
            guarded = ~whole & (coverage < selection.guard if selection.guard < 1 else True)
            # To the ops, as many tokens as there are is all of them, read just as densely.
            counts = torch.where(guarded, lengths, counts)
            indices = indices.masked_fill(guarded[:, None], -1)
            max_count = self.cache.capacity
        clock.lap("select")
        return _Reading(Indices(indices, counts), max_count, coverage, guarded)


@dataclass
class TorchLookahead:
    """The queries of a roll-out, to score the history in one go: its keys are read once.

    queries : of every pass, Tensor `[B, P, D]`
    """

    engine: TorchEngine
    slots: Tensor
    rows: Tensor | None
    queries: list[Tensor] = field(default_factory=list)

    def scores(self) -> Tensor:
        """See `Lookahead.scores`."""
        return self.engine.attention_scores(self.slots, torch.stack(self.queries, 1), self.rows)


class _Step:
    """One forward pass: caches new keys and values, attends, stashes retrieval-head queries."""

    def __init__(
        self,
        engine: TorchEngine,
        slots: Tensor,
        offset: int,
        reading: _Reading | None,
        heads: tuple[Head, ...],
        *,
        last_only: bool = False,
    ) -> None:
        self._cache = engine.cache
        self._max_positions = engine.spec.max_positions
        self._pages, lengths = engine.cache.rows(slots)
        self._lengths = lengths + offset
        self._reading = reading
        self._last_only = last_only
        self._by_layer = {part.layer: part for part in engine.heads_by_layer(heads)}
        self._stash: dict[int, Tensor] = {}
        self._empty = torch.empty(0)

    def positions(self, w: int) -> Tensor:
        """Positions `[B, w]` of the new tokens.

        Columns past the model's last position are padding that is never accepted; they repeat it.
        """
        new = torch.arange(w, device=self._lengths.device)
        return (self._lengths.long()[:, None] + new).clamp(max=self._max_positions - 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `AttentionStep.attend`."""
        k_cache, v_cache = self._cache.k[layer], self._cache.v[layer]
        ops.kv_append(k, v, k_cache, v_cache, self._pages, self._lengths)
        if part := self._by_layer.get(layer):
            rows = q[:, -1:] if self._last_only else q
            self._stash[layer] = rows.index_select(2, part.heads)
        self._empty = q[:, :, :0]
        where = (k_cache, v_cache, self._pages, self._lengths)
        if self._reading is None or self._reading.chosen is None:
            return ops.dense_attention(q, *where, scale)[0]
        chosen = self._reading.chosen
        out, _ = ops.sparse_attention(
            q, *where, chosen.indices, chosen.counts, scale, self._reading.max_count
        )
        return out

    def queries(self) -> Tensor:
        """Stashed queries `[B, w or 1, P, D]`, in the order of the heads asked for."""
        if not self._stash:
            return self._empty
        found = torch.cat(list(self._stash.values()), 2)
        queries = torch.empty_like(found)
        places = torch.cat([self._by_layer[layer].places for layer in self._stash])
        return queries.index_copy_(2, places, found)


class _Clock:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

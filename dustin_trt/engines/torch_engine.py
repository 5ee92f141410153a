"""The torch backend: any machine torch runs on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_trt import ops
from dustin_trt.config import Head
from dustin_trt.engines.base import (
    Dense,
    Indices,
    Prefill,
    Selection,
    Verification,
)
from dustin_trt.engines.selecting import join_and_select
from dustin_trt.kv_cache import PagedKVCache
from dustin_trt.metrics import attention_recovery_rate
from dustin_trt.models.causal_lm import CausalLM

_DIAGNOSED_AT_ONCE = 512  # tokens


@dataclass(frozen=True)
class _Reading:
    """A selection carried out.

    chosen : which history tokens; None for all of them
    coverage : Tensor `[B]`, as in `Verification`
    guarded : Tensor `[B]` bool, rows that read everything in place of what was chosen
    """

    chosen: Indices | None
    coverage: Tensor
    guarded: Tensor


class TorchEngine:
    """A `CausalLM` and a cache.

    Parameters
    ----------
    model : the decoder
    cache : where its keys and values live; two engines may share one (a layer-skipping self-draft
        reads the target's history and writes its drafts where verification overwrites them)
    srh_heads : semantic retrieval heads whose queries every pass returns
    """

    def __init__(
        self, model: CausalLM, cache: PagedKVCache, srh_heads: tuple[Head, ...] = ()
    ) -> None:
        model.spec.check_heads(srh_heads, "srh_heads")
        self.model = model
        self.spec = model.spec
        self.cache = cache
        self.srh_heads = srh_heads

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
        cache = self.cache
        # The last token always runs: its logits and queries are what the caller came for.
        reused = min(cache.resident_prefix(slot, tokens), len(tokens) - 1)
        cache.lengths[slot] = reused
        cache.resident[slot] = list(tokens[:reused])
        row = torch.tensor([slot], device=self._device)
        for start in range(reused, len(tokens), chunk):
            part = tokens[start : start + chunk]
            window = torch.tensor([part], device=self._device)
            step = _Step(self, row, 0, None, self.srh_heads, last_only=True)
            logits = self.model.forward(window, step.positions(len(part)), step, last_only=True)
            cache.lengths[slot] = start + len(part)
            cache.resident[slot] += part
            if progress:
                progress(start + len(part))
        return Prefill(logits[0, -1], step.queries()[0, -1], reused)

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
        reading = self._select(slots, selection, clock)
        step = _Step(self, slots, 0, reading, self.srh_heads if heads is None else heads)
        logits = self.model.forward(tokens, step.positions(tokens.shape[1]), step)
        clock.lap("verify")
        counts, indices = self.cache.lengths[slots], None
        if reading.chosen:
            counts = torch.where(reading.guarded, counts, reading.chosen.counts)
            indices = reading.chosen.indices.masked_fill(reading.guarded[:, None], -1)
        return Verification(
            logits, step.queries(), reading.coverage, reading.guarded, counts, indices,
            clock.seconds,
        )  # fmt: skip

    @torch.inference_mode()
    def propose_step(
        self, slots: Tensor, tokens: Tensor, offset: int, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """See `Engine.propose_step`."""
        reading = self._select(slots, selection, _Clock())
        step = _Step(self, slots, offset, reading, self.srh_heads, last_only=True)
        positions = step.positions(tokens.shape[1])
        logits = self.model.forward(tokens, positions, step, last_only=True)
        return logits[:, -1], step.queries()[:, -1]

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
        pages, lengths = self.cache.rows(slots)
        scores = torch.zeros(len(slots), int(lengths.max()), device=self._device)
        for count in rows.unique().tolist() if rows is not None else [queries.shape[1]]:
            batch = torch.arange(len(slots)) if rows is None else (rows == count).nonzero()[:, 0]
            part = scores[batch]
            for layer, columns, kv_heads in _by_layer(heads, self):
                ops.srh_score(
                    queries[batch, :count][:, :, columns],
                    kv_heads,
                    self.cache.k[layer],
                    pages[batch],
                    lengths[batch],
                    self.spec.head_dim**-0.5,
                    part,
                )
            scores[batch] = part
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

    def _select(self, slots: Tensor, selection: Selection, clock: _Clock) -> _Reading:
        """Carry out a selection."""
        unknown = torch.full((len(slots),), float("nan"), device=self._device)
        guarded = torch.zeros(len(slots), dtype=torch.bool, device=self._device)
        if isinstance(selection, Dense):
            return _Reading(None, torch.ones_like(unknown), guarded)
        if isinstance(selection, Indices):
            return _Reading(selection, unknown, guarded)

        lengths = self.cache.lengths[slots]
        target_scores, draft_scores = None, selection.lookahead_scores
        if int(lengths.max()) <= selection.budget:
            draft_scores = None  # everything will be read, so nothing needs a score
        elif selection.history_queries is not None:
            target_scores = self.attention_scores(slots, selection.history_queries[:, None])
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
        coverage = unknown
        if target_scores is not None:
            coverage = attention_recovery_rate(target_scores, indices, counts)
        whole = counts == lengths
        coverage = torch.where(whole, torch.ones_like(coverage), coverage)
        if selection.guard and target_scores is not None:
            # A coverage just below 1 can round to 1, which a guard of 1 must not let pass.
            guarded = ~whole & (coverage < selection.guard if selection.guard < 1 else True)
        clock.lap("select")
        return _Reading(Indices(indices, counts), coverage, guarded)


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
        self._groups = self._group(reading)
        self._last_only = last_only
        self._columns = {layer: columns for layer, columns, _ in _by_layer(heads, engine)}
        self._heads = heads
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
        if layer in self._columns:
            rows = q[:, -1:] if self._last_only else q
            self._stash[layer] = rows[:, :, [self._heads[c].head for c in self._columns[layer]]]
        self._empty = q[:, :, :0]
        if len(self._groups) == 1:
            return self._groups[0].attend(q, k_cache, v_cache, scale)
        out = q.new_empty(q.shape)
        for group in self._groups:
            out[group.rows] = group.attend(q[group.rows], k_cache, v_cache, scale)
        return out

    def queries(self) -> Tensor:
        """Stashed queries `[B, w or 1, P, D]`, in the order of the heads asked for."""
        if not self._stash:
            return self._empty
        any_layer = next(iter(self._stash.values()))
        queries = any_layer.new_empty(*any_layer.shape[:2], len(self._heads), any_layer.shape[-1])
        for layer, columns in self._columns.items():
            queries[:, :, columns] = self._stash[layer]
        return queries

    def _group(self, reading: _Reading | None) -> list[_Group]:
        """The batch, or its guarded rows and the others, as those read through another op."""
        every = torch.arange(len(self._lengths), device=self._lengths.device)
        if reading is None or reading.chosen is None:
            return [_Group(every, self._pages, self._lengths, None)]
        guarded, chosen = reading.guarded, reading.chosen
        if not guarded.any():
            return [_Group(every, self._pages, self._lengths, chosen)]
        groups = []
        for mask, read in ((guarded, None), (~guarded, chosen)):
            rows = every[mask]
            if len(rows):
                read = read and Indices(read.indices[rows], read.counts[rows])
                groups.append(_Group(rows, self._pages[rows], self._lengths[rows], read))
        return groups


@dataclass(frozen=True)
class _Group:
    """Rows of a batch whose history one op reads.

    rows : Tensor `[R]` int64, their places in the batch
    pages, lengths : their rows of the page table, and history lengths before the new tokens
    read : which history tokens; None for all of them
    """

    rows: Tensor
    pages: Tensor
    lengths: Tensor
    read: Indices | None

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        where = (k_cache, v_cache, self.pages, self.lengths)
        if self.read is None:
            return ops.dense_attention(q, *where, scale)[0]
        return ops.sparse_attention(q, *where, self.read.indices, self.read.counts, scale)[0]


def _by_layer(
    heads: tuple[Head, ...], engine: TorchEngine
) -> list[tuple[int, list[int], list[int]]]:
    """(layer, columns of `heads` in it, their KV heads), by layer."""
    layers: dict[int, list[int]] = {}
    for column, head in enumerate(heads):
        layers.setdefault(head.layer, []).append(column)
    return [
        (layer, columns, [engine.spec.kv_head(heads[c].head) for c in columns])
        for layer, columns in sorted(layers.items())
    ]


class _Clock:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

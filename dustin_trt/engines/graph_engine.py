"""The engine over a compiled step, whatever runs it: what `TorchEngine` does, done by a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dustin_trt.config import ConfigError, Head
from dustin_trt.engines.base import (
    Dense,
    Dustin,
    Lookahead,
    Prefill,
    Selection,
    Verification,
    Window,
)
from dustin_trt.engines.graphs import Graphs, NoGraphs, Outputs, Recorder, StepGraphs
from dustin_trt.engines.prefill import prefill_in_chunks
from dustin_trt.engines.step_graph import Phase, Reading, Session, StepGraph
from dustin_trt.kv_cache import PagedKVCache

_EVERYTHING = 2.0
"""A guard above 1: read everything, score nothing."""


class GraphEngine:
    """A `StepGraph` that runs, and a cache.

    Parameters
    ----------
    session : runs it
    graph : what it is
    cache : of the graph's page size and capacity, on the session's device
    recorder : see `StepGraphs`
    """

    def __init__(
        self,
        session: Session,
        graph: StepGraph,
        cache: PagedKVCache,
        recorder: Recorder | None = None,
    ) -> None:
        self.session = session
        self.graph = graph
        self.spec = graph.model
        self.cache = cache
        self.srh_heads = graph.heads
        self.graphs: Graphs = StepGraphs(recorder) if recorder else NoGraphs()
        # Every pass works on the same caches, under all the names that the graph has for them.
        kinds = {"k_cache": cache.k, "v_cache": cache.v, "k_history": cache.k}
        self._caches = {
            name: kinds[kind][int(layer)]
            for name in graph.inputs
            for kind, _, layer in [name.partition(".")]
            if layer
        }

    @torch.inference_mode()
    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        chunk: int,
        progress: Callable[[int], None] | None = None,
    ) -> Prefill:
        """See `Engine.prefill`; chunks are no longer than the engine was built for."""
        row = torch.tensor([slot], device=self.session.device)

        def run(window: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self._pass("context", row, window, {}, guard=_EVERYTHING, last_only=True)
            return outputs["logits"][0, -1], self._queries(outputs, 1)[0, -1]

        chunk = min(chunk, self.graph.chunk)
        return prefill_in_chunks(self.cache, slot, tokens, run, chunk=chunk, progress=progress)

    @torch.inference_mode()
    def verify(
        self,
        slots: Tensor,
        tokens: Tensor,
        selection: Selection,
        heads: tuple[Head, ...] | None = None,
    ) -> Verification:
        """See `Engine.verify`.

        Raises
        ------
        ConfigError
            A selection or heads that the graph was not built with.
        """
        if heads is not None and heads != self.srh_heads:
            raise ConfigError("an engine returns the queries of the heads it was built with only")
        started = time.perf_counter()
        guard, signals = self._reading(selection)
        dense = isinstance(selection, Dense)

        def body(slots: Tensor, tokens: Tensor, **signals: Tensor) -> Outputs:
            outputs = self._pass("generation", slots, tokens, signals, guard=guard)
            queries, rows = self._queries(outputs, tokens.shape[1]), len(slots)
            guarded = torch.zeros(rows, dtype=torch.bool, device=tokens.device)
            share = torch.full((rows,), 1.0 if dense else float("nan"), device=tokens.device)
            if dense or "indices" not in outputs:
                counts = self.cache.lengths[slots]
                return outputs["logits"], queries, share, guarded, counts, None
            counts, indices = outputs["counts"], outputs["indices"]
            whole = counts == self.cache.lengths[slots]
            coverage = outputs.get("coverage", torch.where(whole, 1.0, share))
            return outputs["logits"], queries, coverage, outputs["guarded"], counts, indices

        inputs = {"slots": slots, "tokens": tokens, **signals}
        results: Any = self.graphs.run(("verify", guard, dense), body, inputs)
        logits, queries, coverage, guarded, counts, indices = results
        seconds = {"verify": time.perf_counter() - started}
        return Verification(logits, queries, coverage, guarded, counts, indices, seconds)

    def look_ahead(self, slots: Tensor, rows: Tensor | None = None) -> GraphLookahead:
        """See `Engine.look_ahead`."""
        total = torch.zeros(len(slots), self.graph.capacity, device=self.session.device)
        return GraphLookahead(total, rows)

    @torch.inference_mode()
    def propose_step(
        self,
        slots: Tensor,
        tokens: Tensor,
        offset: int,
        selection: Selection,
        lookahead: Lookahead | None = None,
    ) -> Tensor:
        """See `Engine.propose_step`; scoring is part of the pass."""
        guard, signals = self._reading(selection)
        # Which passes of a roll-out count differs by row: past its own, a row scores nothing.
        lengths = self.cache.lengths[slots]
        if lookahead is None:
            total, scored = self.look_ahead(slots).total, torch.zeros_like(lengths)
        else:
            assert isinstance(lookahead, GraphLookahead)
            total, scored = lookahead.total, lookahead.counted(lengths)

        def body(slots: Tensor, tokens: Tensor, **inputs: Tensor) -> Outputs:
            outputs = self._pass(
                "generation", slots, tokens, inputs, offset=offset, guard=guard, last_only=True
            )
            return outputs["logits"][:, -1], outputs.get("new_lookahead_scores")

        inputs = {"slots": slots, "tokens": tokens, **signals}
        if "score_lengths" in self.graph.inputs:
            inputs |= {"score_lengths": scored, "lookahead_scores": total}
        results: Any = self.graphs.run(("propose", guard, offset), body, inputs)
        logits, total = results
        if isinstance(lookahead, GraphLookahead):
            if total is None:
                raise ConfigError("this draft was built without heads to look ahead with")
            lookahead.total = total
        return logits

    def attention_scores(
        self,
        slots: Tensor,
        queries: Tensor,
        rows: Tensor | None = None,
        heads: tuple[Head, ...] | None = None,
    ) -> Tensor:
        """See `Engine.attention_scores`, which is not to be had of a compiled step."""
        raise ConfigError(
            "an engine scores inside its passes only: for policy oracle run the checkpoint"
        )

    def commit(self, slots: Tensor, counts: Tensor) -> None:
        """See `Engine.commit`."""
        self.cache.lengths[slots] += counts.to(self.cache.lengths.dtype)

    def non_finite_place(self, slot: int, tokens: Tensor) -> str:
        """See `Engine.non_finite_place`; nobody can look inside of a compiled pass."""
        return "a compiled pass (the checkpoint itself, run by torch, would name the layer)"

    def _pass(
        self,
        phase: Phase,
        slots: Tensor,
        tokens: Tensor,
        more: dict[str, Tensor],
        *,
        offset: int = 0,
        guard: float,
        last_only: bool = False,
    ) -> dict[str, Tensor]:
        graph, device = self.graph, self.session.device
        pages, lengths = self.cache.rows(slots)
        lengths = lengths + offset
        rows, w = tokens.shape
        new = torch.arange(w, dtype=torch.int32, device=device)
        # Columns past the last position are padding that is never accepted; they repeat it.
        positions = (lengths[:, None] + new).clamp(max=self.spec.max_positions - 1)
        inputs = {
            "input_ids": tokens.to(torch.int32),
            "positions": positions,
            "lengths": lengths,
            "page_table": pages,
            "columns": new[-1:] if last_only else new,
            **more,
            **self._caches,
        }
        if graph.reading:
            bound = graph.capacity if guard else graph.reading.budget
            inputs["guard"] = torch.full((1,), guard, device=device)
            inputs["read_bound"] = torch.empty(bound, dtype=torch.int32, device=device)
        # In a context pass and a dense one no signal is looked at, but each has its place.
        for name, (dtype, shape) in graph.inputs.items():
            if name not in inputs:
                size = [part if isinstance(part, int) else rows for part in shape]
                inputs[name] = torch.zeros(size, dtype=getattr(torch, dtype), device=device)
        return self.session.run(phase, inputs)

    def _queries(self, outputs: dict[str, Tensor], columns: int) -> Tensor:
        """`[B, L, P, D]`; P is 0 where the graph has no heads."""
        logits = outputs["logits"]
        empty = logits.new_empty((len(logits), columns, 0, self.spec.head_dim))
        return outputs.get("srh_queries", empty)

    def _reading(self, selection: Selection) -> tuple[float, dict[str, Tensor]]:
        """Guard and signals that make the graph read what is asked for."""
        reading, capacity = self.graph.reading, self.graph.capacity
        if isinstance(selection, Dense):
            return _EVERYTHING, {}
        if isinstance(selection, Window) and selection.size >= capacity and reading is None:
            return _EVERYTHING, {}
        if isinstance(selection, Window) and reading == Reading(
            budget=selection.size, sink=selection.sink
        ):
            return 0.0, {}
        if isinstance(selection, Dustin) and reading is not None:
            signals = {"history_queries": selection.history_queries,
                       "lookahead_scores": selection.lookahead_scores}  # fmt: skip
            given = {name: x for name, x in signals.items() if x is not None}
            asked: dict[str, Any] = {
                "budget": selection.budget, "sink": selection.sink, "window": selection.window,
                "history": "history_queries" in given,
                "lookahead_scores": "lookahead_scores" in given,
            }  # fmt: skip
            if len(given) == 2:
                asked |= {"lookahead": selection.lookahead, "join": selection.join,
                          "lookahead_weight": selection.lookahead_weight}  # fmt: skip
            for name, value in asked.items():
                if value != (built := getattr(reading, name)):
                    raise ConfigError(
                        f"this engine was built with {name} {built}, not {value}: build it again "
                        "with the configuration that is wanted"
                    )
            return selection.guard or 0.0, given
        raise ConfigError(
            f"an engine reads everything, or what it was built to read ({reading}), not {selection}"
        )


@dataclass
class GraphLookahead:
    """Lookahead scores as the passes of a roll-out add them up.

    total : Tensor `[B, N]` fp32
    rows : see `Engine.look_ahead`
    passes : so far
    """

    total: Tensor
    rows: Tensor | None
    passes: int = field(default=0)

    def counted(self, lengths: Tensor) -> Tensor:
        """Tokens of the history that the next pass scores in each row, `[B]`."""
        self.passes += 1
        if self.rows is None:
            return lengths
        return lengths.masked_fill(self.rows < self.passes, 0)

    def scores(self) -> Tensor:
        """See `Lookahead.scores`."""
        return self.total

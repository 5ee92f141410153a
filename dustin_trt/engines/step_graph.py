"""The graph of one model's step: which tensors go in and out, and how large they may be.

The exporter names the graph's tensors by it, TensorRT's profiles are made of it, and an engine
binds by it. It lies in an engine folder's manifest.

Both phases run the one graph. Dense reading, in prefill and elsewhere, is a guard of 1: every row
reads its whole history. Scoring reads keys under names of their own (`k_history.3`), bound to the
very memory of `k_cache.3`: it looks at tokens before the window and the window's keys are appended
behind them, so neither has to wait for, or be protected from, the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from dustin_trt.config import Head, ModelSpec

Phase = Literal["context", "generation"]
"""Chunked prefill of one prompt, or steps of a batch: the two optimisation profiles."""
PHASES: tuple[Phase, ...] = ("context", "generation")

INT32, FLOAT32, BOOL = "int32", "float32", "bool"


class TensorType(NamedTuple):
    """A graph's input or output; `shape` of numbers and of names from `StepGraph.sizes`."""

    dtype: str
    shape: tuple[int | str, ...]


class Sizes(NamedTuple):
    """What a dimension may be, and what it is optimised for."""

    min: int
    opt: int
    max: int


class Shard(BaseModel):
    """One of `size` ranks of tensor parallelism: a share of the KV heads and what they need."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(default=0, ge=0)
    size: int = Field(default=1, ge=1)


class Reading(BaseModel):
    """What a generation pass reads of the history; see `engines.base.Dustin`.

    `history` and `lookahead_scores` say which signals choose; without both, sink and window do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: int = Field(ge=1)
    sink: int = Field(default=4, ge=0)
    window: int = Field(default=0, ge=0)
    lookahead: int = Field(default=0, ge=0)
    history: bool = False
    lookahead_scores: bool = False
    join: Literal["split", "sum"] = "split"
    lookahead_weight: float = Field(default=0.5, ge=0, le=1)


class StepGraph(BaseModel):
    """One model's step.

    Attributes
    ----------
    role : "target": returns the queries of its retrieval heads and reads by both signals; "draft":
        adds its heads' attention to the lookahead scores, pass by pass
    model : the whole model's shape, also of a shard
    dtype : of weights, activations and cache
    page_size, max_pages : tokens a cache page, and pages a slot; their product is the capacity N
    max_batch : rows of a generation pass
    max_window : tokens a row of a generation pass
    chunk : tokens of a context pass
    heads : retrieval heads, ascending
    reading : None reads everything
    shard : of tensor parallelism
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["target", "draft"]
    model: ModelSpec
    dtype: Literal["float32", "float16", "bfloat16"]
    page_size: int = Field(ge=1)
    max_pages: int = Field(ge=1)
    max_batch: int = Field(ge=1)
    max_window: int = Field(ge=1)
    chunk: int = Field(ge=1)
    heads: tuple[Head, ...] = ()
    reading: Reading | None = None
    shard: Shard = Shard()

    @model_validator(mode="after")
    def _is_consistent(self) -> StepGraph:
        model, size = self.model, self.shard.size
        self.model.check_heads(self.heads, "heads")
        if list(self.heads) != sorted(set(self.heads)):
            raise ValueError("heads are not ascending and distinct")
        if self.shard.rank >= size or model.num_kv_heads % size:
            raise ValueError(
                f"{model.num_kv_heads} KV heads cannot be cut into {size} equal shards"
                if model.num_kv_heads % size
                else f"shard {self.shard.rank} of {size} does not exist"
            )
        if self.reading and self.reading.budget > self.capacity:
            raise ValueError(
                f"budget {self.reading.budget} is more than the {self.capacity} tokens of a slot"
            )
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def capacity(self) -> int:
        """N, tokens that a slot can hold."""
        return self.page_size * self.max_pages

    @property
    def num_heads(self) -> int:
        """Query heads of this shard."""
        return self.model.num_heads // self.shard.size

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this shard."""
        return self.model.num_kv_heads // self.shard.size

    @property
    def local_heads(self) -> tuple[Head, ...]:
        """Retrieval heads of this shard, numbered within it."""
        first = self.shard.rank * self.num_heads
        return tuple(
            Head(layer, head - first)
            for layer, head in self.heads
            if first <= head < first + self.num_heads
        )

    @property
    def scored_layers(self) -> tuple[int, ...]:
        """Layers whose keys are scored, ascending."""
        if self.role == "target" and not (self.reading and self.reading.history):
            return ()
        return tuple(sorted({layer for layer, _ in self.local_heads}))

    @property
    def inputs(self) -> dict[str, TensorType]:
        """Every input, in order.

        input_ids, positions : the windows' tokens
        lengths : tokens before each window
        page_table : pages of each row
        columns : which of the window's columns logits and queries are wanted of
        guard : coverage below which a row reads its whole history; 1 all rows, 0 none
        read_bound : only its length counts: no row reads more tokens of the history
        history_queries : of a target, what its heads asked at the last cached token
        score_lengths : of a draft, tokens of the history that this pass scores; 0 for none
        lookahead_scores : of a target, the draft's; of a draft, what its passes have added up
        k_cache.i, v_cache.i : written in place
        k_history.i : the same memory as k_cache.i
        """
        reading, dtype = self.reading, self.dtype
        wide = TensorType(FLOAT32, ("batch", self.capacity))
        found = {
            "input_ids": TensorType(INT32, ("batch", "window")),
            "positions": TensorType(INT32, ("batch", "window")),
            "lengths": TensorType(INT32, ("batch",)),
            "page_table": TensorType(INT32, ("batch", self.max_pages)),
            "columns": TensorType(INT32, ("columns",)),
        }
        if reading:
            found["guard"] = TensorType(FLOAT32, (1,))
            found["read_bound"] = TensorType(INT32, ("read",))
        if self.role == "target":
            if self.scored_layers:
                shape = ("batch", len(self.local_heads), self.model.head_dim)
                found["history_queries"] = TensorType(dtype, shape)
            if reading and reading.lookahead_scores:
                found["lookahead_scores"] = wide
        elif self.heads:
            found["score_lengths"] = TensorType(INT32, ("batch",))
            found["lookahead_scores"] = wide
        for layer in range(self.model.num_layers):
            found[f"k_cache.{layer}"] = found[f"v_cache.{layer}"] = self._cache
        for layer in self.scored_layers:
            found[f"k_history.{layer}"] = self._cache
        return found

    @property
    def outputs(self) -> dict[str, TensorType]:
        """Every output, in order.

        logits, srh_queries : of the wanted columns
        indices, counts, coverage, guarded : as in `engines.base.Verification`; counts and guarded
            of a draft with a window as well, coverage where the history was scored
        new_lookahead_scores : of a draft
        new_k_cache.i, new_v_cache.i : the caches, in place
        """
        reading = self.reading
        vocabulary = self.model.vocab_size
        found = {"logits": TensorType(FLOAT32, ("batch", "columns", vocabulary))}
        if self.role == "target":
            if self.local_heads:
                shape = ("batch", "columns", len(self.local_heads), self.model.head_dim)
                found["srh_queries"] = TensorType(self.dtype, shape)
            if reading:
                found["indices"] = TensorType(INT32, ("batch", reading.budget))
                found["counts"] = TensorType(INT32, ("batch",))
                found["guarded"] = TensorType(BOOL, ("batch",))
                if reading.history:
                    found["coverage"] = TensorType(FLOAT32, ("batch",))
        elif self.heads:
            found["new_lookahead_scores"] = TensorType(FLOAT32, ("batch", self.capacity))
        for layer in range(self.model.num_layers):
            found[f"new_k_cache.{layer}"] = found[f"new_v_cache.{layer}"] = self._cache
        return found

    def sizes(self, phase: Phase) -> dict[str, Sizes]:
        """What each named dimension may be in a phase."""
        window = self.max_window if phase == "generation" else self.chunk
        one, pages = Sizes(1, 1, 1), self.max_batch * self.max_pages
        columns = Sizes(1, window, window)
        if phase == "context" or self.role == "draft":
            columns = one
        found = {
            # Prefill runs one prompt. A profile that said so would make TensorRT keep the weights
            # once more, in a layout of their own.
            "batch": Sizes(1, 1 if phase == "context" else self.max_batch, self.max_batch),
            "window": Sizes(1, window, window),
            "columns": columns,
            "pages": Sizes(1, pages, pages),
        }
        if self.reading:
            usual = self.capacity if phase == "context" else self.reading.budget
            found["read"] = Sizes(self.reading.budget, usual, self.capacity)
        return found

    @property
    def _cache(self) -> TensorType:
        shape = ("pages", self.num_kv_heads, self.page_size, self.model.head_dim)
        return TensorType(self.dtype, shape)


class Session(Protocol):
    """A graph that runs.

    device : where its tensors are
    """

    device: torch.device

    def run(self, phase: Phase, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a pass over `inputs`, which has every input of the graph.

        Caches are written in place. Returned are the other outputs, in memory of the caller's.
        """
        ...


def check_inputs(graph: StepGraph, phase: Phase, inputs: Mapping[str, Tensor]) -> None:
    """Refuse what a pass of `phase` cannot take.

    Raises
    ------
    ValueError
        Names the input: missing, unknown, of another type or size, or of a size that differs from
        another input's.
    """
    wanted, sizes, seen = graph.inputs, graph.sizes(phase), dict[str, int]()
    if inputs.keys() != wanted.keys():
        names = sorted(inputs.keys() ^ wanted.keys())
        raise ValueError(f"the inputs of this graph are {', '.join(wanted)}: see {names[0]}")
    for name, (dtype, shape) in wanted.items():
        x = inputs[name]
        if x.dtype is not getattr(torch, dtype) or x.dim() != len(shape):
            raise ValueError(f"{name} must be {[*shape]} of {dtype}, not {[*x.shape]} of {x.dtype}")
        if not x.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        for size, expected in zip(x.shape, shape, strict=True):
            low, _, high = sizes[expected] if isinstance(expected, str) else Sizes(*[expected] * 3)
            if not low <= size <= high:
                raise ValueError(
                    f"{name} is {[*x.shape]}, must be {[*shape]} with {expected} of {low}–{high} "
                    f"in the {phase} phase"
                )
            if isinstance(expected, str) and seen.setdefault(expected, size) != size:
                raise ValueError(f"{name} is {[*x.shape]} where {expected} is {seen[expected]}")

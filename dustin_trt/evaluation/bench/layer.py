"""One layer's verification attention and the estimation before it, on caches of random values."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dustin_trt import ops
from dustin_trt.evaluation.bench import bandwidth
from dustin_trt.evaluation.bench.baselines import causal_mask, gather_sdpa, sdpa
from dustin_trt.evaluation.bench.caches import CacheRing, ring_bytes
from dustin_trt.evaluation.bench.report import BenchmarkError
from dustin_trt.evaluation.bench.shapes import Shape

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest error over the largest value."""


@dataclass(frozen=True)
class Scoring:
    """Which heads score the history in a step: `heads` query heads in each of `layers` layers."""

    heads: int
    layers: int


HISTORY, LOOKAHEAD = Scoring(heads=4, layers=1), Scoring(heads=4, layers=3)
"""What the paper's search found for Qwen2.5-72B and its 0.5B draft."""


def check_budget(budget: int, context: int, least: int) -> None:
    """Refuse a budget that leaves nothing to choose, of the tokens or in them."""
    if budget <= least:
        raise ValueError(
            f"--budget {budget} leaves nothing to choose beside {least} tokens of sink and window: "
            f"make it larger than {least}"
        )
    if budget >= context:
        raise ValueError(f"--budget {budget} reads all of --context {context}: make it smaller")


@dataclass(frozen=True)
class Work:
    """A step to measure.

    shape : the target
    context : history tokens N
    batch : B
    gamma : draft tokens; the window is w = gamma + 1
    dtype : of caches and queries
    target, draft : heads that score; `draft_shape` None leaves the lookahead out
    sink, window : history tokens that are always chosen
    """

    shape: Shape
    context: int
    batch: int
    gamma: int
    dtype: torch.dtype
    target: Scoring = HISTORY
    draft: Scoring = LOOKAHEAD
    draft_shape: Shape | None = None
    sink: int = 4
    window: int = 16

    @property
    def w(self) -> int:
        """Tokens of a verification window."""
        return self.gamma + 1

    @property
    def nbytes(self) -> int:
        """Memory that the caches of this step take."""
        size = (self.context, self.batch, self.w, self.dtype)
        total = ring_bytes(self.shape, *size)
        if self.draft_shape:
            total += ring_bytes(self.draft_shape, *size, keys_only=True)
        return total

    def read_bytes(self, tokens: int) -> int:
        """Bytes of keys and values of `tokens` history tokens and the window, one layer."""
        return 2 * self.batch * (tokens + self.w) * self.shape.num_kv_heads * self._row(self.shape)

    def scored_bytes(self, shape: Shape, scoring: Scoring) -> int:
        """Bytes of keys that scoring reads."""
        kv_heads = len({shape.kv_head(head) for head in shape.spread_heads(scoring.heads)})
        return scoring.layers * kv_heads * self.batch * self.context * self._row(shape)

    def _row(self, shape: Shape) -> int:
        return shape.head_dim * self.dtype.itemsize


class Layer:
    """The ops of a step as calls without arguments, each on the next layer's cache.

    `history`, `lookahead`, `select` and `sparse` hand their results on, as in a step; the queries
    change from call to call, and with them the scores and the chosen tokens.

    Parameters
    ----------
    work : what to measure
    fresh : how many different queries are drawn; they are used in turn
    """

    def __init__(self, work: Work, *, fresh: int = 16) -> None:
        shape, size = work.shape, (work.context, work.batch, work.w, work.dtype)
        self.work = work
        self.ring = CacheRing(shape, *size)
        self._queries = _Queries(work, shape, work.w, fresh)
        if work.draft_shape:
            self.draft_ring = CacheRing(work.draft_shape, *size, keys_only=True)
            self._draft_queries = _Queries(work, work.draft_shape, work.gamma, fresh)
        self._scale = shape.head_dim**-0.5
        self._group = shape.num_heads // shape.num_kv_heads
        self._mask = causal_mask(self._group, work.w, work.context + work.w, work.dtype)
        self.target_scores: Tensor | None = None
        self.draft_scores: Tensor | None = None

    def use_budget(self, budget: int, sets: int = 16) -> None:
        """Choose `budget` history tokens from now on; `sets` random ones serve as the roof."""
        work = self.work
        self.budget = budget
        self._short_mask = causal_mask(self._group, work.w, budget + work.w, work.dtype)
        kv_heads, capacity = work.shape.num_kv_heads, work.context + work.w
        self._random = itertools.cycle(
            [
                bandwidth.random_rows(work.context, work.batch, kv_heads, capacity, budget)
                for _ in range(sets)
            ]
        )
        self.history()
        if work.draft_shape:
            self.lookahead()
        self.select()

    def dense(self) -> None:
        """Our `dense_attention`."""
        self._dense(*self._attention())

    def sdpa(self) -> None:
        """Torch's fused attention on the same contiguous cache."""
        sdpa(*self._attention(), self._mask, self._scale)

    def history(self) -> None:
        """The target's last query scores the history."""
        self.target_scores = self._score(*self._history(), self.work.target)

    def lookahead(self) -> None:
        """The draft's queries of all its tokens score the history."""
        self.draft_scores = self._score(*self._lookahead(), self.work.draft)

    def history_by_all_heads(self) -> None:
        """Every head of one target layer scores."""
        self._score(*self._history(), Scoring(self.work.shape.num_heads, layers=1))

    def lookahead_by_all_heads(self) -> None:
        """Every head of one draft layer scores."""
        assert self.work.draft_shape
        self._score(*self._lookahead(), Scoring(self.work.draft_shape.num_heads, layers=1))

    def select(self) -> None:
        """Choose from the scores what `sparse` and `gather` read."""
        self._chosen = ops.select_tokens(*self._selection())

    def sparse(self) -> None:
        """Our `sparse_attention` over the chosen tokens."""
        self._sparse(*self._attention())

    def gather(self) -> None:
        """The same through `index_select` and torch's fused attention."""
        self._gather(*self._attention())

    def stream(self) -> None:
        """Read a layer's keys and values and do nothing else."""
        bandwidth.read_stream(self.ring.turn())

    def random(self) -> None:
        """Read as many random rows of them as `sparse` does of the history."""
        bandwidth.read_rows(self.ring.turn(), next(self._random))

    def check(self) -> None:
        """Hold what is timed against the reference: selection whole, the rest in two rows.

        Raises
        ------
        BenchmarkError
            Naming the op that is wrong.
        """
        rows = sorted({0, self.work.batch - 1})
        self._check_scores("history", rows, *self._history(), self.work.target)
        if self.work.draft_shape:
            self._check_scores("lookahead", rows, *self._lookahead(), self.work.draft)
        selection = self._selection()
        expected = _reference("select_tokens")(*selection)
        if not all(map(torch.equal, ops.select_tokens(*selection), expected)):
            raise BenchmarkError(f"select_tokens differs from its reference {self._place()}")

        q, k, v = self._attention()
        pages, lengths = (x[rows] for x in self._where())
        indices, counts = (x[rows] for x in self._chosen)
        whole = _reference("dense_attention")(q[rows], k, v, pages, lengths, self._scale)[0]
        part = _reference("sparse_attention")(
            q[rows], k, v, pages, lengths, indices, counts, self._scale
        )[0]
        by_torch = sdpa(q, k, v, self._mask, self._scale)
        self._compare("dense_attention", self._dense(q, k, v)[rows], whole)
        self._compare("torch SDPA", by_torch[rows], whole)
        self._compare("sparse_attention", self._sparse(q, k, v)[rows], part)
        self._compare("index_select + SDPA", self._gather(q, k, v)[rows], part)

    def _check_scores(
        self, name: str, rows: list[int], query: Tensor, shape: Shape, ring: CacheRing,
        scoring: Scoring,
    ) -> None:  # fmt: skip
        first = ring.position
        found = self._score(query, shape, ring, scoring)
        ring.position = first  # the same keys once more
        expected = self._score(query, shape, ring, scoring, rows)
        self._compare(f"srh_score ({name})", found[rows], expected)

    def _compare(self, name: str, found: Tensor, expected: Tensor) -> None:
        found, expected = found.float(), expected.float()
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE[self.work.dtype]:  # NaN is an error too
            raise BenchmarkError(
                f"{name} differs from the reference by {error:.1%} of the largest value "
                f"{self._place()}: nothing was timed"
            )

    def _place(self) -> str:
        work = self.work
        return f"(shape {work.shape.name}, context {work.context}, batch {work.batch})"

    def _attention(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, w, Hq, D]`, keys and values of the next layer."""
        return self._queries.next(), *self.ring.turn()

    def _where(self) -> tuple[Tensor, Tensor]:
        return self.ring.page_table, self.ring.lengths

    def _dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.dense_attention(q, k, v, *self._where(), self._scale)[0]

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.sparse_attention(q, k, v, *self._where(), *self._chosen, self._scale)[0]

    def _gather(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gather_sdpa(q, k, v, self._short_mask, self._scale, self._chosen[0])

    def _history(self) -> tuple[Tensor, Shape, CacheRing]:
        return self._queries.next()[:, -1:], self.work.shape, self.ring

    def _lookahead(self) -> tuple[Tensor, Shape, CacheRing]:
        assert self.work.draft_shape
        return self._draft_queries.next(), self.work.draft_shape, self.draft_ring

    def _score(
        self, query: Tensor, shape: Shape, ring: CacheRing, scoring: Scoring,
        checked: list[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Scores `[B, N]`; with `checked`, those rows alone and by the reference."""
        op = _reference("srh_score") if checked else ops.srh_score
        rows = slice(None) if checked is None else checked
        heads = shape.spread_heads(scoring.heads)
        lengths = ring.lengths[rows]
        scores = torch.zeros(len(lengths), self.work.context)
        for _ in range(scoring.layers):
            op(
                query[rows][:, :, heads],
                [shape.kv_head(head) for head in heads],
                ring.turn()[0],
                ring.page_table[rows],
                lengths,
                shape.head_dim**-0.5,
                scores,
            )
        return scores

    def _selection(self) -> tuple[Any, ...]:
        work = self.work
        ahead = (self.budget - work.sink - work.window) // 2
        where = (self.ring.lengths, self.budget, ahead, work.sink, work.window)
        return (self.target_scores, self.draft_scores, *where)


class _Queries:
    """Random queries `[B, rows, Hq, D]`, another one at every call."""

    def __init__(self, work: Work, shape: Shape, rows: int, fresh: int) -> None:
        size = (fresh, work.batch, rows, shape.num_heads, shape.head_dim)
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(work.dtype)
        self._turns = itertools.cycle(drawn)

    def next(self) -> Tensor:
        return next(self._turns)


def _reference(name: str) -> Callable[..., Any]:
    """The specification of an op; the attribute of that name in `ops` is the op itself."""
    op: Callable[..., Any] = importlib.import_module(f"dustin_trt.ops.{name}").reference
    return op

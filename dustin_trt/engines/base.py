"""What the decoding loop asks of a backend, and the plain data that passes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from dustin_trt.config import Head, ModelSpec
from dustin_trt.engines.graphs import Graphs
from dustin_trt.kv_cache import PagedKVCache


@dataclass(frozen=True)
class Dense:
    """Read the whole history."""


@dataclass(frozen=True)
class Indices:
    """Read these history tokens, worked out beforehand.

    indices : Tensor `[B, k]` int32, distinct, ascending, padded with -1
    counts : Tensor `[B]` int32
    """

    indices: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Window:
    """Read the first and the last history tokens, `size` in all, `sink` of them the first."""

    size: int
    sink: int


@dataclass(frozen=True)
class Dustin:
    """Score the history and choose from it inside the engine, just before reading.

    history_queries : Tensor `[B, P, D]`, the target's retrieval-head queries of the last cached
        token, or None to leave the history signal out
    lookahead_scores : Tensor `[B, N]` fp32 from the draft, or None to leave that signal out
    budget, lookahead, sink, window : as in `ops.select_tokens`
    join : "split" (top-m of the lookahead, then fill) or "sum" (of the normalised scores)
    lookahead_weight : weight of the lookahead in the sum
    guard : rows whose coverage is below it read their whole history instead; 1 means every row that
        the budget does not hold, None or 0 none. Coverage is known of rows with `history_queries`
        only: without them nothing is guarded.
    """

    history_queries: Tensor | None
    lookahead_scores: Tensor | None
    budget: int
    lookahead: int
    sink: int
    window: int
    join: Literal["split", "sum"] = "split"
    lookahead_weight: float = 0.5
    guard: float | None = None


Selection = Dense | Indices | Window | Dustin


@dataclass(frozen=True)
class Verification:
    """What a verification pass returns.

    logits : Tensor `[B, w, V]` fp32
    srh_queries : Tensor `[B, w, P, D]`, the retrieval heads' queries of the window's tokens
    coverage : Tensor `[B]` fp32, share of the history score that was chosen, of guarded rows too to
        show how hard they were; NaN where the selection did not score the history
    guarded : Tensor `[B]` bool, rows that a guard had read whole in place of what was chosen
    counts : Tensor `[B]` int32, history tokens read
    indices : Tensor `[B, k]` int32, which, -1 in guarded rows; None when all of them
    seconds : time by part: "score", "select", "verify". On a GPU the time to queue it: whoever
        looks at the results waits for them
    """

    logits: Tensor
    srh_queries: Tensor
    coverage: Tensor
    guarded: Tensor
    counts: Tensor
    indices: Tensor | None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prefill:
    """What is known after a prompt is cached.

    logits : Tensor `[V]` fp32, of the prompt's last token
    srh_queries : Tensor `[P, D]`, of the prompt's last token
    reused : prompt tokens that were cached already
    """

    logits: Tensor
    srh_queries: Tensor
    reused: int


class Lookahead(Protocol):
    """A draft's attention to the history over the steps of a roll-out, in the making."""

    def scores(self) -> Tensor:
        """`S_draft`, `[B, N]` fp32 (Dustin, step 1); see `Engine.attention_scores`."""
        ...


class Engine(Protocol):
    """A model, its cache and its retrieval heads, on some backend.

    `slots` is always Tensor `[B]` int64: which sequences of the cache a call works on. Passes run
    through `graphs`, as may whatever calls several of them.
    """

    spec: ModelSpec
    cache: PagedKVCache
    srh_heads: tuple[Head, ...]
    graphs: Graphs

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        chunk: int,
        progress: Callable[[int], None] | None = None,
    ) -> Prefill:
        """Cache a prompt, dense and in chunks, keeping what the slot already holds of it."""
        ...

    def verify(
        self,
        slots: Tensor,
        tokens: Tensor,
        selection: Selection,
        heads: tuple[Head, ...] | None = None,
    ) -> Verification:
        """Run the window `tokens [B, w]` after each row's history; `lengths` do not move.

        `heads` replaces the retrieval heads whose queries are returned.
        """
        ...

    def look_ahead(self, slots: Tensor, rows: Tensor | None = None) -> Lookahead:
        """Begin to collect lookahead scores; `rows [B]`: passes that count, None for all."""
        ...

    def propose_step(
        self,
        slots: Tensor,
        tokens: Tensor,
        offset: int,
        selection: Selection,
        lookahead: Lookahead | None = None,
    ) -> Tensor:
        """Run `tokens [B, w]` at positions `lengths + offset`; for drafts.

        What the last token's retrieval heads ask is added to `lookahead`.

        Returns
        -------
        Tensor `[B, V]` fp32, logits of the last token
        """
        ...

    def attention_scores(
        self,
        slots: Tensor,
        queries: Tensor,
        rows: Tensor | None = None,
        heads: tuple[Head, ...] | None = None,
    ) -> Tensor:
        """Attention mass on every history token, summed over heads and query rows.

        Parameters
        ----------
        queries : Tensor `[B, R, P, D]`
        rows : Tensor `[B]`, how many of the R rows count, at least 1; None for all
        heads : the P heads, where they are not the engine's own

        Returns
        -------
        Tensor `[B, N]` fp32, N the longest history, or the cache's capacity where passes are
        recorded; 0 past a row's own
        """
        ...

    def commit(self, slots: Tensor, counts: Tensor) -> None:
        """Keep the first `counts [B]` tokens of the last window; the rest is forgotten."""
        ...

    def non_finite_place(self, slot: int, tokens: Tensor) -> str:
        """Where in the model a pass over `tokens [w]` after a row's history first goes wrong."""
        ...

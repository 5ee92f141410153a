"""One layer's verification attention, the estimation before it, and torch's dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks import model
from benchmarks.gpu import right
from benchmarks.gpu.baselines import Baseline, baselines, refusal, repeat
from benchmarks.gpu.inputs import Layer, random, random_tokens, sets_for
from benchmarks.gpu.rows import check
from dustin_trt import ops
from dustin_trt.evaluation.bench.shapes import Shape
from dustin_trt.ops.select_tokens import reference as select_reference

if TYPE_CHECKING:
    from benchmarks.gpu.measure import Setting

_MOST_SETS = 32


def measure(setting: Setting) -> None:
    """All ops at every (context, batch) of the plan."""
    for context, batch in setting.plan.layers:
        _Layer(setting, context, batch).measure()
        if setting.device == "cuda":
            torch.cuda.empty_cache()


class _Layer:
    """What is measured at one context and batch.

    Everything is checked against float64 for the first and the last row of the batch, on the first
    set of inputs, before anything is timed. What fails is left out of the timing and said.
    """

    def __init__(self, setting: Setting, context: int, batch: int) -> None:
        self.setting, self.plan = setting, setting.plan
        self.sizes = {"context": context, "batch": batch}
        self.context, self.batch = context, batch
        self.rows = sorted({0, batch - 1})
        self.where = {"device": setting.device, "dtype": setting.dtype}
        self.calls: dict[str, list[Callable[[], object]]] = {}
        self.works: dict[str, model.Work | None] = {}
        self.fields: dict[str, dict[str, object]] = {}

    def measure(self) -> None:
        """Check, then time in turns."""
        plan, shape = self.plan, self.plan.target
        layer = Layer(shape, self.context, self.batch, plan.w, copies=2, **self.where)
        sparse_touched = 2 * self.batch * plan.budget * shape.num_kv_heads * shape.head_dim * 2
        sets = min(_MOST_SETS, sets_for(sparse_touched, self.setting.l2))
        lists = [
            random_tokens(self.context, self.batch, plan.budget, self.setting.device, seed)
            for seed in range(sets)
        ]
        counts = torch.full_like(layer.lengths, plan.budget)
        self._append(layer)
        self._sparse("sparse_attention", layer, lists, counts)
        for w in (plan.w, 1):
            self._dense(layer, w)
        self._score("srh_score, history", shape, layer, model.HISTORY)
        self._score("srh_score, history on one KV head", shape, layer, model.HISTORY, packed=True)
        self._torch(layer)
        paged = Layer(
            shape, self.context, self.batch, plan.w, page_size=plan.page_size, **self.where
        )
        self._sparse(f"sparse_attention, pages of {plan.page_size}", paged, lists, counts)
        draft = Layer(
            plan.draft, self.context, self.batch, plan.w, copies=3, values=False, **self.where
        )
        ahead = model.LOOKAHEAD
        self._score("srh_score, lookahead", plan.draft, draft, ahead)
        self._score("srh_score, lookahead on one KV head", plan.draft, draft, ahead, packed=True)
        self._select()
        self._time()

    def _time(self) -> None:
        rows = self.setting.rows
        seconds, problems = self.setting.clock.time(self.calls, self.plan.rounds)
        for name, problem in problems.items():
            rows.problem(name, problem, expected=name.startswith("torch"), **self.fields[name])
        for name, values in seconds.items():
            rows.timed(name, values, self.works[name], **self.fields[name])

    def _take(
        self,
        name: str,
        calls: list[Callable[[], object]],
        work: model.Work | None,
        **fields: object,
    ) -> None:
        self.calls[name] = calls
        self.works[name] = work
        self.fields[name] = {**self.sizes, **fields}

    def _append(self, layer: Layer) -> None:
        shape, w = self.plan.target, self.plan.w
        new = layer.queries(w, 4, shape.num_kv_heads)
        with self.setting.rows.guarded("kv_append", **self.sizes):
            ops.kv_append(new[0], new[1], *layer.cache(0))
            positions = torch.arange(self.context, self.context + w, device=self.setting.device)
            for b in self.rows:
                stored = right.tokens(layer.k[0], layer.page_table[b], positions)
                check("kv_append", stored, new[0][b].transpose(0, 1).double(), torch.float32)
            work = model.kv_append(
                batch=self.batch, w=w, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
            )
            calls = [
                lambda t=t: ops.kv_append(new[t % 4], new[(t + 1) % 4], *layer.cache(t))
                for t in range(4)
            ]
            self._take("kv_append", calls, work, w=w)

    def _sparse(self, name: str, layer: Layer, lists: list[Tensor], counts: Tensor) -> None:
        shape, w = self.plan.target, self.plan.w
        queries = layer.queries(w, len(lists))
        with self.setting.rows.guarded(name, **self.sizes):

            def call(t: int) -> Tensor:
                cache = layer.cache(t)
                return ops.sparse_attention(queries[t], *cache, lists[t], counts, layer.scale)[0]

            found = call(0)
            new = torch.arange(self.context, self.context + w, device=self.setting.device)
            for b in self.rows:
                read = torch.cat([lists[0][b].long(), new])
                k, v = (right.tokens(x, layer.page_table[b], read) for x in layer.cache(0)[:2])
                expected, _ = right.attention(queries[0][b], k, v, layer.scale, new=w)
                check(name, found[b], expected, self.setting.dtype)
            work = model.sparse_attention(
                batch=self.batch, budget=self.plan.budget, w=w, heads=shape.num_heads,
                kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            )  # fmt: skip
            self._take(name, [lambda t=t: call(t) for t in range(len(lists))], work, w=w)

    def _dense(self, layer: Layer, w: int) -> None:
        name = f"dense_attention, w={w}"
        queries = layer.queries(w, 2)
        with self.setting.rows.guarded(name, **self.sizes):

            def call(t: int) -> Tensor:
                return ops.dense_attention(queries[t], *layer.cache(t), layer.scale)[0]

            found = call(0)
            for b in self.rows:
                expected = self._right_dense(layer, queries[0], b, exact=True)
                check(name, found[b], expected, self.setting.dtype)
            work = model.layer_attention(self.plan.target, self.batch, self.context, w)
            self._take(name, [lambda t=t: call(t) for t in range(2)], work, w=w)

    def _right_dense(self, layer: Layer, q: Tensor, b: int, *, exact: bool) -> Tensor:
        w = q.shape[1]
        read = torch.arange(self.context + (w if exact else 0), device=self.setting.device)
        k, v = (right.tokens(x, layer.page_table[b], read) for x in (layer.k[0], layer.v[0]))
        return right.attention(q[b], k, v, layer.scale, new=w if exact else 0)[0]

    def _torch(self, layer: Layer) -> None:
        """Torch's ways to read the whole cache, on the very tensors of ours."""
        group = self.plan.target.num_heads // self.plan.target.num_kv_heads
        caches = list(zip(layer.k, layer.v, strict=True))
        # One copy: it takes G times the memory, and is larger than any L2 cache.
        repeated = [(repeat(layer.k[0], group), repeat(layer.v[0], group))]
        for w in (self.plan.w, 1):
            queries = layer.queries(w, len(caches))
            for baseline in baselines(
                w=w, context=self.context, group=group, scale=layer.scale,
                device=self.setting.device, dtype=self.setting.dtype,
            ):  # fmt: skip
                held = repeated if baseline.repeats else caches
                self._baseline(layer, baseline, queries, held)

    def _baseline(
        self, layer: Layer, baseline: Baseline, queries: list[Tensor],
        held: list[tuple[Tensor, Tensor]],
    ) -> None:  # fmt: skip
        w = queries[0].shape[1]
        n, name = self.context + w, f"torch dense, w={w}: {baseline.name}"
        try:
            prepared = [
                baseline.prepare(q, k[:, :, :n], v[:, :, :n])
                for q, (k, v) in zip(queries, held, strict=False)
            ]
            found = baseline.restore(baseline.run(*prepared[0]), queries[0])
        except (RuntimeError, ValueError, NotImplementedError) as error:
            self.setting.rows.problem(name, refusal(error), expected=True, w=w, **self.sizes)
            return
        with self.setting.rows.guarded(name, **self.sizes):
            for b in self.rows:
                expected = self._right_dense(layer, queries[0], b, exact=baseline.exact)
                check(name, found[b], expected, self.setting.dtype)
            work = model.layer_attention(self.plan.target, self.batch, self.context, w)
            calls = [lambda p=p: baseline.run(*p) for p in prepared]
            self._take(name, calls, work, w=w, exact=baseline.exact)

    def _score(
        self, name: str, shape: Shape, layer: Layer, estimation: model.Estimation, *,
        packed: bool = False,
    ) -> None:  # fmt: skip
        """All layers that score in a step, one call each, added up in one tensor.

        The heads read as many KV heads as they can, which costs most, or `packed` into one.
        """
        heads = shape.spread_heads(estimation.heads)
        if packed:
            heads = list(range(estimation.heads))
        kv_heads = [shape.kv_head(head) for head in heads]
        queries = layer.queries(estimation.rows, 2, estimation.heads)
        scores = torch.zeros(self.batch, self.context, device=self.setting.device)
        with self.setting.rows.guarded(name, **self.sizes):

            def call(t: int, out: Tensor) -> None:
                k, _, pages, lengths = layer.cache(t)
                ops.srh_score(queries[t % 2], kv_heads, k, pages, lengths, layer.scale, out)

            found = torch.zeros_like(scores)
            call(0, found)
            read = torch.arange(self.context, device=self.setting.device)
            for b in self.rows:
                keys = right.tokens(layer.k[0], layer.page_table[b], read)
                expected = right.scores(queries[0][b], kv_heads, keys, layer.scale)
                # Scores are fp32 whatever the cache holds.
                check(name, found[b], expected, torch.float32)

            def step(turn: int) -> None:
                for i in range(estimation.layers):
                    call(turn + i, scores)

            read_heads = replace(estimation, kv_heads=len(set(kv_heads)))
            work = read_heads.work(shape, self.batch, self.context)
            calls = [lambda t=t: step(t) for t in range(len(layer.k))]
            self._take(name, calls, work, kv_heads=len(set(kv_heads)), layers=estimation.layers)

    def _select(self) -> None:
        plan, name = self.plan, "select_tokens"
        touched = 2 * 4 * self.batch * self.context
        sets = min(64, sets_for(touched, self.setting.l2))
        signals = [
            random((2, self.batch, self.context), self.setting.device, seed=seed).softmax(-1)
            for seed in range(sets)
        ]
        lengths = torch.full(
            (self.batch,), self.context, dtype=torch.int32, device=self.setting.device
        )
        ahead = (plan.budget - plan.sink - plan.window) // 2
        how = (plan.budget, ahead, plan.sink, plan.window)
        with self.setting.rows.guarded(name, **self.sizes):

            def call(t: int) -> tuple[Tensor, Tensor]:
                return ops.select_tokens(signals[t][0], signals[t][1], lengths, *how)

            found = call(0)
            # A selection is exact, so it is compared with the specification itself.
            expected = select_reference(
                signals[0][0].cpu(), signals[0][1].cpu(), lengths.cpu(), *how
            )
            if not all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True)):
                raise ValueError("select_tokens differs from its reference: not timed")
            work = model.select_tokens(batch=self.batch, history=self.context, budget=plan.budget)
            self._take(name, [lambda t=t: call(t) for t in range(sets)], work)

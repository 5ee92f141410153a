"""A chunk of one row's prefill: `dense_attention` against torch's causal attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks import model
from benchmarks.gpu import right
from benchmarks.gpu.baselines import baselines, refusal, repeat
from benchmarks.gpu.inputs import Layer
from benchmarks.gpu.rows import check
from dustin_trt import ops

if TYPE_CHECKING:
    from benchmarks.gpu.measure import Setting

_CHECKED = 4  # queries: float64 logits of a whole chunk would take gigabytes


def measure(setting: Setting) -> None:
    """Every (history, chunk) of the plan."""
    for history, chunk in setting.plan.prefill:
        _measure(setting, history, chunk)


def _measure(setting: Setting, history: int, chunk: int) -> None:
    shape, rows = setting.plan.target, setting.rows
    sizes = {"context": history, "batch": 1, "w": chunk}
    layer = Layer(
        shape, history, 1, chunk, copies=2, device=setting.device, dtype=setting.dtype
    )  # fmt: skip
    queries = layer.queries(chunk, 2)
    work = model.layer_attention(shape, 1, history, chunk)
    # The last query sees the most; `right.attention` takes the rows' places from the end.
    tail = slice(chunk - min(_CHECKED, chunk), chunk)
    expected, _ = right.attention(
        queries[0][0, tail], layer.k[0][0], layer.v[0][0], layer.scale, new=chunk
    )
    calls, exact = {}, {}
    with rows.guarded("dense_attention, prefill", **sizes):

        def ours(t: int) -> Tensor:
            return ops.dense_attention(queries[t], *layer.cache(t), layer.scale)[0]

        check("dense_attention", ours(0)[0, tail], expected, setting.dtype)
        calls["dense_attention, prefill"] = [lambda t=t: ours(t) for t in range(2)]
    group = shape.num_heads // shape.num_kv_heads
    for baseline in baselines(
        w=chunk, context=history, group=group, scale=layer.scale, device=setting.device,
        dtype=setting.dtype,
    ):  # fmt: skip
        name = f"torch dense, prefill: {baseline.name}"
        held = [
            [repeat(x, group) for x in pair] if baseline.repeats else pair
            for pair in zip(layer.k, layer.v, strict=True)
        ]
        try:
            prepared = [baseline.prepare(q, *pair) for q, pair in zip(queries, held, strict=True)]
            found = baseline.restore(baseline.run(*prepared[0]), queries[0])
        except (RuntimeError, ValueError, NotImplementedError) as error:
            rows.problem(name, refusal(error), expected=True, **sizes)
            continue
        with rows.guarded(name, **sizes):
            check(name, found[0, tail], expected, setting.dtype)
            calls[name] = [lambda p=p, run=baseline.run: run(*p) for p in prepared]
            exact[name] = baseline.exact
    seconds, problems = setting.clock.time(calls, setting.plan.rounds)
    for name, problem in problems.items():
        rows.problem(name, problem, expected=name.startswith("torch"), **sizes)
    for name, values in seconds.items():
        rows.timed(name, values, work, exact=exact.get(name, True), **sizes)
    if setting.device == "cuda":
        torch.cuda.empty_cache()

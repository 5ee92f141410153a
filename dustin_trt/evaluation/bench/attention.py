"""`bench attention`: one layer's verification attention, full cache against Dustin.

Figure 7 of the paper (arXiv 2606.24957), with every part of Dustin's time and with the memory's
bandwidth beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from dustin_trt.evaluation import machine
from dustin_trt.evaluation.bench import bandwidth
from dustin_trt.evaluation.bench.layer import (
    HISTORY,
    LOOKAHEAD,
    TOLERANCE,
    Layer,
    Scoring,
    Work,
    check_budget,
)
from dustin_trt.evaluation.bench.report import Report
from dustin_trt.evaluation.bench.shapes import SHAPES
from dustin_trt.evaluation.bench.timing import Spread, take_turns
from dustin_trt.evaluation.side_by_side import progress_bar
from dustin_trt.ops import native

FULL = ("sdpa", "dense")
"""Ways to read the whole cache; the faster one is the baseline."""
_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class LayerSettings:
    """What `bench attention` and `bench overhead` measure.

    shapes : names of `SHAPES`
    contexts, batches, budgets : every combination is measured; `bench overhead` takes one budget
    gamma : draft tokens; w = gamma + 1 tokens are verified
    dtype : "float32", "bfloat16" or "float16"
    target, draft : heads that score
    draft_shape : shape of the draft whose lookahead is scored; None leaves it out
    rounds : timed calls of each variant
    """

    shapes: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    budgets: tuple[int, ...] = (512,)
    gamma: int = 4
    dtype: str = "bfloat16"
    target: Scoring = HISTORY
    draft: Scoring = LOOKAHEAD
    draft_shape: str | None = None
    rounds: int = 15

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {"models": list(self.shapes), **asdict(self)}


def run_attention(settings: LayerSettings, console: Console) -> Report:
    """Measure every combination of shape, context, batch and budget.

    Raises
    ------
    BenchmarkError
        When an op gives a wrong result.
    ValueError, MemoryError
        Settings that mean nothing, or that this machine has no memory for.
    """
    planned = plan(settings, console)
    rows = []
    budgets = settings.budgets
    turns = len(planned) * len(budgets) * (settings.rounds + 1)
    with progress_bar(console, "rounds") as progress:
        task = progress.add_task("attention", total=turns)
        for work in planned:
            name = f"{work.shape.name}, {work.context} tokens × {work.batch}"
            progress.update(task, description=f"{name}: filling caches and checking")
            for row in measure(work, settings, lambda: progress.advance(task)):
                progress.update(task, description=name)
                rows.append(row)
    return Report("attention", settings.describe(), rows, _notes(settings))


def plan(settings: LayerSettings, console: Console) -> list[Work]:
    """The combinations this machine has memory for; what is left out is said on the console."""
    draft = SHAPES[settings.draft_shape] if settings.draft_shape else None
    available = machine.available_memory()
    works, refused = [], ""
    for name in settings.shapes:
        for context in settings.contexts:
            for batch in settings.batches:
                work = Work(
                    SHAPES[name], context, batch, settings.gamma, getattr(torch, settings.dtype),
                    settings.target, settings.draft, draft,
                )  # fmt: skip
                _check(work, settings.budgets)
                if work.nbytes <= _MEMORY_SHARE * available:
                    works.append(work)
                    continue
                refused = (
                    f"{name} with --context {context} --batch {batch} needs caches of "
                    f"{work.nbytes / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free"
                )
                console.print(f"left out: {refused}", soft_wrap=True)
    if not works:
        raise MemoryError(f"nothing is left to run: {refused}; lower one of them")
    return works


def _check(work: Work, budgets: tuple[int, ...]) -> None:
    for budget in budgets:
        check_budget(budget, work.context, work.sink + work.window)
    if work.target.heads > work.shape.num_heads or work.target.layers > work.shape.num_layers:
        raise ValueError(
            f"--heads {work.target.heads} or --layers {work.target.layers} is more than "
            f"{work.shape.name} has: {work.shape.num_heads} heads, {work.shape.num_layers} layers"
        )
    if work.draft_shape and work.draft.heads > work.draft_shape.num_heads:
        raise ValueError(
            f"--draft-heads {work.draft.heads} is more than the {work.draft_shape.num_heads} heads "
            f"of {work.draft_shape.name}"
        )


def measure(
    work: Work, settings: LayerSettings, after_round: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Allocate the caches of one combination, check, time; a row a budget."""
    with torch.inference_mode():
        layer = Layer(work)
        for budget in settings.budgets:
            layer.use_budget(budget)
            layer.check()
            dustin = {"history": layer.history}
            if work.draft_shape:
                dustin["lookahead"] = layer.lookahead
            dustin |= {"select": layer.select, "sparse": layer.sparse}
            seconds = take_turns(
                [
                    {"sdpa": layer.sdpa, "dense": layer.dense},
                    dustin,
                    {"gather": layer.gather},
                    {"stream": layer.stream, "random": layer.random},
                ],
                settings.rounds,
                after_round=after_round,
            )
            yield _row(work, budget, seconds)


def _row(work: Work, budget: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    layers = work.shape.num_layers
    zeros = [0.0] * len(seconds["sparse"])
    estimation = [
        (history + lookahead) / layers
        for history, lookahead in zip(
            seconds["history"], seconds.get("lookahead", zeros), strict=True
        )
    ]
    selection = [second / layers for second in seconds["select"]]
    dustin = list(map(sum, zip(estimation, selection, seconds["sparse"], strict=True)))
    baseline = min(FULL, key=lambda name: Spread.of(seconds[name]).median)
    ratio = Spread.of(_ratios(seconds[baseline], dustin))
    over_gather = Spread.of(_ratios(seconds["gather"], seconds["sparse"]))
    timed = {
        **seconds, "estimation_per_layer": estimation, "selection_per_layer": selection,
        "dustin": dustin,
    }  # fmt: skip
    spreads = {name: Spread.of([1000 * value for value in timed[name]]) for name in timed}
    rate = {
        name: size / Spread.of(seconds[name]).median
        for name, size in _bytes(work, budget).items()
        if name in seconds
    }
    roofs = {"sparse": "random", "gather": "random"}
    return {
        "shape": work.shape.name,
        "context": work.context,
        "batch": work.batch,
        "budget": budget,
        "speedup": ratio.median,
        "speedup_quartiles": [ratio.q1, ratio.q3],
        "speedup_bound": work.context / budget,
        "baseline": baseline,
        "median_ms": {name: spread.median for name, spread in spreads.items()},
        "quartiles_ms": {name: [spread.q1, spread.q3] for name, spread in spreads.items()},
        "gb_per_s": {name: value / 1e9 for name, value in rate.items()},
        "share_of_roofline": {
            name: value / rate[roofs.get(name, "stream")]
            for name, value in rate.items()
            if name not in ("stream", "random")
        },
        "sparse_over_gather": over_gather.median,
        "sparse_over_gather_quartiles": [over_gather.q1, over_gather.q3],
    }


def _ratios(slow: list[float], fast: list[float]) -> list[float]:
    """Round by round, so that what slowed a whole round cancels."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def _bytes(work: Work, budget: int) -> dict[str, float]:
    """What each call must read."""
    full, part = work.read_bytes(work.context), work.read_bytes(budget)
    window = work.read_bytes(0)
    sizes: dict[str, float] = {
        "sdpa": full, "dense": full, "sparse": part, "gather": part, "stream": full,
        "random": part - window,
        "history": work.scored_bytes(work.shape, work.target),
    }  # fmt: skip
    if work.draft_shape:
        sizes["lookahead"] = work.scored_bytes(work.draft_shape, work.draft)
    return sizes


def _notes(settings: LayerSettings) -> list[str]:
    w, target, draft = settings.gamma + 1, settings.target, settings.draft
    ahead = (
        f"; lookahead by {draft.heads} heads in each of {draft.layers} layers of "
        f"{settings.draft_shape}, {settings.gamma} queries each"
        if settings.draft_shape
        else "; no lookahead (--draft-shape adds it)"
    )
    return [
        f"Attention of {w} new tokens (gamma {settings.gamma}) of one layer. Speedup: the faster "
        "of torch SDPA (query heads of a KV head folded into rows, contiguous cache) and our dense "
        "kernel, over Dustin: sparse attention, and estimation and selection divided by the "
        "model's layers, since a step does them once. Medians over "
        f"{settings.rounds} rounds in which the variants take turns.",
        f"Estimation: history by {target.heads} query heads in each of {target.layers} target "
        f"layers, spread over as many KV heads as possible (the most expensive case){ahead}.",
        f"Roofline: {bandwidth.reader()}; a stream over a layer for estimation and dense "
        "attention, random rows of one head of one token for sparse attention.",
        *common_notes(settings),
    ]


def common_notes(settings: LayerSettings) -> list[str]:
    """What holds for every benchmark on random caches."""
    without = (
        [f"Our kernels are not in use ({problem}): torch's ops are timed in their place."]
        if (problem := native.problem())
        else []
    )
    return [
        *without,
        "Keys, values and queries are normal random numbers: the scores are nearly flat and the "
        "chosen tokens lie scattered, the hardest case for reading them. Every call uses the next "
        f"layer of a ring of caches four times the {machine.last_level_cache() / 2**20:.0f} MiB "
        "last-level cache together, with other queries, so that nothing is warm.",
        "Checked before timing against the references: selection exactly, the rest to "
        f"{TOLERANCE[getattr(torch, settings.dtype)]:.1%} of the largest value, first and last row "
        "of the batch.",
    ]

"""`bench overhead`: what it costs to estimate which tokens matter, against full attention.

Figure 8 of the paper (arXiv 2606.24957).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from dustin_trt.evaluation.bench.attention import FULL, LayerSettings, common_notes, plan
from dustin_trt.evaluation.bench.layer import Layer, Work
from dustin_trt.evaluation.bench.report import Report
from dustin_trt.evaluation.bench.shapes import SHAPES
from dustin_trt.evaluation.bench.timing import Spread, take_turns
from dustin_trt.evaluation.side_by_side import progress_bar

ESTIMATIONS = {
    "all": "every head of both models",
    "history": "history only",
    "lookahead": "lookahead only",
    "hybrid": "hybrid",
}


def run_overhead(settings: LayerSettings, console: Console) -> Report:
    """Measure every combination of shape, context and batch.

    Raises
    ------
    BenchmarkError, ValueError, MemoryError
        As `run_attention`.
    """
    planned = plan(settings, console)
    rows = []
    with progress_bar(console, "rounds") as progress:
        task = progress.add_task("overhead", total=len(planned) * (settings.rounds + 1))
        for work in planned:
            name = f"{work.shape.name}, {work.context} tokens × {work.batch}"
            progress.update(task, description=f"{name}: filling caches and checking")
            rows.append(_measure(work, settings, lambda: progress.advance(task)))
            progress.update(task, description=name)
    return Report("overhead", settings.describe(), rows, _notes(settings))


def _measure(
    work: Work, settings: LayerSettings, after_round: Callable[[], None]
) -> dict[str, Any]:
    with torch.inference_mode():
        layer = Layer(work)
        layer.use_budget(settings.budgets[0])
        layer.check()
        seconds = take_turns(
            [
                {"sdpa": layer.sdpa, "dense": layer.dense},
                {"history": layer.history, "lookahead": layer.lookahead, "select": layer.select},
                {
                    "target_layer_by_all": layer.history_by_all_heads,
                    "draft_layer_by_all": layer.lookahead_by_all_heads,
                },
            ],
            settings.rounds,
            after_round=after_round,
        )
    return _row(work, settings.budgets[0], seconds)


def _row(work: Work, budget: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    assert work.draft_shape
    layers, draft_layers = work.shape.num_layers, work.draft_shape.num_layers
    baseline = min(FULL, key=lambda name: Spread.of(seconds[name]).median)
    columns = zip(
        seconds[baseline], seconds["history"], seconds["lookahead"], seconds["select"],
        seconds["target_layer_by_all"], seconds["draft_layer_by_all"], strict=True,
    )  # fmt: skip
    step: dict[str, list[float]] = {name: [] for name in ("full", *ESTIMATIONS, "select")}
    for full, history, lookahead, select, of_target, of_draft in columns:
        step["full"].append(layers * full)
        step["all"].append(layers * of_target + draft_layers * of_draft)
        step["history"].append(history)
        step["lookahead"].append(lookahead)
        step["hybrid"].append(history + lookahead)
        step["select"].append(select)
    shares = {
        name: Spread.of([a / b for a, b in zip(step[name], step["full"], strict=True)])
        for name in (*ESTIMATIONS, "select")
    }
    spreads = {name: Spread.of([1000 * s for s in values]) for name, values in step.items()}
    cheaper = Spread.of([a / b for a, b in zip(step["full"], step["hybrid"], strict=True)])
    return {
        "shape": work.shape.name,
        "draft_shape": work.draft_shape.name,
        "context": work.context,
        "batch": work.batch,
        "budget": budget,
        "speedup": cheaper.median,
        "speedup_quartiles": [cheaper.q1, cheaper.q3],
        "baseline": baseline,
        "share": {name: spread.median for name, spread in shares.items()},
        "share_quartiles": {name: [spread.q1, spread.q3] for name, spread in shares.items()},
        "median_ms": {name: spread.median for name, spread in spreads.items()},
        "quartiles_ms": {name: [spread.q1, spread.q3] for name, spread in spreads.items()},
    }


def _notes(settings: LayerSettings) -> list[str]:
    target, draft = settings.target, settings.draft
    shape = SHAPES[settings.draft_shape or ""]
    return [
        "Share: time to score the history in one step over the time of full verification "
        f"attention of {settings.gamma + 1} tokens in all layers, by the faster of torch SDPA and "
        "our dense kernel. One layer of each is timed and multiplied by the model's layers. "
        "Speedup in the JSON: full attention over hybrid estimation. Medians over "
        f"{settings.rounds} rounds in which the variants take turns.",
        f"History: {target.heads} query heads in each of {target.layers} target layers, one query. "
        f"Lookahead: {draft.heads} heads in each of {draft.layers} layers of {shape.name}, "
        f"{settings.gamma} queries. Hybrid: both. All heads: every head of every layer of both. "
        "The heads lie in as many KV heads as possible, the most expensive case.",
        *common_notes(settings),
    ]

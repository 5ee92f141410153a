"""What a calibration writes: `dustin.json`, `results.json` and the report."""

from __future__ import annotations

import platform
import resource
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import optuna
import torch
import transformers

from dustin_trt import __version__
from dustin_trt.calibration.check import CHOSEN
from dustin_trt.calibration.cost import CostModel
from dustin_trt.calibration.pair import Pair
from dustin_trt.calibration.recipe import Recipe
from dustin_trt.calibration.report import write_report
from dustin_trt.calibration.search import Step
from dustin_trt.calibration.tune import Trial, pareto_front
from dustin_trt.calibration.value import Choice, Value
from dustin_trt.calibration.work import write_json
from dustin_trt.config import DustinConfig
from dustin_trt.evaluation import machine


def configuration(
    recipe: Recipe,
    choice: Choice,
    checked: dict[str, Any],
    threshold: float | None,
    pair: Pair,
    weights: dict[str, dict[str, str]],
) -> DustinConfig:
    """`dustin.json`; nothing in it depends on the clock."""
    split = choice.join == "split"
    target, draft = pair.specs
    place = recipe.check.budgets.index(recipe.budget)
    rates = [curves[CHOSEN][place] for curves in checked["arr"].values()]
    return DustinConfig.make(
        target_heads=tuple(sorted(choice.target_heads)),
        draft_heads=tuple(sorted(choice.draft_heads)),
        budget=recipe.budget,
        sink=choice.sink,
        window=choice.window,
        gamma=choice.gamma,
        join=choice.join,
        lookahead=choice.lookahead_tokens(recipe.budget) if split else None,
        lookahead_weight=0.5 if split else choice.share,
        draft_window=recipe.draft_window,
        guard=threshold,
        arr=round(sum(rates) / len(rates), 4),
        target=asdict(target),
        draft=asdict(draft),
        tokenizer=pair.tokenizer_fingerprint,
        target_weights=weights["target"] or None,
        draft_weights=weights["draft"] or None,
        provenance={"recipe": _without_folders(recipe), "versions": versions()},
    )


def write_results(
    output: Path,
    recipe: Recipe,
    config: DustinConfig,
    cost: CostModel,
    seconds: dict[str, float],
    names: tuple[str, str],
    results: dict[str, Any],
) -> None:
    """Write all three, `dustin.json` last."""
    target, draft = cost.target, cost.draft
    scored = cost.scoring_bytes(config.target_heads, config.draft_heads)
    fields = ("target_heads", "draft_heads", "join", "lookahead_weight", "sink", "window", "gamma",
              "budget", "guard", "draft_window")  # fmt: skip
    whole = {
        "name": recipe.name,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine.describe(),
        "versions": versions(),
        "recipe": _without_folders(recipe),
        "seconds": seconds,
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "pair": {
            "target": names[0], "draft": names[1],
            "target_shape": asdict(target), "draft_shape": asdict(draft),
        },
        "chosen": {
            **config.model_dump(mode="json", include=set(fields)),
            "lookahead": config.lookahead_tokens,
            "target_kv_heads": target.num_kv_heads_of(config.target_heads),
            "draft_kv_heads": draft.num_kv_heads_of(config.draft_heads),
            "all_target_kv_heads": target.num_layers * target.num_kv_heads,
            "all_draft_kv_heads": draft.num_layers * draft.num_kv_heads,
            "bytes_share": scored / cost.full_attention_bytes(),
        },
        **results,
    }  # fmt: skip
    whole = _rounded(whole)
    write_json(output / "results.json", whole)
    write_report(whole, output)
    config.save(output / "dustin.json")


def greedy_path(steps: Sequence[Step], cost: CostModel) -> list[dict[str, Any]]:
    """The heads' search as rows: what was added, and what the whole was worth then."""
    rows = []
    for step in steps:
        target, draft = step.choice.target_heads, step.choice.draft_heads
        rows.append(
            {
                "role": step.role, "layer": step.layer, "kv_head": step.kv_head,
                "heads": list(step.heads),
                "kv_heads_read": cost.target.num_kv_heads_of(target)
                + cost.draft.num_kv_heads_of(draft),
                "bytes": cost.scoring_bytes(target, draft),
                **_value(step.value),
                "choice": asdict(step.choice),
            }
        )  # fmt: skip
    return rows


def trials_tried(trials: list[Trial], picked: Trial) -> list[dict[str, Any]]:
    """Optuna's trials as rows."""
    front = pareto_front(trials)
    return [
        {
            "number": trial.number,
            **_numbers(trial.choice),
            **_value(trial.value),
            "fidelity": trial.fidelity,
            "speed": trial.speed,
            "on_front": trial.number in front,
            "chosen": trial is picked,
        }
        for trial in trials
    ]


def joins_tried(settled: list[tuple[Choice, Value]]) -> list[dict[str, Any]]:
    """Both joins at every share, as rows."""
    return [{**_numbers(choice), **_value(value)} for choice, value in settled]


def versions() -> dict[str, str]:
    """What the results may depend on."""
    return {
        "dustin_trt": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "optuna": optuna.__version__,
    }


def _numbers(choice: Choice) -> dict[str, Any]:
    fields = ("join", "share", "sink", "window", "gamma")
    return {name: getattr(choice, name) for name in fields}


def _value(value: Value) -> dict[str, float]:
    return {
        "arr": value.arr, "oracle": value.oracle, "recall": value.recall, "value": value.total,
    }  # fmt: skip


def _without_folders(recipe: Recipe) -> dict[str, Any]:
    """The recipe as it is published: names of files and models, not where they lie here."""

    def bare(value: Any) -> Any:
        if isinstance(value, str) and "/" in value:
            return Path(value).name
        if isinstance(value, dict):
            return {name: bare(inner) for name, inner in value.items()}
        return [bare(inner) for inner in value] if isinstance(value, list) else value

    fields: dict[str, Any] = bare(recipe.model_dump(mode="json", exclude={"limits"}))
    return fields


def _rounded(values: Any) -> Any:
    """Floats to six digits, all the way down."""
    if isinstance(values, float):
        return round(values, 6)
    if isinstance(values, dict):
        return {name: _rounded(value) for name, value in values.items()}
    return [_rounded(value) for value in values] if isinstance(values, list | tuple) else values

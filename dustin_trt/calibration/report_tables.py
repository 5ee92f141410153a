"""The tables of the report: the chosen configuration, and how it was made."""

from __future__ import annotations

from typing import Any

from dustin_trt.calibration.report_results import Results, find
from dustin_trt.calibration.report_words import NOT_MEASURED, count

Table = list[tuple[str, str]]


def configuration(results: Results) -> Table:
    """The chosen configuration, as `dustin.json` has it."""
    chosen = results.get("chosen") or {}
    join = chosen.get("join")
    known = {
        "budget": _tokens(chosen.get("budget")),
        "sink, window": f"{count(chosen.get('sink'))} first and "
        f"{count(chosen.get('window'))} last tokens always read",
        "join": {
            "sum": f"sum: the lookahead weighs {chosen.get('lookahead_weight')}",
            "split": f"split: {count(chosen.get('lookahead'))} tokens by lookahead, the rest by "
            "history",
        }.get(str(join), NOT_MEASURED),
        "gamma": f"{count(chosen.get('gamma'))} draft tokens a step",
        "guard": _guard_in_words(chosen.get("guard")),
        "draft cache": f"sink and the last {chosen['draft_window']:,} tokens"
        if chosen.get("draft_window")
        else "the whole history",
        "target heads": _heads_in_words(chosen.get("target_heads")),
        "draft heads": _heads_in_words(chosen.get("draft_heads")),
    }
    return list(known.items()) if chosen else []


def shapes(results: Results) -> Table:
    """Target and draft, with their shapes in words."""
    table = []
    for role in ("target", "draft"):
        name, shape = (find(results, "pair", key) for key in (role, f"{role}_shape"))
        words = (
            f" ({shape['num_layers']} layers, {shape['num_heads']} query and "
            f"{shape['num_kv_heads']} KV heads of {shape['head_dim']})"
            if shape
            else ""
        )
        table.append((role, f"{name or NOT_MEASURED}{words}"))
    return table


def flat(section: Any, prefix: str = "") -> Table:
    """A nested section as rows; long values are cut, as `results.json` has all of them."""
    if isinstance(section, dict):
        return [
            row
            for key, value in section.items()
            for row in flat(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(section, list) and any(isinstance(value, dict) for value in section):
        return [row for i, value in enumerate(section) for row in flat(value, f"{prefix}[{i}]")]
    text = ", ".join(map(str, section)) if isinstance(section, list) else str(section)
    return [(prefix, text if len(text) <= 300 else f"{text[:300]}…")]


def seconds(results: Results) -> Table:
    """Seconds a step of the calibration, and in all."""
    taken = results.get("seconds") or {}
    rows = [(step, f"{value:,.1f} s") for step, value in taken.items()]
    total = sum(taken.values())
    return [*rows, ("in all", f"{total:,.1f} s ({total / 60:.1f} min)")] if rows else []


def _tokens(value: int | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,} tokens a verification pass"


def _guard_in_words(threshold: float | None) -> str:
    if threshold is None:
        return "none"
    return f"a step of a coverage below {threshold:.3g} is verified densely"


def _heads_in_words(heads: list[list[int]] | None) -> str:
    """Like "layer 3: 0, 1, 2; layer 12: 6"."""
    if heads is None:
        return NOT_MEASURED
    layers: dict[int, list[int]] = {}
    for layer, head in sorted(map(tuple, heads)):
        layers.setdefault(layer, []).append(head)
    words = (f"layer {layer}: {', '.join(map(str, of))}" for layer, of in layers.items())
    return "; ".join(words) or "none"

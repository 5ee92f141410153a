"""Figures of the search: head scores, the greedy path, Optuna's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dustin_trt.calibration.figures_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    VERMILION,
    legend_below,
    look,
    panels,
    percents,
    plain_log_numbers,
)
from dustin_trt.calibration.report_results import Results, find, pareto_front, shares_at_budget

_STAR = {"marker": "*", "ms": 17, "color": BLUE, "mec": "white", "mew": 0.8, "ls": "", "zorder": 5}


def head_scores(results: Results) -> Any:
    """Semantic-retrieval-head score of every head, the chosen ones outlined; the paper's Fig. 6."""
    maps = {role: find(results, "head_scores", role) for role in ("target", "draft")}
    maps = {role: scores for role, scores in maps.items() if scores}
    if not maps:
        return None
    layers = max(len(scores) for scores in maps.values())
    heads = [len(scores[0]) for scores in maps.values()]
    widths = [max(count, max(heads) / 3) for count in heads]  # room for a title
    figure, axes = panels(1, len(maps), min(9.0, 2.2 + 0.17 * layers), width_ratios=widths)
    highest = max(score for scores in maps.values() for layer in scores for score in layer)
    image = None
    for panel, (role, scores) in zip(axes[0], maps.items(), strict=True):
        image = panel.imshow(scores, cmap="Greys", vmin=0, vmax=highest, aspect="auto")
        chosen = find(results, "chosen", f"{role}_heads") or []
        _outline(panel, chosen)
        shape = find(results, "pair", f"{role}_shape") or {}
        # Query heads of a group share one pass over the keys: they cost together.
        if (group := shape.get("num_heads", 0) // (shape.get("num_kv_heads") or 1)) > 1:
            for edge in range(group, shape["num_heads"], group):
                panel.axvline(edge - 0.5, color="#b9cfe0", lw=1)
        panel.set_title(f"{role}: {len(chosen)} of {sum(map(len, scores))} heads chosen")
        panel.set(xlabel="query head", ylabel="layer")
        panel.grid(visible=False)
        panel.spines[:].set_visible(True)
        _whole_numbers(panel.xaxis, panel.yaxis)
    bar = figure.colorbar(image, ax=list(axes[0]), pad=0.02, aspect=30)
    bar.set_label("head score: attention mass on the answer")
    bar.outline.set_visible(False)
    return figure


def _outline(panel: Any, heads: Sequence[Sequence[int]]) -> None:
    from matplotlib.patches import Rectangle

    for layer, head in heads:
        panel.add_patch(
            Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, ec=VERMILION, lw=1.8, zorder=3)
        )


def cost_against_arr(results: Results) -> Any:
    """The greedy path: KV heads read against ARR and recall, with the chosen and all heads."""
    path = find(results, "greedy")
    if not path:
        return None
    costs = [step["kv_heads_read"] for step in path]
    shares = [100 * step["arr"] / step["oracle"] for step in path]
    figure, axes = panels(1, 2, 4.5)
    left, right = axes[0]
    _path(left, path, costs, shares)
    front = pareto_front(costs, shares)
    left.step(
        [costs[place] for place in front], [shares[place] for place in front], where="post",
        color=BLACK, lw=1.2, label="Pareto front of the path", zorder=2,
    )  # fmt: skip
    chosen = results.get("chosen") or {}
    for policy, prefix in (("chosen", ""), ("all heads", "all_")):
        read: list[Any] = [chosen.get(f"{prefix}{role}_kv_heads") for role in ("target", "draft")]
        kept = shares_at_budget(results, policy)
        if kept is None or None in read:
            continue
        style = _STAR if policy == "chosen" else {**look(policy), "ls": "", "ms": 9, "mew": 1.8}
        left.plot(
            sum(read), 100 * sum(kept) / len(kept),
            **{**style, "label": f"{policy}, in the check"},
        )  # fmt: skip
    left.set(xscale="log", xlabel="KV heads scored (log)", ylabel="windowed ARR, % of the oracle’s")
    plain_log_numbers(left.xaxis)
    _path(right, path, costs, percents(step["recall"] for step in path))
    right.set(xlabel="KV heads scored", ylabel="recall of the answer’s tokens, %")
    _whole_numbers(right.xaxis)
    left.set_title("Attention kept")
    right.set_title("Answers kept")
    legend_below(figure, left, columns=5)
    return figure


def _path(panel: Any, path: list[dict[str, Any]], costs: list[int], values: list[float]) -> None:
    panel.plot(costs, values, color="#bbbbbb", lw=1, zorder=1)
    for role, color, marker in (("target", VERMILION, "s"), ("draft", GREEN, "^")):
        added = [place for place, step in enumerate(path) if step["role"] == role]
        if added:
            panel.plot(
                [costs[place] for place in added], [values[place] for place in added],
                ls="", marker=marker, color=color, label=f"{role} KV head added", zorder=3,
            )  # fmt: skip


def trials(results: Results) -> Any:
    """Optuna's history: both objectives by trial, and against each other."""
    tried = [
        trial
        for trial in find(results, "trials") or ()
        if None not in (trial.get("fidelity"), trial.get("speed"))
    ]
    if not tried:
        return None
    figure, axes = panels(2, 2, 5.4, width_ratios=(1.25, 1))
    for panel in axes[:, 1]:
        panel.remove()
    trade = figure.add_subplot(axes[0, 0].get_gridspec()[:, 1])
    fidelity, speed = axes[:, 0]
    _trials(fidelity, tried, "number", "fidelity")
    _trials(speed, tried, "number", "speed")
    _trials(trade, tried, "speed", "fidelity", joined=True)
    speed_label = "speed, × plain decoding (predicted)"
    fidelity.set(ylabel="fidelity", title="Trials in order")
    fidelity.tick_params(labelbottom=False)
    speed.set(ylabel="speed, × plain", xlabel="trial")
    trade.set(xlabel=speed_label, ylabel="fidelity", title="The trade")
    speed.axhline(1, color=GREY, lw=1, ls=":")
    _whole_numbers(fidelity.xaxis, speed.xaxis)
    legend_below(figure, trade)
    return figure


def _trials(
    panel: Any, tried: list[dict[str, Any]], x: str, y: str, *, joined: bool = False
) -> None:
    chosen = [trial for trial in tried if trial.get("chosen")]
    front = sorted((trial for trial in tried if trial.get("on_front")), key=lambda trial: trial[x])
    rest = [trial for trial in tried if trial not in front and trial not in chosen]
    for group, style in (
        (rest, {"ls": "", "marker": "o", "color": "#b5b5b5", "ms": 4.5, "label": "trial"}),
        (
            front,
            {
                "ls": "-" if joined else "", "lw": 1, "marker": "D", "color": BLACK, "ms": 5,
                "label": "on the Pareto front",
            },
        ),
        (chosen, {**_STAR, "label": "chosen"}),
    ):  # fmt: skip
        if group:
            panel.plot([trial[x] for trial in group], [trial[y] for trial in group], **style)


def _whole_numbers(*axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))

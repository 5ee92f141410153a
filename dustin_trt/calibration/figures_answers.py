"""Figures of what decoding makes of it: pass keys, the guard, accepted drafts."""

from __future__ import annotations

from typing import Any

from dustin_trt.calibration.figures_style import (
    BLACK,
    BLUE,
    GREY,
    bar_look,
    legend_below,
    ordered,
    panels,
    percents,
    plain_log_numbers,
)
from dustin_trt.calibration.report_results import (
    Results,
    best_guard,
    find,
    guard_curve,
    guard_point,
    guard_threshold,
)
from dustin_trt.calibration.report_words import percent

_LEAST_KL = 1e-5  # what a logarithmic axis shows for 0


def pass_keys(results: Results) -> Any:
    """Pass keys found by policy and budget, beside full verification's."""
    found, count = (find(results, "check", "pass_keys", key) for key in ("found", "count"))
    found = {policy: keys for policy, keys in (found or {}).items() if keys}
    if not found or not count:
        return None
    policies = ordered(found)
    budgets = sorted({int(budget) for policy in policies for budget in found[policy]})
    figure, axes = panels(1, 1, 4.0)
    panel, width = axes[0, 0], 0.84 / len(policies)
    for place, policy in enumerate(policies):
        shown = [(i, found[policy].get(str(budget))) for i, budget in enumerate(budgets)]
        shown = [(i, keys) for i, keys in shown if keys is not None]
        places = [i + (place - (len(policies) - 1) / 2) * width for i, _ in shown]
        bars = panel.bar(
            places, [keys for _, keys in shown], width=0.86 * width, **bar_look(policy)
        )
        # The line of full verification may run through a number.
        on_white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        panel.bar_label(bars, padding=3, fontsize=9, bbox=on_white)
    full = find(results, "check", "pass_keys", "full")
    if full is not None:
        panel.axhline(full, color=BLACK, lw=1.4, label=f"full verification: {full}", zorder=1)
    panel.set(
        xticks=range(len(budgets)), xticklabels=[f"budget {budget:,}" for budget in budgets],
        ylim=(0, 1.12 * count), ylabel=f"pass keys found, of {count}",
    )  # fmt: skip
    panel.set_yticks(sorted({0, count // 4, count // 2, 3 * count // 4, count}))
    panel.grid(axis="x", visible=False)
    legend_below(figure, panel)
    return figure


def guard(results: Results) -> Any:
    """What dense verification of the windows of low coverage costs and saves."""
    coverage, kl = (find(results, "check", "guard", key) for key in ("coverage", "kl"))
    if not coverage or not kl:
        return None
    figure, axes = panels(1, 2, 4.4, width_ratios=(1.3, 1))
    trade, cause = axes[0]
    curve, threshold = guard_curve(coverage, kl), guard_threshold(results)
    trade.plot(
        percents(point.dense for point in curve), [point.kl for point in curve],
        color=BLUE, label="guard by coverage",
    )  # fmt: skip
    unguarded = curve[0].kl
    trade.plot((0, 100), (unguarded, 0), color=GREY, ls="--", lw=1.2, label="windows at random")
    best = best_guard(kl)
    trade.plot(
        percents(dense for dense, _ in best), [left for _, left in best],
        color=BLACK, ls=":", lw=1.2, label="a guard that knows KL",
    )  # fmt: skip
    cause.plot(
        percents(coverage), [max(loss, _LEAST_KL) for loss in kl],
        ls="", marker="o", color=GREY, ms=4, alpha=0.6, mew=0,
    )  # fmt: skip
    if threshold is not None:
        point = guard_point(coverage, kl, threshold)
        trade.plot(
            100 * point.dense, point.kl, "o", ms=10, mfc="white", mec=BLUE, mew=2.2, zorder=4,
            label=f"threshold {threshold:.3g}: {percent(point.dense)} dense, KL {point.kl:.3g}",
        )  # fmt: skip
        cause.axvline(100 * threshold, color=BLUE, lw=1.6)
        low, high = cause.get_xlim()
        cause.axvspan(min(low, 100 * threshold), 100 * threshold, color=BLUE, alpha=0.08, lw=0)
        cause.set_xlim(low, high)
    trade.set(
        xlabel="windows verified densely, %", ylabel="mean KL, nats a token",
        title="Costs and savings, as the threshold rises",
    )  # fmt: skip
    trade.set_ylim(bottom=0)
    cause.set(
        yscale="log", xlabel="coverage of a window, %", ylabel="KL, nats a token (log)",
        title="Every window (shaded: guarded)",
    )  # fmt: skip
    plain_log_numbers(cause.yaxis)
    legend_below(figure, trade)
    return figure


def acceptance(results: Results) -> Any:
    """How often the draft is accepted at each position, and tau by draft length."""
    section = find(results, "check", "acceptance") or {}
    parts = [
        (draw, section[key])
        for draw, key in ((_by_position, "by_position"), (_by_gamma, "tau_by_gamma"))
        if section.get(key)
    ]
    if not parts:
        return None
    figure, axes = panels(1, len(parts), 3.8)
    for panel, (draw, values) in zip(axes[0], parts, strict=True):
        draw(panel, values, find(results, "chosen", "gamma"))
    return figure


def _by_position(panel: Any, accepted: list[float], _: int | None) -> None:
    places = range(1, len(accepted) + 1)
    bars = panel.bar(places, percents(accepted), color=BLUE, width=0.6)
    panel.bar_label(bars, fmt="%.0f", padding=2)
    panel.set(
        xticks=places, ylim=(0, 105), xlabel="position in the draft", ylabel="accepted, %",
        title="Accepted by position",
    )  # fmt: skip
    panel.grid(axis="x", visible=False)


def _by_gamma(panel: Any, taus: dict[str, float], configured: int | None) -> None:
    gammas = sorted(map(int, taus))
    panel.plot(gammas, [taus[str(gamma)] for gamma in gammas], "o-", color=BLUE)
    if configured in gammas:
        panel.plot(
            configured, taus[str(configured)], "o", ms=13, mfc="none", mec=BLUE, mew=1.8,
            label="configured",
        )  # fmt: skip
        panel.legend(loc="lower right")
    panel.set(
        xticks=gammas, xlabel="Γ, draft tokens a step", ylabel="τ, tokens committed a step",
        title="Tokens a step by draft length",
    )  # fmt: skip
    panel.set_ylim(bottom=1)

"""Figures of what the selections keep: attention recovery rate, and KL beside it."""

from __future__ import annotations

from typing import Any

from dustin_trt.calibration.figures_style import (
    GREY,
    VERMILION,
    budget_axis,
    legend_below,
    look,
    ordered,
    panels,
    percents,
    plain_log_numbers,
)
from dustin_trt.calibration.report_results import Results, arr, contexts, find, share_of_oracle
from dustin_trt.calibration.report_summary import GOOD, USABLE

_LEAST_KL = 1e-5  # what a logarithmic axis shows for 0

# the older a query, the paler
_AGES = (VERMILION, "#e8853f", "#f0ad7c", "#f6cfb1")


def by_age(results: Results) -> Any:
    """ARR by budget of choosing by an older query of the target; the paper's Fig. 2."""
    age, budgets = find(results, "check", "age"), find(results, "check", "budgets")
    shown = [context for context in contexts(results) if find(age, str(context))]
    if not budgets or not shown:
        return None
    figure, axes = panels(1, len(shown), 4.3, sharey=True)
    for panel, context in zip(axes[0], shown, strict=True):
        if best := arr(results, "oracle", context):
            panel.plot(budgets, percents(best), **look("oracle"))
        ages = sorted(age[str(context)], key=int)
        for place, steps in enumerate(ages):
            color = _AGES[min(place, len(_AGES) - 1)]
            panel.plot(
                budgets, percents(age[str(context)][steps]), marker="osv^D"[place % 5], color=color,
                label=f"query i−{steps}",
            )  # fmt: skip
        panel.set_title(f"{context:,} tokens")
        budget_axis(panel, budgets, find(results, "chosen", "budget"))
    axes[0, 0].set_ylabel("windowed ARR, %")
    legend_below(figure, *axes[0])
    return figure


def by_budget(results: Results) -> Any:
    """ARR by budget of every policy, and as a share of the oracle's; the paper's Fig. 3."""
    budgets = find(results, "check", "budgets")
    shown = [context for context in contexts(results) if arr(results, "oracle", context)]
    if not budgets or not shown:
        return None
    figure, axes = panels(2, len(shown), 7.4, sharex="col", sharey="row", height_ratios=(1, 1.25))
    lowest = 100 * USABLE[0]
    for (above, below), context in zip(axes.T, shown, strict=True):
        kept = results["check"]["arr"][str(context)]
        for policy in ordered(policy for policy in kept if kept[policy]):
            # Differences of a percent cannot be seen above: eight lines there would be one.
            if not policy.startswith("all heads"):
                above.plot(budgets, percents(kept[policy]), **look(policy))
            if policy == "oracle":
                continue
            shares = percents(share_of_oracle(results, policy, context) or ())
            below.plot(budgets, shares, **look(policy))
            # What looks at no attention at all would squeeze the others together.
            if policy != "sink + window":
                lowest = min(lowest, *shares)
        above.set_title(f"{context:,} tokens")
        for share in (GOOD[0], USABLE[0]):
            below.axhline(100 * share, color=GREY, lw=1, ls=(0, (6, 3)), zorder=1)
        for panel in (above, below):
            budget_axis(panel, budgets, find(results, "chosen", "budget"))
        above.set_xlabel("")
    for share, name in ((GOOD[0], "good"), (USABLE[0], "usable")):
        axes[1, -1].annotate(
            name, (1, 100 * share), (4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=GREY, va="center",
        )  # fmt: skip
    axes[1, 0].set_ylim(lowest - 0.5, 100.4)
    axes[0, 0].set_ylabel("windowed ARR, %")
    axes[1, 0].set_ylabel("windowed ARR, % of the oracle’s")
    legend_below(figure, *axes.flat, columns=4)
    return figure


def by_layer(results: Results) -> Any:
    """ARR of every target layer under the one set of tokens; the paper's Fig. 4."""
    section = find(results, "check", "by_layer") or {}
    policies = [policy for policy in ordered(section) if isinstance(section[policy], list)]
    if not policies:
        return None
    from matplotlib.ticker import MaxNLocator

    figure, axes = panels(1, 1, 4.3)
    panel = axes[0, 0]
    for policy in policies:
        values = percents(section[policy])
        panel.plot(range(len(values)), values, **{**look(policy), "ms": 4})
    panel.set(xlabel="target layer", ylabel="windowed ARR, %")
    panel.set_title(f"{section['context']:,} tokens, budget {section['budget']:,}")
    panel.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    panel.margins(x=0.02)
    legend_below(figure, panel)
    return figure


def against_kl(results: Results) -> Any:
    """ARR against KL over policies and budgets, a panel a context."""
    rows = find(results, "check", "fidelity") or []
    rows = [row for row in rows if None not in (row.get("kl"), row.get("arr"))]
    if not rows:
        return None
    shown = sorted({row["context"] for row in rows})
    figure, axes = panels(1, len(shown), 4.6, sharex=True, sharey=True)
    budget = find(results, "chosen", "budget")
    for panel, context in zip(axes[0], shown, strict=True):
        here = [row for row in rows if row["context"] == context]
        for policy in ordered({row["policy"] for row in here}):
            points = sorted(
                (row for row in here if row["policy"] == policy), key=lambda row: row["budget"]
            )
            panel.plot(
                [100 * row["arr"] for row in points],
                [max(row["kl"], _LEAST_KL) for row in points],
                **{**look(policy), "lw": 0.9, "alpha": 0.9},
            )
        marked = [row for row in here if (row["policy"], row["budget"]) == ("chosen", budget)]
        for row in marked:
            panel.plot(
                100 * row["arr"], max(row["kl"], _LEAST_KL), "o", ms=14, mfc="none",
                mec=look("chosen")["color"], label=f"chosen, budget {budget:,}", zorder=4,
            )  # fmt: skip
        panel.set(yscale="log", title=f"{context:,} tokens", xlabel="windowed ARR, %")
    plain_log_numbers(axes[0, 0].yaxis)
    axes[0, 0].set_ylabel("KL(full ‖ sparse), nats a token (log)")
    legend_below(figure, *axes[0], columns=5)
    return figure

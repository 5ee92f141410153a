"""How the report's figures look: one colour a signal everywhere, and the axes they share.

A colour stands for what chooses the tokens (Okabe and Ito's palette, told apart by colour-blind
eyes); full lines and filled markers for the chosen heads, broken and hollow ones for all heads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

BLACK, GREY, BLUE, VERMILION, GREEN, PURPLE = (
    "#000000", "#767676", "#0072b2", "#d55e00", "#009e73", "#aa4499",
)  # fmt: skip
WIDTH = 11.0  # inches; the page shows them about 1,100 px wide

STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "savefig.facecolor": "white",
}

# colour, marker, line; in the order of legends
_LOOKS: dict[str, tuple[str, str, str]] = {
    "oracle": (BLACK, "D", "-"),
    "chosen": (BLUE, "o", "-"),
    "history": (VERMILION, "s", "-"),
    "lookahead": (GREEN, "^", "-"),
    "all heads": (BLUE, "o", "--"),
    "all heads, history": (VERMILION, "s", "--"),
    "all heads, lookahead": (GREEN, "^", "--"),
    "sink + window": (GREY, "X", ":"),
}


def require_packages() -> None:
    """Raise ImportError in one line where a report cannot be made."""
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"the calibration report needs {' and '.join(missing)}: "
            "pip install 'dustin-trt[calibration]'"
        )


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure of page width and its panels `[rows, columns]`; no display, no global state."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03)
    figure = Figure(figsize=(WIDTH, height), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def ordered(policies: Iterable[str]) -> list[str]:
    """Policies in the order of every legend; those without a look of their own come last."""
    places = {policy: place for place, policy in enumerate(_LOOKS)}
    return sorted(policies, key=lambda policy: places.get(policy, len(places)))


def look(policy: str) -> dict[str, Any]:
    """Arguments of `plot` for a policy."""
    color, marker, line = _LOOKS.get(policy, (PURPLE, "P", ":"))
    hollow = policy.startswith("all heads")
    return {
        "color": color,
        "marker": marker,
        "ls": line,
        "mfc": "white" if hollow else color,
        "label": policy,
        "zorder": 3 if policy == "chosen" else 2.5,
    }


def bar_look(policy: str) -> dict[str, Any]:
    """Arguments of `bar` for a policy: hatched where lines are broken."""
    color = look(policy)["color"]
    if policy.startswith("all heads"):
        return {"facecolor": "white", "edgecolor": color, "hatch": "////", "label": policy}
    return {"facecolor": color, "edgecolor": color, "label": policy}


def budget_axis(axes: Any, budgets: Sequence[int], chosen: int | None) -> None:
    """A logarithmic axis of the budgets that were checked, the configured one marked."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.minorticks_off()
    axes.margins(x=0.06)
    axes.set_xlabel("budget k, tokens read (log)")
    if chosen in budgets:
        axes.axvline(chosen, color=BLUE, lw=9, alpha=0.1, zorder=0.5)


def legend_below(figure: Any, *sources: Any, columns: int = 8) -> None:
    """One legend for all panels, below them, where it covers nothing."""
    entries: dict[str, Any] = {}
    for axes in sources:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labels = ordered(entries)
    figure.legend(
        [entries[label] for label in labels], labels, loc="outside lower center", ncols=columns,
        handlelength=2.6, columnspacing=1.6,
    )  # fmt: skip


def plain_log_numbers(axis: Any) -> None:
    """0.1, 1, 10 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def percents(values: Iterable[float | None]) -> list[float]:
    """Shares in percent; NaN, which no line goes through, for what was not measured."""
    return [float("nan") if value is None else 100 * value for value in values]

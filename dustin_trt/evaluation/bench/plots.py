"""Reports as pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from dustin_trt.evaluation import machine
from dustin_trt.evaluation.bench.overhead import ESTIMATIONS
from dustin_trt.evaluation.bench.report import Report, by
from dustin_trt.evaluation.side_by_side import PARTS

Row = dict[str, Any]

_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#2563a8", "#d9822b", "#3d8f5f", "#8a8a8a", "#b5403a"
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "legend.frameon": False,
    "font.size": 10,
}


def require_matplotlib() -> None:
    """Raise ImportError in one line where pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'dustin-trt[demo]'")


def draw(report: Report, path: Path) -> Path:
    """Write a PNG to `path`, or under a name of its own into that folder; returns the file."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")  # files only; works without a display
    import matplotlib.pyplot as plt

    path = report.place(path, ".png")
    with plt.rc_context(_STYLE):
        figures = {"attention": _attention, "overhead": _overhead, "decode": _decode}
        figure = figures[report.benchmark](report, plt)
        figure.supxlabel(machine.in_one_line(), fontsize=7.5, color="#666666", x=0.01, ha="left")
        figure.savefig(path, dpi=140, format="png")
        plt.close(figure)
    return path


def _attention(report: Report, plt: Any) -> Any:
    """A column a shape, batch and budget: time above, speedup below, over the context."""
    groups = by(report.rows, "shape", "batch", "budget")
    figure, axes = plt.subplots(
        2, len(groups), figsize=(2 + 4.6 * len(groups), 7.6), squeeze=False, sharex="col",
        sharey="row", layout="constrained", height_ratios=(1.25, 1),
    )  # fmt: skip
    w = report.settings["gamma"] + 1
    figure.suptitle(
        f"Verification attention of {w} tokens in one layer:\n"
        f"the full KV cache against Dustin, {report.settings['dtype']}",
        x=0.01, ha="left", fontsize=12.5,
    )  # fmt: skip
    lines = (
        ("sdpa", "full cache, torch SDPA", _GREY, "o-"),
        ("dense", "full cache, our dense kernel", "black", "o-"),
        ("dustin", "Dustin, all of it", _BLUE, "o-"),
        ("sparse", "of it sparse attention", _BLUE, "s--"),
        ("estimation_per_layer", "of it estimation ÷ layers", _ORANGE, "^--"),
        ("selection_per_layer", "of it selection ÷ layers", _GREEN, "v--"),
    )
    for column, ((shape, batch, budget), rows) in enumerate(groups.items()):
        above, below = axes[:, column]
        contexts = [row["context"] for row in rows]
        for key, name, color, style in lines:
            _line(above, rows, contexts, "median_ms", "quartiles_ms", key, name, color, style)
        above.set(yscale="log", title=f"{shape}, batch {batch}, budget {budget}")
        speedups = [row["speedup"] for row in rows]
        below.fill_between(
            contexts, *zip(*(row["speedup_quartiles"] for row in rows), strict=True),
            color=_BLUE, alpha=0.2, lw=0,
        )  # fmt: skip
        below.plot(contexts, speedups, "o-", color=_BLUE, label="measured (band: quartiles)")
        bound = [row["speedup_bound"] for row in rows]
        below.plot(contexts, bound, ":", color=_RED, marker="_", label="bound: context ÷ budget")
        for context, speedup in zip(contexts, speedups, strict=True):
            below.annotate(
                f"{speedup:.1f}×", (context, speedup), (0, -13), textcoords="offset points",
                ha="center", color=_BLUE, fontweight="bold", fontsize=9,
            )  # fmt: skip
        below.set_yscale("log", base=2)
        _context_axis(below, contexts)
    axes[0, 0].set_ylabel("ms a layer (log)")
    axes[1, 0].set_ylabel("speedup over the faster full (log)")
    _log_numbers(*axes[:, 0])
    for line in axes:
        line[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


def _overhead(report: Report, plt: Any) -> Any:
    """A panel a shape and batch: share of full attention over the context."""
    groups = by(report.rows, "shape", "batch")
    figure, axes = plt.subplots(
        1, len(groups), figsize=(2.6 + 5 * len(groups), 4.8), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    draft = report.rows[0]["draft_shape"]
    figure.suptitle(
        "Cost of estimating which tokens matter, as a share of full attention\n"
        f"(draft {draft}, {report.settings['dtype']})",
        x=0.01, ha="left", fontsize=12.5,
    )  # fmt: skip
    colors = dict(zip(ESTIMATIONS, (_RED, _BLUE, _GREEN, _ORANGE), strict=True))
    for panel, ((shape, batch), rows) in zip(axes[0], groups.items(), strict=True):
        contexts = [row["context"] for row in rows]
        for key, name in ESTIMATIONS.items():
            _line(
                panel, rows, contexts, "share", "share_quartiles", key, name, colors[key], "o-",
                times=100,
            )  # fmt: skip
        _line(
            panel, rows, contexts, "share", "share_quartiles", "select", "selection (besides)",
            _GREY, "v--", times=100,
        )  # fmt: skip
        panel.axhline(100, color="black", lw=1)
        panel.annotate(
            "full attention", (0.995, 100), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=9, ha="right",
        )  # fmt: skip
        panel.set(yscale="log", title=f"{shape}, batch {batch}")
        _context_axis(panel, contexts)
    axes[0, 0].set_ylabel("% of full attention in all layers (log)")
    _log_numbers(axes[0, 0])
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


def _decode(report: Report, plt: Any) -> Any:
    """Tokens a second, and where the time of a step goes, beside the least the memory allows."""
    settings, rows = report.settings, report.rows
    names = [row["method"].replace(" (", "\n(") for row in rows]
    places = range(len(rows))
    figure, (rates, parts) = plt.subplots(
        1, 2, figsize=(13, 4.2 + 0.25 * len(rows)), layout="constrained", width_ratios=(1, 1.35)
    )
    acceptance = settings["acceptance"]
    simulated = f"SIMULATED acceptance {acceptance:.0%}, " if acceptance is not None else ""
    figure.suptitle(
        f"Decoding, {settings['models'][0]}, {simulated}draft {settings['draft']}: "
        f"{settings['context']} tokens × {settings['batch']}, gamma {settings['gamma']}, "
        f"{settings['dtype']}",
        x=0.01, ha="left", fontsize=13,
    )  # fmt: skip
    values = [row["tokens_per_second"] for row in rows]
    ends = [row["tokens_per_second_range"] for row in rows]
    errors = [
        [value - low for value, (low, _) in zip(values, ends, strict=True)],
        [high - value for value, (_, high) in zip(values, ends, strict=True)],
    ]
    colors = ["black" if row["is_baseline"] else _GREY for row in rows[:-1]] + [_BLUE]
    rates.barh(places, values, xerr=errors, color=colors, height=0.6, ecolor="#444444", capsize=3)
    for place, row, (_, high) in zip(places, rows, ends, strict=True):
        rates.annotate(
            f"{row['tokens_per_second']:.1f}  ({row['speedup']:.2f}×)", (high, place), (6, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
    rates.set(
        yticks=places, yticklabels=names, xlim=(0, 1.45 * max(high for _, high in ends)),
        xlabel="tokens/s, all rows (whiskers: lowest and highest round)",
        title=f"Speed, and × the fastest vanilla (black){', SIMULATED τ' if simulated else ''}",
    )  # fmt: skip
    rates.invert_yaxis()
    shades = dict(zip(PARTS, (_ORANGE, _GREEN, "#9a76b8", _BLUE, _GREY), strict=True))
    for key, offset, height, alpha in (("median_ms", -0.14, 0.34, 1), ("floor_ms", 0.2, 0.2, 0.45)):
        left = [0.0] * len(rows)
        for part in PARTS:
            widths = [row[key][part] for row in rows]
            label = part if key == "median_ms" else None
            parts.barh(
                [place + offset for place in places], widths, left=left, height=height,
                color=shades[part], alpha=alpha, label=label,
            )  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
    parts.set(
        yticks=places, yticklabels=[f"τ {row['tau']:.2f}" for row in rows],
        xlabel="ms a step", title="A step by part (pale: least time the memory bandwidth allows)",
    )  # fmt: skip
    parts.invert_yaxis()
    parts.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    for panel in (rates, parts):
        panel.grid(axis="y", visible=False)
    return figure


def _line(
    axes: Any, rows: list[Row], contexts: list[int], medians: str, quartiles: str, key: str,
    name: str, color: str, style: str, *, times: float = 1,
) -> None:  # fmt: skip
    """A line of medians in a band of quartiles."""
    ends = [[times * end for end in row[quartiles][key]] for row in rows]
    axes.fill_between(contexts, *zip(*ends, strict=True), color=color, alpha=0.15, lw=0)
    values = [times * row[medians][key] for row in rows]
    axes.plot(contexts, values, style, color=color, label=name, ms=4.5)


def _context_axis(axes: Any, contexts: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in contexts])
    axes.minorticks_off()
    axes.margins(x=0.08, y=0.12)
    axes.set_xlabel("context, tokens")


def _log_numbers(*panels: Any) -> None:
    """0.1, 1, 10 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axes in panels:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())

"""The curve of acceptance on held-out text as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dustin_trt.distillation.train import Point


def draw_curve(points: Sequence[Point], file: Path, title: str) -> None:
    """Write a PNG.

    Raises
    ------
    ImportError
        Without matplotlib; says what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing the curve needs matplotlib: pip install 'dustin-trt[calibration]'"
        ) from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    tokens = [point.tokens / 1e6 for point in points]
    greedy_above = points[-1].agreement > points[-1].overlap
    for name, label, colour, above in (
        ("agreement", "greedy: same likeliest token", "#0072B2", greedy_above),
        ("overlap", "sampling: Σ min(p, q)", "#D55E00", not greedy_above),
    ):
        values = [getattr(point, name) for point in points]
        axes.plot(tokens, values, "o-", markersize=3, color=colour, label=label, clip_on=False)
        axes.annotate(
            f"{values[-1]:.3f}", (tokens[-1], values[-1]), xytext=(6, 2 if above else -2),
            textcoords="offset points", va="bottom" if above else "top", color=colour,
        )  # fmt: skip
    axes.set_xlabel("training tokens, millions")
    axes.set_ylabel("acceptance, teacher-forced, held-out text")
    axes.set_ylim(0, 1)
    axes.set_xlim(0, 1.12 * max(tokens[-1], 1e-6))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    axes.set_title(title, fontsize=10, loc="left")
    figure.savefig(file, dpi=120)

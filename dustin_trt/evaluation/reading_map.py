"""A picture of which prompt tokens verification read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from torch import Tensor

from dustin_trt.evaluation.passkey import PassKeyPrompt

matplotlib.use("Agg")  # files only; works without a display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

_AROUND = 70  # tokens shown before and after the pass key
_WIDTH = 110  # characters a line
_READ = matplotlib.colormaps["Blues"]


def draw_reading_map(
    path: Path, tokenizer: Any, prompt: PassKeyPrompt, selections: list[Tensor | None]
) -> None:
    """Draw what every step read of the prompt, and the text around the pass key.

    Parameters
    ----------
    path : PNG to write
    tokenizer : to show tokens as text
    prompt : the prompt and where its pass key stands
    selections : a step's history positions `[count]` int32; None stands for all
    """
    length = len(prompt.tokens)
    read = np.zeros((len(selections), length), dtype=bool)
    for step, chosen in enumerate(selections):
        if chosen is None:
            read[step] = True
        else:
            positions = chosen.numpy()
            read[step, positions[positions < length]] = True

    figure, (steps, share, text) = plt.subplots(
        3, 1, figsize=(13, 9.5), height_ratios=(3, 1.3, 2.6), constrained_layout=True
    )
    mean = read.sum(1).mean() if len(selections) else 0
    figure.suptitle(
        f"What {len(selections)} sparse verification passes read of a {length}-token prompt: "
        f"{mean:.0f} tokens each, {mean / length:.0%}",
        fontsize=14,
    )
    _draw_steps(steps, read, prompt.needle)
    _draw_share(share, read, prompt.needle)
    _draw_text(text, tokenizer, prompt, read.mean(0))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_steps(axes: Axes, read: np.ndarray, needle: range) -> None:
    step, position = read.nonzero()
    axes.scatter(position, step, s=2.5, marker="s", linewidths=0, color="tab:blue")
    axes.axvspan(needle.start, needle.stop, color="tab:orange", alpha=0.35, lw=0)
    axes.annotate(
        "the pass key",
        (needle.start, -1),
        xytext=(0, 4),
        textcoords="offset points",
        color="tab:orange",
        ha="center",
        va="bottom",
        annotation_clip=False,
    )
    axes.set(
        xlim=(-0.005 * read.shape[1], 1.005 * read.shape[1]),
        ylim=(len(read) - 0.5, -1),
        ylabel="step",
        xlabel="position in the prompt (sink at the left, window at the right)",
    )


def _draw_share(axes: Axes, read: np.ndarray, needle: range) -> None:
    size = max(1, read.shape[1] // 160)
    edges = np.arange(0, read.shape[1] + size, size)
    counts = np.add.reduceat(read.mean(0), edges[:-1][edges[:-1] < read.shape[1]])
    axes.bar(edges[: len(counts)], counts / size, width=size, align="edge", color="tab:blue")
    axes.axvspan(needle.start, needle.stop, color="tab:orange", alpha=0.35, lw=0)
    axes.set(
        xlim=(-0.005 * read.shape[1], 1.005 * read.shape[1]),
        ylim=(0, 1),
        ylabel="share of steps",
        xlabel=f"mean over {size} neighbouring tokens",
    )


def _draw_text(axes: Axes, tokenizer: Any, prompt: PassKeyPrompt, share: np.ndarray) -> None:
    """The tokens around the key, each as dark as often as it was read."""
    axes.axis("off")
    axes.set_title("around the pass key: the darker a token, the more steps read it", loc="left")
    start = max(0, prompt.needle.start - _AROUND)
    stop = min(len(prompt.tokens), prompt.needle.stop + _AROUND)
    column, line = 0, 0
    for position in range(start, stop):
        piece = tokenizer.decode([prompt.tokens[position]]).replace("\n", "¶")
        if column + len(piece) > _WIDTH:
            column, line = 0, line + 1
        darkness = float(share[position])
        axes.text(
            column / _WIDTH,
            0.94 - line * 0.105,
            piece.replace("$", r"\$"),
            family="monospace",
            fontsize=9.5,
            color="white" if darkness > 0.6 else "black",
            fontweight="bold" if position in prompt.needle else "normal",
            bbox={"facecolor": _READ(0.9 * darkness), "edgecolor": "none", "pad": 1.2},
            transform=axes.transAxes,
            va="top",
        )
        column += len(piece)

"""A picture of which prompt tokens verification read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from torch import Tensor

from dustin_trt.evaluation.passkey import PassKeyPrompt
from dustin_trt.runtime.sequence import RequestOutput

matplotlib.use("Agg")  # files only; works without a display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

_AROUND = 70  # tokens shown before and after the pass key
_WIDTH = 110  # characters a line
_READ = matplotlib.colormaps["Blues"]


def draw_reading_map(
    path: Path,
    tokenizer: Any,
    prompt: PassKeyPrompt,
    answer: RequestOutput,
    tale: str,
    tale_length: int,
    tale_selections: list[Tensor | None],
) -> None:
    """Draw what was read to answer with a pass key, and to tell about another prompt.

    Parameters
    ----------
    path : PNG to write
    tokenizer : to show tokens as text
    prompt, answer : the prompt with the key, and its output with the selections recorded
    tale, tale_length, tale_selections : name of the other one, its prompt tokens, and a step's
        history positions `[count]` int32; None stands for all
    """
    asked = _read(answer.selections, len(prompt.tokens))
    told = _read(tale_selections, tale_length)
    figure, (answering, text, telling) = plt.subplots(
        3, 1, figsize=(13, 9.5), height_ratios=(1.5, 2.2, 3), constrained_layout=True
    )
    figure.suptitle("The prompt tokens that Dustin's verification passes read", fontsize=15)
    _draw_steps(answering, asked, f'Answering "{_printable(answer.text.strip())}"')
    answering.axvspan(prompt.needle.start, prompt.needle.stop, color="tab:orange", alpha=0.35, lw=0)
    answering.annotate(
        "the pass key",
        (prompt.needle.stop, 0.5),
        xytext=(6, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color="tab:orange",
        fontweight="bold",
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )
    _draw_text(text, tokenizer, prompt, asked.mean(0))
    _draw_steps(telling, told, f"Telling what happens in {tale}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _read(selections: list[Tensor | None], length: int) -> np.ndarray:
    """Whether a step read a prompt token, `[steps, length]` bool."""
    read = np.zeros((len(selections), length), dtype=bool)
    for step, chosen in enumerate(selections):
        positions = np.arange(length) if chosen is None else chosen.numpy()
        read[step, positions[positions < length]] = True
    return read


def _draw_steps(axes: Axes, read: np.ndarray, title: str) -> None:
    steps, length = read.shape
    step, position = read.nonzero()
    height = 0.8 if steps < 30 else 1.0
    axes.vlines(position, step - height / 2, step + height / 2, lw=0.4, color="tab:blue")
    mean = read.sum(1).mean()
    axes.set_title(
        f"{title}: {steps} passes, each over {mean:.0f} of {length} prompt tokens "
        f"({mean / length:.0%})",
        loc="left",
    )
    axes.set(
        xlim=(-0.005 * length, 1.005 * length),
        ylim=(steps - 0.5, -0.5),
        ylabel="pass",
        xlabel="position in the prompt",
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_text(axes: Axes, tokenizer: Any, prompt: PassKeyPrompt, share: np.ndarray) -> None:
    """The tokens around the key, each as dark as often as it was read."""
    axes.axis("off")
    axes.set_title("Around the pass key: the darker a token, the more passes read it", loc="left")
    start = max(0, prompt.needle.start - _AROUND)
    stop = min(len(prompt.tokens), prompt.needle.stop + _AROUND)
    column, line = 0, 0
    for position in range(start, stop):
        piece = _printable(tokenizer.decode([prompt.tokens[position]]))
        if column + len(piece) > _WIDTH:
            column, line = 0, line + 1
        darkness = float(share[position])
        axes.text(
            column / _WIDTH,
            0.9 - line * 0.125,
            piece,
            family="monospace",
            fontsize=9.5,
            color="white" if darkness > 0.6 else "black",
            fontweight="bold" if position in prompt.needle else "normal",
            bbox={"facecolor": _READ(0.9 * darkness), "edgecolor": "none", "pad": 1.2},
            transform=axes.transAxes,
            va="top",
        )
        column += len(piece)


def _printable(text: str) -> str:
    """Text that any font can show: one line of Latin letters and punctuation, no formula."""
    shown = text.replace("\n", "¶").replace("$", r"\$")
    return "".join(
        letter if letter.isprintable() and (letter < "\u0250" or letter in "–—‘’“”…") else "?"
        for letter in shown
    )

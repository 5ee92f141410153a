"""The figures of the calibration report: which there are, and how to read each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dustin_trt.calibration import figures_answers, figures_arr, figures_search
from dustin_trt.calibration.figures_style import STYLE, require_packages
from dustin_trt.calibration.report_results import Results


@dataclass(frozen=True)
class Figure:
    """A picture of the report.

    Attributes
    ----------
    name : the file's name, without ending
    title, caption : what it shows; how to read it and what a good pair looks like
    draw : gives a matplotlib figure, or None where the results lack what it shows
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Results], Any]


# In the order of the page: what the verdict rests on first, how it came about last.
FIGURES = (
    Figure(
        "arr_by_budget",
        "Attention kept, by budget",
        "Above, the share of the attention in a verification window that each choice of tokens "
        "keeps; below, the same as a share of what the oracle, which sees the future, keeps "
        "(broken lines: every head scored; blue band: the configured budget): in a good pair "
        "the blue line is above both single signals and, at the band, above “good”.",
        figures_arr.by_budget,
    ),
    Figure(
        "cost_against_arr",
        "What scoring costs, and what it brings",
        "Each point is the state after the search took or exchanged a KV head; the star (chosen "
        "heads) and the hollow circle (every head) come from the check, as means over its "
        "contexts: in a good pair both curves rise steeply and then flatten, and the star is about "
        "as high as the circle, far to its left.",
        figures_search.cost_against_arr,
    ),
    Figure(
        "pass_keys",
        "Pass keys found",
        "How many of the numbers hidden in a long text are told correctly at the end: in a good "
        "pair the blue bars reach the black line, full verification, down to small budgets, "
        "and sink + window, which reads only the ends, finds none.",
        figures_answers.pass_keys,
    ),
    Figure(
        "guard",
        "What the guard costs and saves",
        "As the threshold rises, more windows are verified densely (KL 0) and the mean KL "
        "falls: in a good pair the blue line falls far below the broken one, so that the few "
        "windows the guard catches at its threshold are those that hurt.",
        figures_answers.guard,
    ),
    Figure(
        "arr_against_kl",
        "Does attention kept mean the right logits?",
        "Every point is a policy at a budget, placed by the attention it keeps and by how far "
        "its logits are from full verification’s: in a good pair the points fall from the upper "
        "left to the lower right in one band, so that ARR is a fair goal of the search.",
        figures_arr.against_kl,
    ),
    Figure(
        "arr_by_age",
        "How fast the target’s own signal ages",
        "Tokens chosen by the target’s query of one, four, 16 and 64 tokens ago, every head "
        "scored: the larger the gap between the lines, the less history alone can serve a long "
        "window and the more a lookahead is worth; in a good pair i−1 is close to the oracle at "
        "the configured budget (paper, Fig. 2).",
        figures_arr.by_age,
    ),
    Figure(
        "arr_by_layer",
        "Attention kept, by layer",
        "All layers read the one set of tokens, and here is what each keeps of its attention: "
        "in a good pair the chosen line follows the oracle without a layer where it drops "
        "(paper, Fig. 4).",
        figures_arr.by_layer,
    ),
    Figure(
        "head_scores",
        "Where the retrieval heads are",
        "The darker a head, the more of its attention lies on the answer while it is being "
        "told, and the outlined heads are those that score (pale lines part the groups that "
        "share a KV head): in a good pair a few dark heads stand out and the outlines are among "
        "them (paper, Fig. 6).",
        figures_search.head_scores,
    ),
    Figure(
        "trials",
        "The search for the other settings",
        "Every point is a trial of join, shares, sink, window and Γ, judged by how close its "
        "logits stay to full verification’s and by its predicted speed: in a good search the "
        "best trials come well before the last one, and the star is on the front where more "
        "speed begins to cost much fidelity.",
        figures_search.trials,
    ),
    Figure(
        "acceptance",
        "Accepted drafts",
        "How often the draft’s first, second, … token is accepted, and how many tokens a step "
        "commits at each draft length: in a good pair acceptance falls slowly and τ still rises "
        "at the configured Γ.",
        figures_answers.acceptance,
    ),
)


def draw_figures(results: Results, folder: Path) -> dict[str, Path]:
    """Write a PNG for every figure the results allow; returns the files by name.

    A picture of an earlier report that can no longer be drawn is removed, so that the folder never
    shows two calibrations at once.
    """
    require_packages()
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    with matplotlib.rc_context(STYLE):
        for figure in FIGURES:
            path = folder / f"{figure.name}.png"
            drawn = figure.draw(results)
            if drawn is None:
                path.unlink(missing_ok=True)
                continue
            drawn.savefig(path, dpi=140, metadata={"Software": None})
            files[figure.name] = path
    return files

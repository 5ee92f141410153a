"""The calibration report: one page that says whether a pair is good and what it costs."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from dustin_trt.calibration.figures import FIGURES, draw_figures
from dustin_trt.calibration.figures_style import require_packages
from dustin_trt.calibration.report_results import Results, find
from dustin_trt.calibration.report_summary import tiles, verdict
from dustin_trt.calibration.report_tables import configuration, flat, seconds, shapes
from dustin_trt.calibration.report_words import NOT_MEASURED


def write_report(results: Results, output: Path) -> None:
    """Write `report.html`, self-contained, and its pictures as `figures/*.png` into `output`.

    The results alone are enough, so a report can be drawn again without calibrating again.

    Parameters
    ----------
    results : what `results.json` of a calibration holds; sections may be absent
    output : folder, made if it does not exist

    Raises
    ------
    ImportError
        without jinja2 and matplotlib; says what to install

    Examples
    --------
    >>> write_report(json.loads(Path("out/results.json").read_text()), Path("out"))
    """
    require_packages()
    import jinja2

    pictures = draw_figures(results, output / "figures")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = Path(__file__).with_name("report.html.j2").read_text("utf-8")
    page = environment.from_string(template).render(_contents(results, pictures))
    (output / "report.html").write_text(page, encoding="utf-8")


def _contents(results: Results, pictures: dict[str, Path]) -> dict[str, Any]:
    """All that the page says, as the template names it."""
    return {
        "name": results.get("name") or "unnamed",
        "created": results.get("created"),
        "pair": shapes(results),
        "verdict": verdict(results),
        "tiles": tiles(results),
        "configuration": configuration(results),
        "figures": [
            (figure, _data_uri(pictures[figure.name]) if figure.name in pictures else None)
            for figure in FIGURES
        ],
        "made": {
            "Seconds a step": seconds(results),
            "Versions": _rows(results, "versions"),
            "Machine": _rows(results, "machine"),
            "Recipe": _rows(results, "recipe"),
        },
        "not_measured": NOT_MEASURED,
    }


def _rows(results: Results, section: str) -> list[tuple[str, str]]:
    return flat(found) if (found := find(results, section)) else []


def _data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"

"""`dustin-trt bench`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from dustin_trt.evaluation.bench.attention import LayerSettings
    from dustin_trt.evaluation.bench.report import Report


def run(*, benchmark: str, json: Path | None, plot: Path | None, **options: Any) -> int:
    """Check where the figures shall go, measure, print the table, write the files."""
    console = Console()
    _check_output("--json", json)
    _check_output("--plot", plot)
    from dustin_trt.evaluation.bench import plots  # from here on it is slow

    if plot:
        plots.require_matplotlib()
    from dustin_trt.evaluation.bench.tables import print_report

    report = _BENCHMARKS[benchmark](console, options)
    console.print()
    print_report(report, console)
    if json:
        console.print(f"\nWritten: {report.write_json(json)}", soft_wrap=True)
    if plot:
        console.print(f"Written: {plots.draw(report, plot)}", soft_wrap=True)
    return 0


def _attention(console: Console, options: dict[str, Any]) -> Report:
    from dustin_trt.evaluation.bench.attention import run_attention

    budgets = tuple(options.pop("budget"))
    return run_attention(_layer_settings(**options, budgets=budgets), console)


def _overhead(console: Console, options: dict[str, Any]) -> Report:
    from dustin_trt.evaluation.bench.overhead import run_overhead

    return run_overhead(_layer_settings(**options), console)


def _layer_settings(
    *, shape: list[str], context: list[int], batch: list[int], heads: int, layers: int,
    draft_heads: int, draft_layers: int, **others: Any,
) -> LayerSettings:  # fmt: skip
    from dustin_trt.evaluation.bench.attention import LayerSettings
    from dustin_trt.evaluation.bench.layer import Scoring

    return LayerSettings(
        shapes=tuple(shape), contexts=tuple(context), batches=tuple(batch),
        target=Scoring(heads, layers), draft=Scoring(draft_heads, draft_layers), **others,
    )  # fmt: skip


def _decode(console: Console, options: dict[str, Any]) -> Report:
    from dustin_trt.cli.progress import silence_transformers
    from dustin_trt.evaluation.bench.decode import DecodeSettings, run_decode

    silence_transformers()
    return run_decode(DecodeSettings(**options), console)


_BENCHMARKS: dict[str, Callable[[Console, dict[str, Any]], Report]] = {
    "attention": _attention,
    "overhead": _overhead,
    "decode": _decode,
}


def _check_output(flag: str, path: Path | None) -> None:
    """Refuse now what could not be written after minutes of measuring."""
    if path is None or path.is_dir():
        return
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written")

"""`dustin-trt demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def run(output: Path, **options: Any) -> int:
    """Run the demo with the options that were given; its own defaults serve for the others."""
    from dustin_trt.cli.progress import silence_transformers
    from dustin_trt.evaluation.demo import run_demo

    silence_transformers()
    run_demo(output, **options)
    return 0

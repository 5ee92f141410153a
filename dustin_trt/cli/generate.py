"""`dustin-trt generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dustin_trt.cli import ERROR_LINES, INTERRUPTED, OK
from dustin_trt.runtime.batch_output import check_files
from dustin_trt.runtime.sampling_params import SamplingParams


def run(
    *,
    input: Path,
    output: Path,
    target: Path | None,
    batch_size: int | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: list[str],
    quiet: bool,
    **model: Any,
) -> int:
    """Check what can be checked at once, load the models, serve the file; the exit code."""
    check_files(input, output)
    params = SamplingParams(
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop),
    )
    from dustin_trt import LLM  # from here on it is slow
    from dustin_trt.cli.progress import Progress, describe, silence_transformers
    from dustin_trt.runtime.batch import run_batch

    silence_transformers()
    llm = LLM(target, max_batch_size=batch_size, **model)
    uncalibrated = not llm.config.calibrated and model["heads"] != "all"
    if llm.decoder.policy.name == "dustin" and uncalibrated and not quiet:
        _say(
            "note: no calibrated --config, so the attention of uncalibrated default heads chooses "
            "what is read; --heads all is slower and more thorough"
        )
    with Progress(quiet=quiet) as progress:
        summary = run_batch(llm, input, output, params, progress=progress.update)
    failed = summary.failed + summary.skipped_failed
    if not quiet or failed or summary.interrupted:
        _say(describe(summary, output))
    if summary.interrupted:
        return INTERRUPTED
    return ERROR_LINES if failed else OK


def _say(line: str) -> None:
    print(f"dustin-trt: {line}", file=sys.stderr)

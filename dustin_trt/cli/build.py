"""`dustin-trt build`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from dustin_trt.cli import OK
from dustin_trt.cli.progress import duration, silence_transformers


def run(
    *,
    target: Path,
    draft: Path | None,
    config: Path | None,
    output: Path,
    quiet: bool,
    **options: Any,
) -> int:
    """Build, show how far it is, say what was made; the exit code."""
    try:
        from dustin_trt.build.build import Options, build_engines  # slow
    except ImportError as error:
        if error.name is None or not error.name.startswith(("onnx", "ml_dtypes")):
            raise
        raise ImportError(
            f"building needs {error.name}: pip install 'dustin-trt[export]'"
        ) from error

    silence_transformers()
    started = time.monotonic()
    with Steps(Console(stderr=True), quiet=quiet) as steps:
        manifest = build_engines(target, draft, config, output, Options(**options), steps.at)
    if quiet:
        return OK
    made = [*manifest.target, *([manifest.draft] if manifest.draft else [])]
    size = sum(file.bytes for step in made for file in step.files)
    print(
        f"dustin-trt: {output} built for {manifest.backend} in "
        f"{duration(time.monotonic() - started)}: {size / 2**20:.0f} MiB, "
        f"up to {manifest.target[0].graph.max_batch} rows of {manifest.max_context} tokens, "
        f"{manifest.config.budget} read in a step, signal {manifest.signal}",
        file=sys.stderr,
    )
    if not manifest.config.calibrated:
        print(
            "dustin-trt: note: no calibrated --config, so uncalibrated default heads choose what "
            "is read",
            file=sys.stderr,
        )
    return OK


class Steps:
    """A bar a step on a terminal, a line a step elsewhere."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._plain = not quiet and not console.is_terminal
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Steps:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def at(self, step: str, done: int, total: int) -> None:
        """See `build.build.Progress`."""
        if step not in self._tasks:
            self._tasks[step] = self._bars.add_task(step, total=total)
            if self._plain:
                self._console.print(f"dustin-trt: {step} …", markup=False, soft_wrap=True)
        self._bars.update(self._tasks[step], completed=done, total=total)

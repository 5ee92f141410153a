"""`dustin-trt calibrate`."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dustin_trt.cli.progress import PLAIN_EVERY, silence_transformers


def run(recipe: Path, output: Path, resume: bool, quiet: bool) -> int:
    """Calibrate by a recipe; say where the results are."""
    from dustin_trt.calibration.recipe import Recipe
    from dustin_trt.calibration.run import calibrate

    silence_transformers()
    console = Console(stderr=True, quiet=quiet, highlight=False)
    loaded = Recipe.load(recipe)
    with Steps(console, quiet=quiet) as steps:
        config = calibrate(loaded, output, resume=resume, progress=steps)
    if not quiet:
        target, draft = config.target_heads, config.draft_heads
        print(
            f"{output / 'dustin.json'}: {len(target)} target heads, {len(draft)} draft heads, "
            f"join {config.join}, gamma {config.gamma}; windowed ARR {config.arr:.1%} at "
            f"k={config.budget}\nLook at {output / 'report.html'} before you trust it"
        )
    return 0


class Steps:
    """The steps of a calibration: a bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description:12}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._plain = not quiet and not console.is_terminal
        self._step, self._total, self._done = "", 1, 0
        self._began = self._said = time.monotonic()
        self._task = self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, step: str, total: int) -> None:
        """See `calibration.work.Progress`."""
        self._bar.update(self._task, description=step, visible=True)
        self._task = self._bar.add_task(step, total=max(1, total))
        self._step, self._total, self._done = step, max(1, total), 0
        self._began = self._said = time.monotonic()
        if self._plain:
            self._say(f"{step} …")

    def advance(self, units: int) -> None:
        """See `calibration.work.Progress`."""
        self._done += units
        self._bar.update(self._task, completed=min(self._done, self._total))
        now = time.monotonic()
        if self._plain and now - self._said >= PLAIN_EVERY:
            self._said = now
            share = min(1.0, self._done / self._total)
            left = (now - self._began) * (1 - share) / max(share, 1e-9)
            self._say(f"{self._step} {share:.0%}, about {left / 60:.1f} minutes left of this step")

    def _say(self, line: str) -> None:
        self._console.print(f"dustin-trt: {line}", markup=False, soft_wrap=True)

"""What a person sees of a batch job while it runs, and of transformers: nothing."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from dustin_trt.runtime.batch import BatchSummary

PLAIN_EVERY = 30.0
"""Seconds between the lines written where stderr is no terminal."""


class Progress:
    """A bar on a terminal, a plain line now and then elsewhere, nothing when quiet."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=quiet)
        self._quiet = quiet
        self._said = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("requests", total=None, state="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, summary: BatchSummary) -> None:
        """Show where the job stands."""
        if not self._bar.disable:
            self._bar.update(
                self._task,
                completed=summary.finished,
                total=summary.total,
                state=" · ".join(_state(summary)),
            )
        elif not self._quiet and time.monotonic() - self._said >= PLAIN_EVERY:
            self._said = time.monotonic()
            of = "" if summary.total is None else f" of {summary.total}"
            line = ", ".join([f"dustin-trt: {summary.finished}{of} finished", *_state(summary)])
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def describe(summary: BatchSummary, output: Path) -> str:
    """What a finished or interrupted job did, in one line."""
    parts = [f"{summary.done} done"]
    if summary.failed:
        parts.append(f"{summary.failed} became error lines")
    if summary.skipped:
        errors = f", {summary.skipped_failed} as error lines" if summary.skipped_failed else ""
        parts.append(f"{summary.skipped} were in {output} already{errors}")
    parts.append(f"{summary.tokens} tokens in {summary.seconds:.1f} s")
    line = "; ".join([", ".join(parts), *_speed(summary)])
    if not summary.interrupted:
        return line
    of = "" if summary.total is None else f" of {summary.total}"
    return (
        f"stopped: {summary.finished}{of} lines are saved in {output}; run the same command again "
        f"to go on ({line})"
    )


def silence_transformers() -> None:
    """No load bars and no advice from transformers: its errors still come as exceptions."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _state(summary: BatchSummary) -> list[str]:
    parts = _speed(summary)
    if summary.prefill is not None:
        parts.insert(0, "reading a prompt, {} of {} tokens".format(*summary.prefill))
    if (left := _seconds_left(summary)) is not None:
        parts.append(f"{duration(left)} left")
    return parts


def _speed(summary: BatchSummary) -> list[str]:
    parts = []
    if (speed := summary.tokens_per_second) is not None:
        parts.append(f"{speed:.1f} tokens/s in decoding")
    if (tau := summary.tau) is not None:
        parts.append(f"τ {tau:.2f}")
    return parts


def _seconds_left(summary: BatchSummary) -> float | None:
    """By the pace of the lines finished in this run; None before the first one."""
    finished = summary.done + summary.failed
    if summary.total is None or not finished:
        return None
    return summary.seconds / finished * (summary.total - summary.finished)


def duration(seconds: float) -> str:
    """Like "1 h 05 min", "2 min 03 s", "4 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"

"""Phases of a run: a command with a time budget, whose failure is kept and not raised."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.machine import ROOT, environment

_KEPT = 4000  # characters of output, for the record


@dataclass(frozen=True)
class Phase:
    """What became of a phase.

    name : for table and record
    seconds : it took
    problem : what went wrong, in one line; None where nothing did
    output : the end of what it printed
    """

    name: str
    seconds: float
    problem: str | None
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether it did what it should."""
        return self.problem is None


def run(
    name: str,
    command: Sequence[str],
    budget: float,
    *,
    variables: dict[str, str] | None = None,
    echo: bool = True,
) -> Phase:
    """Run a command in the repository's root for at most `budget` seconds.

    What it prints appears at once. Past its budget the command and its children are killed.
    """
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment() | (variables or {}), text=True, bufsize=1,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            errors="replace",
        )  # fmt: skip
    except OSError as error:
        return Phase(name, 0.0, f"cannot run {command[0]}: {error.strerror}")
    lines, overdue = _follow(process, started + budget, echo)
    seconds = time.monotonic() - started
    output = "".join(lines)[-_KEPT:]
    problem = None
    if overdue:
        problem = f"stopped after its {budget:.0f} s"
    elif process.returncode:
        problem = f"{_last_words(output)} (exit status {process.returncode})"
    return Phase(name, seconds, problem, output)


def _follow(process: subprocess.Popen[str], deadline: float, echo: bool) -> tuple[list[str], bool]:
    """Collect the output until the process ends or its time does."""
    lines: list[str] = []

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            if echo:
                print(f"  {line}", end="", flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    overdue = False
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        overdue = True
    finally:
        # Also after success: a child that holds the GPU would disturb what is timed next.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(timeout=5)
    return lines, overdue


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"

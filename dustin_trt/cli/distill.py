"""`dustin-trt distill`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dustin_trt.cli import INTERRUPTED, OK
from dustin_trt.cli.progress import PLAIN_EVERY, duration, silence_transformers


def run(
    target: Path, output: Path, text: list[str], held_out: list[str], exclude: list[str],
    quiet: bool, **options: Any,
) -> int:  # fmt: skip
    """Train a draft and say how good it is."""
    from dustin_trt.distillation.run import Texts, describe_curve, distill
    from dustin_trt.distillation.train import Settings

    silence_transformers()

    def taken(*names: str) -> dict[str, Any]:
        return {name: options.pop(name) for name in names}

    texts = Texts(
        tuple(text), tuple(held_out), tuple(exclude),
        **taken("context", "held_out_sequences", "retrieval_share"),
    )  # fmt: skip
    settings = Settings(
        layers=options.pop("layers") or (),
        **taken("vocabulary", "steps", "batch", "learning_rate", "warmup", "hard",
                "evaluate_every", "checkpoint_every", "seed"),
    )  # fmt: skip
    console = Console(stderr=True, quiet=quiet, highlight=False)
    with Watch(console, quiet=quiet) as watch:
        try:
            training = distill(target, output, texts, settings, **options, report=watch.step)
        except KeyboardInterrupt:
            if (output / "work" / "checkpoint.pt").exists():
                watch.say(f"{output} holds the last checkpoint: --resume goes on from it")
            raise
        curve = _draw(training.curve, output, target.resolve().name)
        if training.step < settings.steps:
            watch.say(
                f"stopped after step {training.step} of {settings.steps}; {output} has the draft "
                "so far, and the same command with --resume goes on"
            )
            return INTERRUPTED
    if not quiet:
        megabytes = (output / "model.safetensors").stat().st_size / 1e6
        print(
            f"{output}: {megabytes:.1f} MB; {describe_curve(training.curve)}\n"
            f"{curve}; {output / 'work'} may be deleted"
        )
    return OK


def _draw(points: list[Any], output: Path, target: str) -> str:
    """Draw the curve where that can be done; what became of it in words."""
    from dustin_trt.distillation.plot import draw_curve

    try:
        draw_curve(points, output / "acceptance.png", f"Draft of {target}")
    except ImportError as error:  # the draft is there all the same
        return f"{output / 'distill.json'} has the curve ({error})"
    return f"{output / 'acceptance.png'} has the curve"


class Watch:
    """A training: a bar on a terminal, a plain line now and then elsewhere.

    The first Ctrl-C ends the training after its step, the second one at once.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._plain = not quiet and not console.is_terminal
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, state="")
        self._began: tuple[float, int] | None = None
        self._said = time.monotonic()
        self._stopping = False
        self._before: Any = None

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if self._began:
            signal.signal(signal.SIGINT, self._before)

    def step(self, training: Any, loss: float) -> None:
        """A step is done."""
        now, steps = time.monotonic(), training.settings.steps
        if self._began is None:  # before there is a step to lose, Ctrl-C stops at once
            self._before = signal.signal(signal.SIGINT, self._interrupt)
            self._began = now, training.step
        training.stopping = self._stopping
        last = training.curve[-1]
        state = [
            f"loss {loss:.3f}",
            f"held out: greedy {last.agreement:.1%}, sampling {last.overlap:.1%}",
        ]
        began, first = self._began
        if done := training.step - first:
            pace = (now - began) / done
            tokens = training.settings.batch * training.corpus.sequences.shape[1]
            state.append(f"{tokens / pace:.0f} tokens/s")
            state.append(f"{duration(pace * (steps - training.step))} left")
        self._bar.update(self._task, completed=training.step, total=steps, state=" · ".join(state))
        if self._plain and now - self._said >= PLAIN_EVERY:
            self._said = now
            self.say(", ".join([f"step {training.step} of {steps}", *state]))

    def say(self, line: str) -> None:
        """Write one line."""
        self._console.print(f"dustin-trt: {line}", markup=False, soft_wrap=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            raise KeyboardInterrupt
        self._stopping = True
        self.say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

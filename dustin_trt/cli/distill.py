"""`dustin-trt distill`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dustin_trt.cli.progress import PLAIN_EVERY, silence_transformers


def run(
    target: Path, output: Path, text: list[str], held_out: list[str], exclude: list[str],
    quiet: bool, **options: Any,
) -> int:  # fmt: skip
    """Train a draft and say how good it is."""
    from dustin_trt.distillation.plot import draw_curve
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
    with _Watch(Console(stderr=True, quiet=quiet, highlight=False), quiet=quiet) as watch:
        try:
            training = distill(target, output, texts, settings, **options, report=watch.step)
        except KeyboardInterrupt:
            if (output / "work" / "checkpoint.pt").exists():
                watch.say(f"stopped; --resume goes on from the last checkpoint in {output}")
            raise
    draw_curve(training.curve, output / "acceptance.png", f"Draft of {target.name}")
    if not quiet:
        megabytes = (output / "model.safetensors").stat().st_size / 1e6
        print(
            f"{output}: {megabytes:.1f} MB; {describe_curve(training.curve)}\n"
            f"{output / 'acceptance.png'} has the curve; {output / 'work'} may be deleted"
        )
    return 0


class _Watch:
    """The training: a bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._plain = not quiet and not console.is_terminal
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, state="")
        self._began = self._said = time.monotonic()
        self._first = 0

    def __enter__(self) -> _Watch:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, training: Any, loss: float) -> None:
        """A step is done."""
        self._first = self._first or training.step - 1
        now, steps = time.monotonic(), training.settings.steps
        done = training.step - self._first
        speed = done * training.settings.batch * training.corpus.sequences.shape[1]
        last = training.curve[-1]
        state = (
            f"loss {loss:.3f} · held out: greedy {last.agreement:.1%}, sampling "
            f"{last.overlap:.1%} (step {last.step}) · {speed / (now - self._began):.0f} tokens/s"
        )
        self._bar.update(self._task, completed=training.step, total=steps, state=state)
        if self._plain and now - self._said >= PLAIN_EVERY:
            self._said = now
            left = (now - self._began) / done * (steps - training.step)
            self.say(f"step {training.step} of {steps} · {state} · {left / 60:.1f} minutes left")

    def say(self, line: str) -> None:
        """Write one line."""
        self._console.print(f"dustin-trt: {line}", markup=False, soft_wrap=True)

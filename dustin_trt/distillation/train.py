"""Train a student on the target's distribution over texts."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dustin_trt.config import ConfigError
from dustin_trt.distillation.corpus import Corpus, frequent_tokens
from dustin_trt.distillation.loss import Acceptance, acceptance, distillation_loss
from dustin_trt.distillation.student import Student
from dustin_trt.distillation.teacher import Teacher


class TrainingError(RuntimeError):
    """A training that cannot go on; the message says what to change."""


@dataclass(frozen=True)
class Settings:
    """How to distil; see `dustin-trt distill --help`.

    layers : target layers the student starts from
    vocabulary : tokens it can propose; 0 means all
    steps, batch : optimiser steps, and sequences in each
    learning_rate : peak of a cosine that ends at a tenth of it, after `warmup` steps
    hard : weight of the target's likeliest token against its whole distribution
    evaluate_every, checkpoint_every : in steps
    seed : decides the order of the sequences

    Raises
    ------
    ConfigError
        A number that makes no sense; says which.
    """

    layers: tuple[int, ...]
    vocabulary: int = 8192
    steps: int = 1000
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 50
    hard: float = 0.3
    evaluate_every: int = 50
    checkpoint_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_option(name)} {getattr(self, name)} is less than 1")
        for name in ("vocabulary", "warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{_option(name)} {getattr(self, name)} is less than 0")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"--learning-rate {self.learning_rate} is no number above 0")
        if not 0 <= self.hard <= 1:
            raise ConfigError(f"--hard {self.hard} is not between 0 and 1")


@dataclass(frozen=True)
class Point:
    """A point of the curve on held-out text, teacher-forced; see `loss.Acceptance`.

    step, tokens : of training so far
    """

    step: int
    tokens: int
    agreement: float
    overlap: float


@dataclass
class Training:
    """A run, and where it stands.

    Parameters
    ----------
    target : Hugging Face decoder with its weights in place
    corpus, held_out : sequences to train on, and to judge by
    work : folder of the checkpoint and of the target's hidden states, made if it does not exist
    settings : how
    always : tokens that stay in the output vocabulary however rare (ends of turn, digits)

    Attributes
    ----------
    step : optimiser steps done
    curve : what held-out text said so far
    stopping : set it, from a signal handler for one, to end `run` after the step that is under way,
        with a checkpoint

    Raises
    ------
    OSError
        No room for the target's hidden states.
    """

    target: PreTrainedModel
    corpus: Corpus
    held_out: Corpus
    work: Path
    settings: Settings
    always: Sequence[int] = ()
    step: int = 0
    curve: list[Point] = field(default_factory=list)
    stopping: bool = False

    def __post_init__(self) -> None:
        target, settings = self.target, self.settings
        self.device = target.device
        vocab_size = target.config.vocab_size
        tokens = frequent_tokens(
            self.corpus, settings.vocabulary or vocab_size, vocab_size, self.always
        )
        self.student = Student(target, settings.layers, tokens)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.student.parameters() if p.requires_grad],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
        )
        for name in ("train", "held_out"):
            (self.work / name).mkdir(parents=True, exist_ok=True)
        self.teacher = Teacher(target, self.corpus.sequences, self.work / "train")
        self.judge = Teacher(target, self.held_out.sequences, self.work / "held_out")

    @property
    def checkpoint(self) -> Path:
        """Where the training stood last."""
        return self.work / "checkpoint.pt"

    def resume(self) -> bool:
        """Continue from the checkpoint, where there is one.

        Raises
        ------
        ConfigError
            It was made with other settings, texts, or another target; says what differs.
        """
        file = self.checkpoint
        if not file.exists():
            return False
        state = torch.load(file, map_location="cpu", weights_only=True)
        there, here = state["made_with"], self._made_with()
        changed = [name for name in there if there[name] != here.get(name)]
        if words := dict.fromkeys(
            _option(name) if hasattr(self.settings, name) else "texts or target" for name in changed
        ):
            raise ConfigError(
                f"{file} was made with another {', '.join(words)}: use the same, or another "
                "--output"
            )
        self.student.load_trained(state["student"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.curve = [Point(**point) for point in state["curve"]]
        return True

    def run(
        self,
        report: Callable[[Training, float], None] | None = None,
        saved: Callable[[Training], None] | None = None,
    ) -> None:
        """Train to the last step, or until `stopping`.

        Parameters
        ----------
        report : called after each step with this object and the step's loss
        saved : called after each checkpoint

        Raises
        ------
        TrainingError
            A loss or a gradient that is not finite.
        OSError
            A checkpoint that cannot be written; the one before stays.
        """
        if not self.curve:
            self._add_point()
        done = self.step >= self.settings.steps
        while not done:
            loss = self._train(self._batch())
            self.step += 1
            last = self.step == self.settings.steps
            if last or self.step % self.settings.evaluate_every == 0:
                self._add_point()
            if report:
                report(self, loss)
            done = last or self.stopping
            if done or self.step % self.settings.checkpoint_every == 0:
                self.save()
                if saved:
                    saved(self)

    def _batch(self) -> list[int]:
        """Numbers of this step's sequences: a function of the step alone, so resuming is exact."""
        size, count = self.settings.batch, len(self.corpus)
        first = self.step * size
        orders = {
            epoch: self.corpus.order(self.settings.seed, epoch)
            for epoch in range(first // count, (first + size - 1) // count + 1)
        }
        return [orders[i // count][i % count] for i in range(first, first + size)]

    def _train(self, numbers: list[int]) -> float:
        teacher = self.teacher.hidden(numbers).flatten(0, 1).to(self._dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        with self._autocast():
            hidden = self.student(self.corpus.sequences[numbers].to(self.device))
        divergence, gradient = distillation_loss(
            hidden.detach().flatten(0, 1), teacher, self.student.head, hard=self.settings.hard
        )
        self._check("loss", divergence)
        self.optimizer.zero_grad(set_to_none=True)
        hidden.backward(gradient.view_as(hidden).to(hidden.dtype))
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self._check("gradient", float(norm))  # before it gets into the weights, and they on disk
        self.optimizer.step()
        return divergence

    def _check(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingError(
                f"the {name} of step {self.step + 1} is {value}: start again with a lower "
                "--learning-rate"
            )

    def evaluate(self) -> Acceptance:
        """Acceptance on the held-out sequences, teacher-forced."""
        found = []
        tokens = self.student.output_tokens.to(self.device)
        head = self.target.get_output_embeddings().weight.detach()
        for number, sequence in enumerate(self.held_out.sequences):
            with torch.no_grad(), self._autocast():
                hidden = self.student(sequence[None].to(self.device))[0]
            teacher = self.judge.hidden([number])[0].to(self._dtype)
            found.append(acceptance(hidden, teacher, head, tokens))
        return Acceptance(
            sum(one.agreement for one in found) / len(found),
            sum(one.overlap for one in found) / len(found),
        )

    def _add_point(self) -> None:
        seen = self.step * self.settings.batch * self.corpus.sequences.shape[1]
        now = self.evaluate()
        self.curve.append(Point(self.step, seen, round(now.agreement, 4), round(now.overlap, 4)))

    def _learning_rate(self) -> float:
        peak, warmup, steps = (
            self.settings.learning_rate, self.settings.warmup, self.settings.steps
        )  # fmt: skip
        if self.step < warmup:
            return peak * (self.step + 1) / warmup
        done = (self.step - warmup) / max(1, steps - warmup)
        return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))

    @property
    def _dtype(self) -> torch.dtype:
        """What products are computed in: the target's own dtype."""
        return self.target.dtype

    def _autocast(self) -> torch.autocast:
        low = self._dtype != torch.float32
        return torch.autocast(self.device.type, self._dtype if low else None, enabled=low)

    def _made_with(self) -> dict[str, Any]:
        sequences = self.corpus.sequences
        return {
            **asdict(self.settings),
            "sequences": list(sequences.shape),
            "checksum": int((sequences.flatten() * 31).cumsum(0)[-1] % (1 << 31)),
            "train": self.teacher.made_with,
            "held_out": self.judge.made_with,
        }

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "made_with": self._made_with(),
            "student": self.student.trained(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "curve": [asdict(point) for point in self.curve],
        }
        partial = self.checkpoint.with_suffix(".partial")
        try:
            with partial.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
        except (OSError, RuntimeError) as error:  # torch turns write errors into the latter
            free = shutil.disk_usage(self.work).free / 2**30
            partial.unlink(missing_ok=True)
            raise OSError(
                f"cannot write {self.checkpoint} ({error}; {free:.1f} GiB free there): make room "
                "and go on with --resume"
            ) from error
        partial.replace(self.checkpoint)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

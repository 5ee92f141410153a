"""What a distillation writes: a draft that is whole after every checkpoint, and how it was made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dustin_trt.config import ConfigError
from dustin_trt.distillation.train import Training
from dustin_trt.files import write_whole
from dustin_trt.models.shared_draft import save_shared_draft
from dustin_trt.runtime.loading import torch_dtype

_WORK = {"lock", "train", "held_out", "checkpoint.partial"}  # before the first checkpoint


def write_draft(training: Training, output: Path, made: dict[str, Any], save_dtype: str) -> None:
    """Write what a training has reached as a draft that can be used.

    Raises
    ------
    OSError
        A full disk, for one; the draft that is there stays.
    """
    kept = stored_dtype(save_dtype)
    student, vocabulary = training.student, training.target.config.vocab_size
    tokens = student.output_tokens
    embeddings: Any = training.target.get_input_embeddings()
    record = {
        **made,
        "steps": training.step,
        "output_tokens": len(tokens),
        "curve": [asdict(point) for point in training.curve],
    }
    try:
        save_shared_draft(
            output,
            student.config,
            {f"model.{name}": tensor.to(kept) for name, tensor in student.trained().items()},
            None if len(tokens) == vocabulary else tokens,
            embeddings.weight.detach(),
        )
        write_whole(output / "distill.json", json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise OSError(
            f"the draft of step {training.step} is not written: {error}; make room there and go on "
            "with --resume"
        ) from error


def stored_dtype(name: str) -> torch.dtype:
    """The dtype of a draft's stored weights."""
    if isinstance(dtype := torch_dtype(name), str):
        raise ConfigError(f"--save-dtype {name}: name one, like bfloat16 or float32")
    return dtype


def check_output(output: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, or a training that nobody asked to go on with."""
    work = output / "work"
    if (work / "checkpoint.pt").exists():
        if not resume:
            raise ConfigError(
                f"{output} holds a training already: --resume goes on with it, another --output "
                "starts anew"
            )
        return
    if (output / "distill.json").exists():
        raise ConfigError(f"{output} holds a finished draft already: name another --output")
    # A run that was killed before its first checkpoint has left nothing but this.
    if output.exists() and {path.name for path in output.iterdir()} - {"work"}:
        raise ConfigError(f"{output} is not empty and no draft of ours: name another --output")
    if work.exists() and {path.name for path in work.iterdir()} - _WORK:
        raise ConfigError(f"{work} is not empty and none of ours: name another --output")


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """Make the folder, and keep a second run out of it."""
    (output / "work").mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(output / "work" / "lock", timeout=0):
            yield
    except Timeout as error:
        raise ConfigError(
            f"another run is writing {output}: wait for it, or name another --output"
        ) from error


def licence_of(target: Path) -> str:
    """What a target's folder says of its licence, which is the draft's as well."""
    note = "that of the target, whose layers it was made from"
    for file in sorted(target.glob("LICEN[CS]E*")):
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        return f"{note} ({file.name}: {next((x.strip() for x in lines if x.strip()), 'empty')})"
    card = target / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = text.split("---")[1] if text.startswith("---") else ""
    found = re.search(r"^license: *(\S+)", head, re.MULTILINE)
    return f"{note} (its model card: {found[1]})" if found else note

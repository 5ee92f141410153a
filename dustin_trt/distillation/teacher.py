"""The target's final hidden states of the training sequences, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

_SPARE = 1 << 30  # bytes to leave free on the disk: checkpoints, and others' needs
_SAMPLE = 64  # elements of a weight that tell one target from another


class Teacher:
    """The target, and what it has said about the sequences so far.

    Final hidden states are a few hundred numbers a token where logits are tens of thousands, and
    the output rows turn one into the other. They are kept in bfloat16, so that a second pass over
    the texts costs a read instead of a forward pass of the target.

    Parameters
    ----------
    target : Hugging Face decoder
    sequences : Tensor `[S, T]` int64
    folder : where `teacher.bin` lies; one of other sequences or of another target is made anew

    Attributes
    ----------
    made_with : what the hidden states depend on, as a digest

    Raises
    ------
    OSError
        When the disk has no room for all of them; says how much is needed.
    """

    def __init__(self, target: PreTrainedModel, sequences: Tensor, folder: Path) -> None:
        self._inner = target.model
        self._sequences = sequences
        self.made_with = _digest(target, sequences)
        shape = (*sequences.shape, target.config.hidden_size)
        states, done = folder / "teacher.bin", folder / "teacher_done.bin"
        note = folder / "teacher.txt"
        if not (note.exists() and note.read_text(encoding="utf-8") == self.made_with):
            note.unlink(missing_ok=True)
            _reserve(states, int(np.prod(shape)) * 2)
            done.write_bytes(bytes(len(sequences)))
            note.write_text(self.made_with, encoding="utf-8")  # last: now they are as it says
        self._states = np.memmap(states, dtype=np.int16, mode="r+", shape=shape)
        self._done = np.memmap(done, dtype=np.uint8, mode="r+", shape=(len(sequences),))

    @torch.no_grad()
    def hidden(self, numbers: Sequence[int]) -> Tensor:
        """Normed final hidden states `[B, T, hidden]` bf16 of the sequences with these numbers."""
        if missing := [n for n in numbers if not self._done[n]]:
            tokens = self._sequences[missing].to(self._inner.device)
            states = self._inner(tokens, use_cache=False).last_hidden_state
            for number, state in zip(missing, states.bfloat16().cpu(), strict=True):
                self._states[number] = state.view(torch.int16).numpy()
            self._states.flush()  # before it says that they are there
            self._done[missing] = 1
        stored = torch.from_numpy(np.asarray(self._states[list(numbers)]))
        return stored.view(torch.bfloat16).to(self._inner.device)


def _reserve(file: Path, size: int) -> None:
    """Make a file of so many bytes, all of them really on the disk.

    A file that is mapped into memory and finds the disk full later kills the process.
    """
    file.unlink(missing_ok=True)
    if (free := shutil.disk_usage(file.parent).free) < size + _SPARE:
        raise OSError(
            f"the target's hidden states and checkpoints need {(size + _SPARE) / 2**30:.1f} GiB in "
            f"{file.parent} and {free / 2**30:.1f} are free: use fewer texts or another --output"
        )
    with file.open("wb") as stream:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, size)
        else:
            stream.truncate(size)


def _digest(target: PreTrainedModel, sequences: Tensor) -> str:
    """The same for a target in whatever dtype it was loaded, up to bfloat16."""
    digest = hashlib.sha256(str(tuple(sequences.shape)).encode())
    digest.update(sequences.numpy().tobytes())
    weight: Any
    for weight in target.parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLE)].bfloat16().cpu()
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()

"""The target's final hidden states of the training sequences, computed once and kept on disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

_SPARE = 1 << 30  # bytes to leave free on the disk


class Teacher:
    """The target, and what it has said about the sequences so far.

    Final hidden states are a few hundred numbers a token where logits are tens of thousands, and
    the output rows turn one into the other. They are kept in bfloat16, so that a second pass over
    the texts costs a read instead of a forward pass of the target.

    Parameters
    ----------
    target : Hugging Face decoder
    sequences : Tensor `[S, T]` int64
    folder : where `teacher.bin` lies; one of another size is made anew

    Raises
    ------
    OSError
        When the disk has no room for all of them; says how much is needed.
    """

    def __init__(self, target: PreTrainedModel, sequences: Tensor, folder: Path) -> None:
        self._inner = target.model
        self._sequences = sequences
        shape = (*sequences.shape, target.config.hidden_size)
        size = int(np.prod(shape)) * 2
        states, done = folder / "teacher.bin", folder / "teacher_done.bin"
        fresh = not (states.exists() and states.stat().st_size == size and done.exists())
        if fresh and (free := shutil.disk_usage(folder).free) < size + _SPARE:
            raise OSError(
                f"the target's hidden states need {size / 2**30:.1f} GiB in {folder} and "
                f"{free / 2**30:.1f} are free: use fewer texts or another --output"
            )
        mode: Any = "w+" if fresh else "r+"
        self._states = np.memmap(states, dtype=np.int16, mode=mode, shape=shape)
        self._done = np.memmap(done, dtype=np.uint8, mode=mode, shape=(len(sequences),))

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

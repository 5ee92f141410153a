"""What a search works on: windows of teacher-forced text, and the attention that matters there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dustin_trt.config import Head


class Window(NamedTuple):
    """Where a window stands: its history is the first `at` tokens, its first token the next one.

    span : history positions of the answer, for retrieval prompts; empty for texts
    """

    at: int
    span: tuple[int, ...] = ()


@dataclass(frozen=True)
class Samples:
    """The attention of some windows on their histories, padded with zeros to the longest, N.

    Every score is summed over softmaxes that each have mass 1 on a window's history, as `srh_score`
    gives it.

    lengths : Tensor `[S]` int32, history of each window
    span : Tensor `[S, N]` bool, where the answer stands
    truth : Tensor `[S, Γ+1, N]` fp32, by all heads of the target's query at each window token
    by_layer : Tensor `[S, L, N]` fp32, by target layer, mean over the window; or empty
    history : Tensor `[S, C, N]`, by each candidate head of the query of the last accepted token
    ages : Tensor `[S, A, N]` fp32, by all target heads of the queries `AGES` tokens back,
        0 past their own positions
    lookahead : Tensor `[S, Γ, Cd, N]`, by each candidate head of the draft at each of its steps
    lookahead_all : Tensor `[S, Γ, N]` fp32, the same by all heads of the draft
    accepted : Tensor `[S]` int32, how many of the draft's Γ tokens greedy verification keeps
    target_heads, draft_heads : the candidates, in the order of `history` and `lookahead`
    """

    lengths: Tensor
    span: Tensor
    truth: Tensor
    by_layer: Tensor
    history: Tensor
    ages: Tensor
    lookahead: Tensor
    lookahead_all: Tensor
    accepted: Tensor
    target_heads: tuple[Head, ...]
    draft_heads: tuple[Head, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def gamma(self) -> int:
        """Γ, the draft steps that were looked at."""
        return self.truth.shape[1] - 1

    @property
    def is_prompt(self) -> bool:
        """Whether the windows are answers to retrieval prompts."""
        return bool(self.span.any())

    def save(self, file: Path) -> None:
        """Write to an `.npz` (beside it first, then renamed)."""
        arrays: dict[str, Any] = {
            field.name: np.array(value, np.int32).reshape(-1, 2)
            if isinstance(value := getattr(self, field.name), tuple)
            else value.numpy()
            for field in fields(self)
        }
        partial = file.with_suffix(".partial")
        try:
            with partial.open("wb") as stream:
                np.savez(stream, **arrays)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(file)

    @classmethod
    def load(cls, file: Path) -> Samples:
        """Read what `save` wrote."""
        with np.load(file) as arrays:
            read: dict[str, Any] = {
                field.name: tuple(Head(*map(int, pair)) for pair in arrays[field.name])
                if field.name.endswith("_heads")
                else torch.from_numpy(arrays[field.name])
                for field in fields(cls)
            }
        return cls(**read)


AGES = (1, 4, 16, 64)
"""How many tokens before the window a query stands, for the paper's figure 2."""

SCALE = 1024.0
"""Candidate scores are kept as fp16 times this, which keeps small ones off the subnormals."""


def columns(heads: Sequence[Head], chosen: Sequence[Head]) -> list[int]:
    """Where the chosen heads stand among the candidates."""
    places = {head: column for column, head in enumerate(heads)}
    return [places[head] for head in chosen]

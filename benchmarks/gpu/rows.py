"""Measured rows: how they are written down as they come, and checked before they are timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import one_line, quartiles
from benchmarks.model import Work

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""`‖out - right‖ / ‖right‖`, right in float64."""


class WrongResultError(Exception):
    """An op that is not to be timed."""


class Rows:
    """Appends rows to a file of JSON lines, so that a crash loses none.

    Parameters
    ----------
    path : the file
    section : of every row
    """

    def __init__(self, path: Path, section: str) -> None:
        self._path, self._section = path, section
        self.failed = False

    def add(self, name: str, **fields: Any) -> None:
        """Write a row and print that it is there."""
        row = {"section": self._section, "name": name, **fields}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        where = " ".join(f"{k}={fields[k]}" for k in ("context", "batch", "w") if k in fields)
        print(f"{self._section}: {name} {where} {fields.get('problem') or ''}".rstrip(), flush=True)

    def timed(self, name: str, seconds: list[float], work: Work | None, **fields: Any) -> None:
        """A row with a median, its quartiles, and what the call had to do."""
        q1, median, q3 = quartiles(seconds)
        fields |= {"seconds": median, "quartiles": [q1, q3], "work": work and asdict(work)}
        self.add(name, **fields)

    def problem(self, name: str, problem: str, *, expected: bool = False, **fields: Any) -> None:
        """A row without figures; `expected` where it is no failure (a backend that refuses)."""
        self.failed |= not expected
        self.add(name, problem=problem, expected=expected, **fields)

    @contextmanager
    def guarded(self, name: str, **fields: Any) -> Iterator[None]:
        """Turn what goes wrong with one row into a row that says so."""
        try:
            yield
        except (RuntimeError, ValueError, NotImplementedError, WrongResultError) as error:
            self.problem(name, one_line(error), **fields)
            if torch.cuda.is_available():
                # After an illegal access every call fails: the process must end, not the section.
                torch.cuda.synchronize()


def check(name: str, found: Tensor, right: Tensor, dtype: torch.dtype) -> float:
    """Relative error, in the norm, of `found` against `right`, float64.

    Raises
    ------
    WrongResultError
        Where it is too large, or NaN.
    """
    error = float((found.double() - right).norm() / right.norm())
    if not error <= TOLERANCE[dtype]:
        raise WrongResultError(
            f"{name} is off by {error:.2e} in the norm, more than {TOLERANCE[dtype]:g}: not timed"
        )
    return error

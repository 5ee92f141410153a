"""What a benchmark found, and where it ran, as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dustin_trt.evaluation import machine


class BenchmarkError(RuntimeError):
    """A benchmark that must not give figures: a wrong result, or nothing left to run."""


@dataclass(frozen=True)
class Report:
    """A finished benchmark.

    Attributes
    ----------
    benchmark : "attention", "overhead" or "decode"
    settings : what was asked for
    rows : figures, one dict a line of the table; times are milliseconds
    notes : how to read them: what was checked, counted and left out
    machine : what they were measured on
    """

    benchmark: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str]
    machine: dict[str, Any] = field(default_factory=machine.describe)

    @property
    def label(self) -> str:
        """A short name for files: benchmark, models, dtype and machine."""
        model = "_".join(self.settings["models"])
        if draft := self.settings.get("draft_shape"):
            model += f"_with_{draft}"
        return f"{self.benchmark}_{model}_{self.settings['dtype']}_{machine.slug()}"

    def write_json(self, path: Path) -> Path:
        """Write to a file, or under a name of its own into a folder; returns the file."""
        path = self.place(path, ".json")
        path.write_text(json.dumps(_rounded(asdict(self)), indent=2) + "\n", encoding="utf-8")
        return path

    def place(self, path: Path, suffix: str) -> Path:
        """`path` itself, or a named file in it where it is a folder."""
        return path / (self.label + suffix) if path.is_dir() else path


def _rounded(value: Any) -> Any:
    """Five digits of every float: a clock gives no more."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def by(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows with the same values of `keys`, each group by context."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["context"]):
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups

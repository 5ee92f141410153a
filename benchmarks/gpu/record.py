"""The record of a run: written anew after every phase, so that what was measured is never lost."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import ROOT, slug
from benchmarks.gpu.phases import Phase
from benchmarks.gpu.targets import Target
from benchmarks.model import Ceilings

RESULTS = ROOT / "benchmarks" / "results"


class Record:
    """One JSON file.

    Parameters
    ----------
    folder : where it goes
    machine : of `machine.describe`
    rehearsal : whether nothing in it is a timing, which its name says too
    """

    def __init__(self, folder: Path, machine: dict[str, Any], *, rehearsal: bool) -> None:
        today = datetime.date.today().isoformat()
        name = f"rehearsal-{today}" if rehearsal else f"{slug(machine['gpu'])}-{today}"
        self.path = _free(folder / f"{name}.json")
        self._fields: dict[str, Any] = {
            "benchmark": "gpu", "date": today, "rehearsal": rehearsal, "complete": False,
            "machine": machine,
        }  # fmt: skip

    def write(
        self, phases: list[Phase], rows: list[dict[str, Any]], *, limits: Ceilings,
        assumed: list[str], targets: list[Target], complete: bool,
    ) -> None:  # fmt: skip
        """Write everything known so far, whole or not at all."""
        record = {
            **self._fields,
            "complete": complete,
            "ceilings": {
                "bytes_per_second": limits.bandwidth, "operations_per_second": limits.rate,
                "seconds_a_launch": limits.launch, "assumed": assumed,
            },
            "phases": [
                {"name": p.name, "seconds": round(p.seconds, 1), "problem": p.problem}
                for p in phases
            ],
            "targets": [target.as_dict() for target in targets],
            "rows": rows,
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(self.path)


def _free(path: Path) -> Path:
    """`path`, or the first of `name-2`, `name-3`, … that is not there: nothing is overwritten."""
    count, free = 1, path
    while free.exists():
        count += 1
        free = path.with_stem(f"{path.stem}-{count}")
    return free


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off is left out."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows

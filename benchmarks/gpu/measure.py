"""One section of the measurements, in a process of its own.

    python -m benchmarks.gpu.measure SECTION ROWS [--rehearse]

Exit status 1 where a row that was wanted could not be measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.plan import GPU, REHEARSAL, Plan
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.timing import Clock, GraphClock, RehearsalClock


@dataclass(frozen=True)
class Setting:
    """Where a section runs and writes.

    device : "cuda", or "cpu" in a rehearsal
    l2 : bytes of the cache that inputs have to exceed
    """

    plan: Plan
    rows: Rows
    clock: Clock
    device: str
    dtype: torch.dtype
    l2: int

    @property
    def rehearsal(self) -> bool:
        """Whether nothing here is a timing."""
        return not self.clock.is_real


def _ceilings(setting: Setting) -> None:
    from benchmarks.gpu.ceilings import measure

    measure(setting)


def _layer(setting: Setting) -> None:
    from benchmarks.gpu.layer import measure

    measure(setting)


def _prefill(setting: Setting) -> None:
    from benchmarks.gpu.prefill import measure

    measure(setting)


def _decode(setting: Setting) -> None:
    from benchmarks.gpu.decode import measure

    measure(setting)


def _engine(setting: Setting) -> None:
    from benchmarks.gpu.engine import measure

    measure(setting)


SECTIONS: dict[str, Callable[[Setting], None]] = {
    "ceilings": _ceilings,
    "layer": _layer,
    "prefill": _prefill,
    "decode": _decode,
    "engine": _engine,
}


def main() -> int:
    """Measure one section."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    rows = Rows(options.rows, options.section)
    if options.rehearse:
        torch.set_num_threads(1)
        if rehearsal_dtype() is torch.bfloat16:
            from benchmarks.gpu import emulated

            emulated.install()
        l2 = REHEARSAL.l2 or 0
        clock: Clock = RehearsalClock()
        setting = Setting(REHEARSAL, rows, clock, "cpu", rehearsal_dtype(), l2)
    else:
        clock = GraphClock(torch.device("cuda", 0))
        l2 = GPU.l2 or torch.cuda.get_device_properties(0).L2_cache_size
        setting = Setting(GPU, rows, clock, "cuda", torch.bfloat16, l2)
    with torch.inference_mode():
        SECTIONS[options.section](setting)
    return int(rows.failed)


def rehearsal_dtype() -> torch.dtype:
    """What the kernels under a rehearsal take: the emulated ones no fp32."""
    return torch.bfloat16 if os.environ.get("DUSTIN_REHEARSAL") == "emulated" else torch.float32


if __name__ == "__main__":
    raise SystemExit(main())

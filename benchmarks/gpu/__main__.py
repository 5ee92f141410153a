"""Build for this machine's GPU, run `tests/gpu`, measure, and write the record.

    python -m benchmarks.gpu                     # or: make gpu
    python -m benchmarks.gpu --only tests        # one phase
    python -m benchmarks.gpu --rehearse          # or: make gpu-dry; no GPU, no timings

Every phase has its own share of the time, and the later ones run where an earlier one failed. The
exit status is 0 where everything ran and was right, 1 where something was not, 2 where something is
missing here. A target that is missed is said, and is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import building, machine
from benchmarks.gpu.floors import add_floors, ceilings
from benchmarks.gpu.phases import Phase, run
from benchmarks.gpu.plan import GPU, REHEARSAL, Plan
from benchmarks.gpu.record import RESULTS, Record, read_rows
from benchmarks.gpu.table import print_phases, print_table, print_targets
from benchmarks.gpu.targets import targets
from dustin_trt.evaluation.bench.shapes import SHAPES

PHASES = ("build", "tests", "measure")
SECONDS = {
    "build": 120, "tests": 180, "ceilings": 40, "layer": 110, "prefill": 40, "decode": 110,
    "engine": 120,
}  # fmt: skip
"""Budgets: the build within two minutes, everything after it within eight, engines
within two more where TensorRT is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the phases asked for."""
    options = _parser().parse_args(arguments)
    rehearse = options.rehearse
    if absent := machine.missing(rehearse):
        print(f"make gpu: {'; '.join(absent)}", file=sys.stderr)
        return 2
    described = machine.describe(rehearse)
    print(", ".join(f"{name} {value}" for name, value in described.items() if value))
    folder = options.results or (Path(tempfile.gettempdir()) if rehearse else RESULTS)
    record = Record(folder, described, rehearsal=rehearse)
    plan = REHEARSAL if rehearse else GPU
    phases: list[Phase] = []
    with tempfile.TemporaryDirectory() as scratch:
        rows_file = Path(scratch) / "rows.jsonl"
        for phase in _phases(options, described, rows_file):
            phases.append(phase)
            print(f"{phase.name}: {phase.problem or f'done in {phase.seconds:.1f} s'}", flush=True)
            _report(record, phases, rows_file, plan, complete=False)
        _report(record, phases, rows_file, plan, complete=True, show=True, rehearsal=rehearse)
    print_phases(phases)
    print(f"\nWritten: {record.path}")
    return int(any(not phase.ok for phase in phases))


def _phases(
    options: argparse.Namespace, described: dict[str, Any], rows_file: Path
) -> Iterator[Phase]:
    """Run one phase after the other."""
    rehearse, only = options.rehearse, options.only or PHASES
    if "build" in only and not rehearse:
        print("building", flush=True)
        yield building.build_cuda(str(described["capability"]), SECONDS["build"])
        if not building.CPU_LIBRARY.is_file():
            yield building.build_cpu(SECONDS["build"])
    variables = _rehearsal_variables() if rehearse else {}
    if "tests" in only:
        yield run("tests/gpu", _pytest(options), SECONDS["tests"], variables=variables)
    if "measure" in only:
        for section in ("ceilings", "layer", "prefill", "decode", "engine"):
            command = [sys.executable, "-m", "benchmarks.gpu.measure", section, str(rows_file)]
            command += ["--rehearse"] * rehearse
            yield run(f"measure {section}", command, SECONDS[section], variables=variables)


def _rehearsal_variables() -> dict[str, str]:
    """The emulated kernels where they were built, else the ops of the CPU."""
    kind = "emulated" if building.EMULATED_LIBRARY.is_file() else "cpu"
    print(f"rehearsal with {'emulated kernels' if kind == 'emulated' else 'the ops of the CPU'}")
    return {"DUSTIN_REHEARSAL": kind, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _pytest(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    command += ["-rs", "--durations=5"]
    if options.rehearse:
        return [*command, "-k", "smallest or refused or taken"]
    if importlib.util.find_spec("xdist"):  # most of a test is its reference, on the host
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    return command


def _report(
    record: Record, phases: list[Phase], rows_file: Path, plan: Plan, *, complete: bool,
    show: bool = False, rehearsal: bool = False,
) -> None:  # fmt: skip
    """Bring the record up to date, and print it in the end."""
    rows = read_rows(rows_file)
    limits, assumed = ceilings(rows)
    own = (plan.target, plan.draft, plan.decode.target, plan.decode.draft)
    add_floors(rows, limits, SHAPES | {shape.name: shape for shape in own})
    lines = targets(rows, plan, limits)
    record.write(
        phases, rows, limits=limits, assumed=assumed, targets=lines, complete=complete
    )  # fmt: skip
    if show:
        print_table(rows, limits, assumed, rehearsal=rehearsal)
        print_targets(lines, rehearsal=rehearsal)


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rehearse", action="store_true",
                        help="tiny sizes on CPU tensors; its figures are no timings")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=PHASES, help="default: all")
    where = "default: benchmarks/results; a temporary folder in a rehearsal"
    parser.add_argument("--results", type=Path, metavar="FOLDER", help=where)
    return parser


if __name__ == "__main__":
    sys.exit(main())

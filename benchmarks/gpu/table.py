"""The one table, in plain text."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.phases import Phase
from benchmarks.gpu.targets import Target
from benchmarks.model import Ceilings

Row = dict[str, Any]


def print_table(rows: list[Row], limits: Ceilings, assumed: list[str], *, rehearsal: bool) -> None:
    """Every measured row beside its floor, then what was refused or failed."""
    if rehearsal:
        print("\nREHEARSAL: nothing was timed. All that counts is that these rows came about.")
        for row in sorted(_timed(rows), key=_order):
            print(f"  {_heading(row)}, {_name(row)}")
        _print_refused(rows)
        return
    print(
        f"\nCeilings: copy {limits.bandwidth / 1e12:.3g} TB/s, products {limits.rate / 1e12:.3g} "
        f"TFLOP/s, launch {1e6 * limits.launch:.2f} µs"
        + (f" (not measured but assumed: {', '.join(assumed)})" if assumed else "")
    )
    print(f"{'':<52} {'µs':>11} {'quartiles':>19} {'floor':>9} {'× floor':>8}  bound by")
    section = ""
    for row in sorted(_timed(rows), key=_order):
        heading = _heading(row)
        if heading != section:
            section = heading
            print(section)
        q1, q3 = (f"{1e6 * q:.4g}" for q in row.get("quartiles", (row["seconds"],) * 2))
        floor = f"{1e6 * row['floor']:.1f}" if row.get("floor") else ""
        over = f"{row['over_floor']:.2f}" if row.get("floor") else ""
        print(
            f"  {_name(row):<50} {1e6 * row['seconds']:>11.4g} {f'{q1}–{q3}':>19} {floor:>9} "
            f"{over:>8}  {row.get('bound', '')}"
        )
    _print_refused(rows)


def _print_refused(rows: list[Row]) -> None:
    """Rows without a figure; a backend that does not take something once, however often."""
    refused = {row["name"]: row for row in rows if row.get("problem") and row.get("expected")}
    failed = [row for row in rows if row.get("problem") and not row.get("expected")]
    if refused or failed:
        print("Without a figure:")
    for row in failed:
        print(f"  FAILED {_heading(row)}, {row['name']}: {row['problem']}")
    for name, row in refused.items():
        print(f"  {name}: {row['problem']}")


def print_targets(lines: list[Target], *, rehearsal: bool) -> None:
    """Target, measured, floor, distance, verdict."""
    print("\nMust reach on an H200" + (" (REHEARSAL: no verdicts)" if rehearsal else ""))
    head = f"{'':<74} {'target':>9} {'measured':>10} {'floor':>8} {'of floor':>9}  verdict"
    print(head)
    for line in lines:
        sign = "≤" if line.at_most else "≥"
        wanted = f"{sign} {line.wanted:g} {line.unit}"
        measured = "" if line.measured is None or rehearsal else f"{line.measured:.3g} {line.unit}"
        floor = "" if line.floor is None or rehearsal else f"{line.floor:.3g}"
        distance = f"{line.measured / line.floor:.2f}×" if line.floor and measured else ""
        verdict = line.verdict
        if rehearsal:
            verdict = "rows are there" if line.measured is not None else "rows are missing"
        print(f"  {line.what:<72} {wanted:>9} {measured:>10} {floor:>8} {distance:>9}  {verdict}")
        if line.note and not rehearsal:
            print(f"      {line.note}")


def print_phases(phases: list[Phase]) -> None:
    """What ran, how long, and what went wrong."""
    print("\nPhases")
    for phase in phases:
        print(f"  {'ok' if phase.ok else 'FAILED':<7} {phase.name:<32} {phase.seconds:>6.1f} s  "
              f"{phase.problem or ''}".rstrip())  # fmt: skip


def _timed(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.get("seconds")]


_SECTIONS = ("ceilings", "layer", "prefill", "decode", "engine")


def _order(row: Row) -> tuple[int, int, int]:
    return (_SECTIONS.index(row["section"]), row.get("context", 0), row.get("batch", 0))


def _heading(row: Row) -> str:
    if "context" not in row:
        return str(row["section"])
    return f"{row['section']}, {row['context']} tokens × {row['batch']}"


def _name(row: Row) -> str:
    if row["section"] == "decode":
        return f"{row['name'].removeprefix('decode, ')}, round {row['round']} (τ {row['tau']:.2f})"
    chunk = f", chunk {row['w']}" if row["section"] == "prefill" else ""
    return row["name"] + chunk

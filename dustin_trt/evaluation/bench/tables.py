"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dustin_trt.evaluation import machine
from dustin_trt.evaluation.bench.overhead import ESTIMATIONS
from dustin_trt.evaluation.bench.report import Report, by
from dustin_trt.evaluation.side_by_side import PARTS

Row = dict[str, Any]
Line = tuple[str, Callable[[Row], str]]
Lines = dict[str, Callable[[Row], str]]


def print_report(report: Report, console: Console) -> None:
    """The tables of a report, how to read them, and the machine."""
    tables = {"attention": _attention, "overhead": _overhead, "decode": _decode}
    console.print(Group(*tables[report.benchmark](report)))
    for note in report.notes:
        console.print(Padding(Text(f"· {note}"), (0, 0, 0, 1)))
    console.print(Padding(Text(f"· Machine: {machine.in_one_line()}"), (0, 0, 0, 1)))


def _attention(report: Report) -> list[Table]:
    times: Lines = {
        "full: torch SDPA": lambda row: _ms(row, "sdpa"),
        "full: dense kernel": lambda row: _ms(row, "dense"),
        "Dustin": lambda row: _ms(row, "dustin"),
        "  estimation / layers": lambda row: _ms(row, "estimation_per_layer"),
        "  selection / layers": lambda row: _ms(row, "selection_per_layer"),
        "  sparse attention": lambda row: _ms(row, "sparse"),
        "speedup": lambda row: f"{row['speedup']:.1f}×",
        "  quartiles": lambda row: _range(row["speedup_quartiles"]),
        "  bound, N/k": lambda row: f"{row['speedup_bound']:.0f}×",
    }
    kernels = {
        "sdpa": "torch SDPA",
        "dense": "dense",
        "history": "scoring, history",
        "lookahead": "scoring, lookahead",
        "sparse": "sparse",
    }
    rates: Lines = {
        "memory: stream": lambda row: f"{row['gb_per_s']['stream']:.1f}",
        "memory: random rows": lambda row: f"{row['gb_per_s']['random']:.1f}",
        **{
            name: _rate(key)
            for key, name in kernels.items()
            if key in report.rows[0]["share_of_roofline"]
        },
        "sparse, × gather + SDPA": lambda row: f"{row['sparse_over_gather']:.1f}×",
        "  quartiles": lambda row: _range(row["sparse_over_gather_quartiles"]),
    }
    tables = []
    for (shape, batch, budget), rows in by(report.rows, "shape", "batch", "budget").items():
        where = f"{shape}, batch {batch}, budget {budget}"
        tables.append(_by_context(f"{where}: ms a layer", rows, times))
        tables.append(_by_context(f"{where}: GB/s (of roofline)", rows, rates))
    return tables


def _overhead(report: Report) -> list[Table]:
    lines: Lines = {
        "full attention, ms": lambda row: f"{row['median_ms']['full']:.4g}",
        **{name: _share(key) for key, name in ESTIMATIONS.items()},
        "selection": _share("select"),
    }
    return [
        _by_context(f"{shape}, batch {batch}: share of full attention", rows, lines)
        for (shape, batch), rows in by(report.rows, "shape", "batch").items()
    ]


def _decode(report: Report) -> list[Table]:
    simulated = " (SIMULATED)" if report.settings["acceptance"] is not None else ""
    lines: Lines = {
        "tokens/s": lambda row: _number(row["tokens_per_second"]),
        "  low–high": lambda row: _range(row["tokens_per_second_range"]),
        "× vanilla*": lambda row: f"{row['speedup']:.2f}",
        "τ, SIMULATED" if simulated else "τ": lambda row: f"{row['tau']:.2f}",
        "accepted": lambda row: _percent(row["acceptance_rate"]),
        "KV read": lambda row: _percent(row["kv_read_share"]),
        "keys scored": lambda row: _percent(row["scoring_share"] or None),
    }
    parts: list[Line] = [("step", lambda row: _number(sum(row["median_ms"].values())))]
    for part in PARTS:
        parts += [(part, _took(part)), ("  at least", _floor(part))]
    names = [row["method"].replace(" (", "\n(") + " *" * row["is_baseline"] for row in report.rows]
    return [
        _table(f"Decoding{simulated}", "", names, report.rows, lines.items()),
        _table(
            "A step by part, ms, and the least its memory reads take", "", names,
            report.rows, parts,
        ),
    ]  # fmt: skip


def _by_context(title: str, rows: list[Row], lines: Lines) -> Table:
    return _table(
        title, "context, tokens", [str(row["context"]) for row in rows], rows, lines.items()
    )


def _table(
    title: str, corner: str, names: list[str], rows: list[Row], lines: Iterable[Line]
) -> Table:
    """A column a row of the report, a line a figure."""
    # No frame: five methods have to fit 80 columns.
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column(corner)
    for name in names:
        table.add_column(name, justify="right")
    for name, cell in lines:
        table.add_row(name, *map(cell, rows))
    return table


def _ms(row: Row, name: str) -> str:
    return f"{row['median_ms'][name]:.3g}"


def _range(ends: list[float]) -> str:
    return "–".join(map(_number, ends))


def _number(value: float) -> str:
    """Three digits, in four characters as a rule."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _rate(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row['gb_per_s'][name]:.1f} ({row['share_of_roofline'][name]:.0%})"


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row['share'][name]:.2%}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _took(part: str) -> Callable[[Row], str]:
    return lambda row: _number(row["median_ms"][part]) if row["floor_ms"][part] else "–"


def _floor(part: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        took, floor = row["median_ms"][part], row["floor_ms"][part]
        return f"{_number(floor)} ({floor / took:.0%})" if floor and took else ""

    return cell

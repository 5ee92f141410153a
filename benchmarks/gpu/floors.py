"""Ceilings as measured, and every row's distance from its floor."""

from __future__ import annotations

from typing import Any

from benchmarks import model
from dustin_trt.evaluation.bench.shapes import Shape

Row = dict[str, Any]


def ceilings(rows: list[Row]) -> tuple[model.Ceilings, list[str]]:
    """What this machine reaches, and the names of those that had to be assumed."""
    measured = {row["name"]: row for row in rows if row["section"] == "ceilings"}
    assumed = model.H200_COPY
    found, missing = {}, []
    for field, name, key in (
        ("bandwidth", "copy", "bytes_per_second"),
        ("rate", "product", "operations_per_second"),
        ("launch", "launch", "seconds"),
    ):
        value = measured.get(name, {}).get(key)
        if value is None:
            missing.append(field)
        found[field] = getattr(assumed, field) if value is None else value
    return model.Ceilings(**found), missing


def add_floors(rows: list[Row], limits: model.Ceilings, shapes: dict[str, Shape]) -> None:
    """Give every timed row `floor` in seconds, `over_floor` and what bounds it."""
    for row in rows:
        if row.get("work") and row.get("seconds"):
            work = model.Work(**row["work"])
            row["floor"] = work.seconds(limits)
            row["bound"] = work.bound(limits)
        elif row["section"] == "decode" and row.get("seconds"):
            row["floor"] = _step(row, limits, shapes).total
            row["bound"] = "a step's parts"
        if row.get("floor"):
            row["over_floor"] = row["seconds"] / row["floor"]


def _step(row: Row, limits: model.Ceilings, shapes: dict[str, Shape]) -> model.Step:
    size = {"batch": row["batch"], "history": row["context"]}
    target = shapes[row["target"]]
    if row["name"] == "decode, vanilla":
        return model.vanilla_step(target, limits, **size)
    return model.dustin_step(
        target, shapes[row["draft"]], limits, tau=row["tau"], budget=row["budget"],
        gamma=row["gamma"], draft_window=row["draft_window"], **size,
    )  # fmt: skip

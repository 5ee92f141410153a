"""What must be reached on an H200, and whether it was: one line each."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import model
from benchmarks.gpu.plan import Plan

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """One thing to reach.

    what : in words
    wanted : the figure, in `unit`
    at_most : whether less is better
    measured : None where it could not be measured
    floor : the bound that bytes, products and launches set, in the same unit
    """

    what: str
    wanted: float
    unit: str
    at_most: bool
    measured: float | None
    floor: float | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """One of "met", "missed" and "not measured"."""
        if self.measured is None:
            return "not measured"
        good = self.measured <= self.wanted if self.at_most else self.measured >= self.wanted
        return "met" if good else "missed"

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "verdict": self.verdict}


class Figures:
    """Looks rows up, and works out what the targets are about.

    Parameters
    ----------
    rows : with floors
    plan : what was measured; its last layer is the larger one
    """

    def __init__(self, rows: list[Row], plan: Plan, limits: model.Ceilings) -> None:
        self.rows = [row for row in rows if row.get("seconds")]
        self.plan, self.limits = plan, limits

    def find(self, name: str, context: int, batch: int) -> Row | None:
        """A timed row."""
        size = (context, batch)
        here = (r for r in self.rows if (r.get("context"), r.get("batch")) == size)
        return next((r for r in here if r["name"] == name), None)

    def seconds(self, name: str, context: int, batch: int) -> float | None:
        """Its median."""
        row = self.find(name, context, batch)
        return row and row["seconds"]

    def fastest(self, prefix: str, context: int, batch: int) -> Row | None:
        """The fastest of torch's ways at this size."""
        rows = [
            row for row in self.rows
            if row["name"].startswith(prefix) and (row["context"], row["batch"]) == (context, batch)
        ]  # fmt: skip
        return min(rows, key=lambda row: row["seconds"], default=None)

    def full(self, context: int, batch: int) -> float | None:
        """Seconds of the fastest dense verification attention of torch's."""
        row = self.fastest(f"torch dense, w={self.plan.w}:", context, batch)
        return row and row["seconds"]

    def estimation(self, context: int, batch: int, heads: str = "") -> float | None:
        """Seconds of scoring once a step, by heads that are spread or " on one KV head"."""
        parts = [
            self.seconds(f"srh_score, {which}{heads}", context, batch)
            for which in ("history", "lookahead")
        ]
        return None if None in parts else sum(filter(None, parts))

    def verification(self, context: int, batch: int) -> float | None:
        """Full attention over Dustin's, estimation and selection included."""
        full, scoring = self.full(context, batch), self.estimation(context, batch)
        sparse = self.seconds("sparse_attention", context, batch)
        selection = self.seconds("select_tokens", context, batch)
        if None in (full, scoring, sparse, selection):
            return None
        assert full and scoring and sparse and selection
        return full / (sparse + (scoring + selection) / self.plan.target.num_layers)

    def share(self, context: int, batch: int, heads: str = "") -> float | None:
        """Estimation over full attention in all layers; `heads` as in `estimation`."""
        full, scoring = self.full(context, batch), self.estimation(context, batch, heads)
        return scoring / (full * self.plan.target.num_layers) if full and scoring else None

    def of_torch(self, ours: str, theirs: str, context: int, batch: int) -> float | None:
        """Torch's fastest time over ours."""
        row, own = self.fastest(theirs, context, batch), self.seconds(ours, context, batch)
        return row["seconds"] / own if row and own else None

    def step(self, method: str) -> float | None:
        """Seconds a step, median of the rounds."""
        rows = [row["seconds"] for row in self.rows if row["name"] == f"decode, {method}"]
        return statistics.median(rows) if rows else None


def targets(rows: list[Row], plan: Plan, limits: model.Ceilings) -> list[Target]:
    """All of them, measured or not."""
    figures = Figures(rows, plan, limits)
    small, large = plan.layers
    return [
        *_ops(figures, small, large),
        *_verification(figures, small, large),
        *_dense(figures, large),
        *_decode(figures),
    ]


def _at(size: tuple[int, int]) -> str:
    return f"{size[0]} tokens × {size[1]}"


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


def _ops(figures: Figures, small: tuple[int, int], large: tuple[int, int]) -> list[Target]:
    plan, limits = figures.plan, figures.limits
    shape = plan.target

    def sparse(size: tuple[int, int], wanted: float) -> Target:
        work = model.layer_attention(shape, size[1], plan.budget, plan.w)
        return Target(
            f"sparse_attention, {_at(size)}, k={plan.budget}", wanted, "µs", True,
            _micro(figures.seconds("sparse_attention", *size)), _micro(work.seconds(limits)),
        )  # fmt: skip

    row = figures.find("srh_score, history", *large)
    share = row and 100 * row["work"]["memory"] / row["seconds"] / limits.bandwidth
    choosing = model.select_tokens(batch=large[1], history=large[0], budget=plan.budget)
    return [
        sparse(large, 12),
        sparse(small, 8),
        Target(f"srh_score, {_at(large)}, of copy bandwidth", 85, "%", False, share, 100),
        Target(
            f"select_tokens, {_at(large)}", 15, "µs", True,
            _micro(figures.seconds("select_tokens", *large)), _micro(choosing.seconds(limits)),
        ),
    ]  # fmt: skip


def _verification(figures: Figures, small: tuple[int, int], large: tuple[int, int]) -> list[Target]:
    plan, limits = figures.plan, figures.limits

    def bounds(size: tuple[int, int]) -> tuple[float, float]:
        return model.verification_speedup(
            plan.target, plan.draft, limits, history=size[0], batch=size[1], budget=plan.budget,
            w=plan.w,
        )  # fmt: skip

    lines = [
        Target(
            f"verification attention, {_at(size)}, over torch's fastest", wanted, "×", False,
            figures.verification(*size), bounds(size)[0],
            f"the floor is for equal shares of bandwidth; N/k is {size[0] / plan.budget:.0f}×",
        )
        for size, wanted in ((small, 20.0), (large, 42.0))
    ]  # fmt: skip
    share, packed = figures.share(*large), figures.share(*large, " on one KV head")
    note = "heads spread over as many KV heads as there can be, which costs most"
    if packed is not None:
        note += f"; all on one of a layer: {packed:.2%}"
    return [
        *lines,
        Target(
            f"estimation of full attention, all layers, {_at(large)}", 0.5, "%", True,
            None if share is None else 100 * share, 100 * bounds(large)[1],
            note,
        ),
    ]  # fmt: skip


def _dense(figures: Figures, large: tuple[int, int]) -> list[Target]:
    def line(what: str, ours: str, theirs: str, size: tuple[int, int]) -> Target:
        ratio = figures.of_torch(ours, theirs, *size)
        return Target(
            f"dense_attention, {what}, of torch's fastest", 70, "%", False,
            None if ratio is None else 100 * ratio, None,
        )  # fmt: skip

    windows = [
        line(f"w={w}, {_at(large)}", f"dense_attention, w={w}", f"torch dense, w={w}:", large)
        for w in (figures.plan.w, 1)
    ]
    chunks = [
        line(f"chunk {chunk} after {history}", "dense_attention, prefill", "torch dense, prefill:",
             (history, 1))
        for history, chunk in figures.plan.prefill
    ]  # fmt: skip
    return [*windows, *chunks]


def _decode(figures: Figures) -> list[Target]:
    decode = figures.plan.decode
    size = {"batch": decode.batch, "history": decode.context}
    vanilla, ours = figures.step("vanilla"), figures.step("Dustin")
    least = model.vanilla_step(decode.target, figures.limits, **size)
    bound = model.dustin_step(
        decode.target, decode.draft, figures.limits, tau=decode.tau, budget=decode.budget,
        gamma=decode.gamma, draft_window=decode.draft_window, **size,
    )  # fmt: skip
    note = "SIMULATED acceptance"
    if vanilla and ours:
        note += (
            f"; of their floors: vanilla {vanilla / least.total:.2f}×, Dustin "
            f"{ours / bound.total:.2f}×"
        )
    return [
        Target(
            f"decoding {decode.target.name} + {decode.draft.name}, "
            f"{_at((decode.context, decode.batch))}, τ={decode.tau:g}, over vanilla",
            3, "×", False,
            # At exactly this τ: the coins of a short run fall a little to one side.
            decode.tau * vanilla / ours if vanilla and ours else None,
            bound.tokens_per_second / least.tokens_per_second, note,
        )
    ]  # fmt: skip

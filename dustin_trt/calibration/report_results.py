"""What the report works out of a calibration's results, apart from words and pictures.

`results` is what `results.json` holds. Any section may be absent, or None where it was not asked
for: then these functions return None, and the report says "not measured".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

Results = dict[str, Any]


class GuardPoint(NamedTuple):
    """What a guard that verifies windows of a coverage below `threshold` densely gives.

    `dense` is the share of windows that it verifies densely, `kl` the mean over all windows, 0 for
    those.
    """

    threshold: float
    dense: float
    kl: float


def find(results: Any, *path: str) -> Any:
    """The value under these keys; None where it or a section on the way is absent."""
    for key in path:
        if not isinstance(results, dict):
            return None
        results = results.get(key)
    return results


def contexts(results: Results) -> list[int]:
    """The context lengths of the check, shortest first; empty where there was none."""
    listed = find(results, "check", "contexts") or find(results, "check", "arr") or ()
    return sorted(int(context) for context in listed)


def _known(value: float | None) -> float | None:
    """None for NaN as well: JSON of Python may hold it, and it is no measurement."""
    return value if value is not None and isfinite(value) else None


def arr(results: Results, policy: str, context: int) -> list[float] | None:
    """Windowed ARR of a policy, one value a budget."""
    return find(results, "check", "arr", str(context), policy)


def share_of_oracle(results: Results, policy: str, context: int) -> list[float | None] | None:
    """Windowed ARR of a policy as a share of the SD oracle's, one value a budget."""
    values, best = arr(results, policy, context), arr(results, "oracle", context)
    if not values or not best:
        return None
    pairs = zip(values, best, strict=True)
    return [None if value is None or not bound else _known(value / bound) for value, bound in pairs]


def share_at_budget(results: Results, policy: str, context: int) -> float | None:
    """`share_of_oracle` at the configured budget; None where that budget was not checked."""
    shares, budgets = share_of_oracle(results, policy, context), find(results, "check", "budgets")
    budget = find(results, "chosen", "budget")
    if not shares or budget not in (budgets or ()):
        return None
    return shares[budgets.index(budget)]


def shares_at_budget(results: Results, policy: str) -> list[float] | None:
    """`share_at_budget` of every context; None where one is missing."""
    shares = [share_at_budget(results, policy, context) for context in contexts(results)]
    known = [share for share in shares if share is not None]
    return known if known and len(known) == len(shares) else None


def kl_at_budget(results: Results, policy: str, context: int) -> float | None:
    """KL(full ‖ sparse logits) of a policy at the configured budget, nats a token."""
    budget = find(results, "chosen", "budget")
    for row in find(results, "check", "fidelity") or ():
        if (row["policy"], row["context"], row["budget"]) == (policy, context, budget):
            return _known(row["kl"])
    return None


def pass_keys_found(results: Results, policy: str) -> int | None:
    """Pass keys that a policy found at the configured budget."""
    budget = find(results, "chosen", "budget")
    return find(results, "check", "pass_keys", "found", policy, str(budget))


def guard_threshold(results: Results) -> float | None:
    """The calibrated threshold of the guard; None where there is none."""
    measured = find(results, "check", "guard", "threshold")
    return find(results, "chosen", "guard") if measured is None else measured


def guarded_share(results: Results) -> float | None:
    """Share of windows that the calibrated guard verifies densely."""
    coverage, threshold = find(results, "check", "guard", "coverage"), guard_threshold(results)
    if not coverage or threshold is None:
        return None
    return sum(value < threshold for value in coverage) / len(coverage)


def guard_point(coverage: Sequence[float], kl: Sequence[float], threshold: float) -> GuardPoint:
    """What the guard gives at one threshold."""
    left = [loss for value, loss in zip(coverage, kl, strict=True) if value >= threshold]
    return GuardPoint(threshold, 1 - len(left) / len(coverage), sum(left) / len(coverage))


def guard_curve(coverage: Sequence[float], kl: Sequence[float]) -> list[GuardPoint]:
    """All that a guard can give: the threshold sweeps over the windows' coverages.

    Parameters
    ----------
    coverage, kl : one value a window, what the guard looks at and what it is there to prevent

    Returns
    -------
    One point a distinct coverage, from "nothing dense" on, and at last "everything dense".
    Windows of the same coverage are guarded together, as no threshold parts them.
    """
    thresholds = [*sorted(set(coverage)), float("inf")]
    return [guard_point(coverage, kl, threshold) for threshold in thresholds]


def best_guard(kl: Sequence[float]) -> list[tuple[float, float]]:
    """The curve (dense share, mean KL) of a guard that knows every window's KL: the bound."""
    left, points = sum(kl), [(0.0, sum(kl) / len(kl))]
    for count, loss in enumerate(sorted(kl, reverse=True), start=1):
        left -= loss
        points.append((count / len(kl), max(left, 0.0) / len(kl)))
    return points


def pareto_front(costs: Sequence[float], values: Sequence[float]) -> list[int]:
    """Places of the points that no other point beats in cost or value, cheapest first.

    A point is on the front if every point that costs no more is worth less. Of equal points the
    first is kept.
    """
    order = sorted(range(len(costs)), key=lambda place: (costs[place], -values[place]))
    front: list[int] = []
    for place in order:
        if not front or values[place] > values[front[-1]]:
            front.append(place)
    return front

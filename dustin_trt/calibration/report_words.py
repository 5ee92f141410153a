"""Numbers of the report in words."""

from __future__ import annotations

import math

NOT_MEASURED = "not measured"


def percent(share: float | None) -> str:
    """A share cut, not rounded, to a tenth of a percent: 98.46 % must not look like a good 98.5 %.

    Below one percent, two significant digits.
    """
    if share is None or math.isnan(share):
        return NOT_MEASURED
    if 0 < share < 0.01:
        return f"{100 * share:.2g}\u00a0%"
    return f"{math.floor(1000 * share + 1e-6) / 10:.1f}\u00a0%"


def number(value: float | None) -> str:
    """Three decimals; two significant digits where that would say nothing, or too much."""
    if value is None or math.isnan(value):
        return NOT_MEASURED
    return f"{value:.3f}" if 0.01 <= value < 10 else f"{value:.2g}"


def count(value: int | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,}"

"""Timing that a busy machine cannot turn into a story: turns, medians, quartiles."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one figure over the rounds."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)


Variants = Mapping[str, Callable[[], object]]


def take_turns(
    groups: Sequence[Variants],
    rounds: int,
    *,
    warm_up: int = 1,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Call every variant once a round and time each call.

    What slows the machine down for a while then slows all of them. The group that begins changes
    from round to round, and with it what a variant finds in the caches; within a group the order
    stays, since some need what the one before them computed.

    Parameters
    ----------
    groups : variants by name; names are unique over all groups
    rounds : timed rounds
    warm_up : rounds before them that are not timed
    after_round : called after every round, warm-up included

    Returns
    -------
    dict
        Seconds by name, one value a round.
    """
    seconds: dict[str, list[float]] = {name: [] for group in groups for name in group}
    collecting = gc.isenabled()
    gc.disable()  # a collection would be charged to whom it happens to meet
    try:
        for turn in range(-warm_up, rounds):
            first = turn % len(groups)
            for group in [*groups[first:], *groups[:first]]:
                for name, run in group.items():
                    started = time.perf_counter()
                    run()
                    elapsed = time.perf_counter() - started
                    if turn >= 0:
                        seconds[name].append(elapsed)
            after_round()
    finally:
        if collecting:
            gc.enable()
    return seconds

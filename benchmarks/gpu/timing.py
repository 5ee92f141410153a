"""Timing on a GPU: replays of CUDA graphs between device events, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Calls = Sequence[Callable[[], object]]
"""One variant: the same work on several sets of inputs, larger than the L2 cache together."""

_GRAPH = 2e-3
"""Seconds that one replay should take at least: long beside the events' own resolution."""
_MOST_CALLS = 256


class GraphClock:
    """Times variants on the GPU.

    Every variant becomes one graph of all its calls, repeated until a replay takes a while. Each
    round replays every graph once, so that what slows the GPU for a while slows all of them.
    """

    is_real = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(
        self, variants: Mapping[str, Calls], rounds: int
    ) -> tuple[dict[str, list[float]], dict[str, str]]:
        """Seconds a call by variant, one value a round; and why a variant could not be timed."""
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
        problems: dict[str, str] = {}
        for name, calls in variants.items():
            try:
                graphs[name] = self._capture(calls)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                problems[name] = one_line(error)
                # What a broken capture left pending must not be charged to the next variant.
                torch.cuda.synchronize(self.device)
        seconds: dict[str, list[float]] = {name: [] for name in graphs}
        names = list(graphs)
        for turn in range(-2, rounds):
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                graph, count = graphs[name]
                # The replay before it keeps the GPU busy while the timed one is being launched.
                took = self._between_events(graph.replay, lead=graph.replay)
                if turn >= 0:
                    seconds[name].append(took / count)
        return seconds, problems

    def _capture(self, calls: Calls) -> tuple[torch.cuda.CUDAGraph, int]:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # handles and lazily loaded kernels, outside of the capture
            for call in calls:
                call()
        stream.synchronize()

        def once() -> None:
            for call in calls:
                call()

        estimate = max(1e-6, self._between_events(once))
        repeats = max(1, min(int(_GRAPH / estimate) + 1, _MOST_CALLS // len(calls)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                once()
        return graph, repeats * len(calls)

    def _between_events(
        self, run: Callable[[], object], lead: Callable[[], object] = lambda: None
    ) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        lead()
        before.record()
        run()
        after.record()
        after.synchronize()
        return 1e-3 * before.elapsed_time(after)


class RehearsalClock:
    """Runs every call once in the turns of `GraphClock`, where there is no GPU.

    Its seconds are those of a CPU working through tiny inputs. They stand for nothing, and are
    there so that whatever reads them runs.
    """

    is_real = False

    def time(
        self, variants: Mapping[str, Calls], rounds: int
    ) -> tuple[dict[str, list[float]], dict[str, str]]:
        """See `GraphClock.time`; one round is enough."""
        seconds: dict[str, list[float]] = {}
        problems: dict[str, str] = {}
        for name, calls in variants.items():
            started = time.perf_counter()
            try:
                for call in calls:
                    call()
            except (RuntimeError, ValueError, NotImplementedError) as error:
                problems[name] = one_line(error)
                continue
            seconds[name] = [(time.perf_counter() - started) / len(calls)]
        return seconds, problems


Clock = GraphClock | RehearsalClock


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"

"""The arithmetic of `GraphClock` on a GPU that is only made believe."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.timing import GraphClock, RehearsalClock, quartiles


class FakeGpu:
    """A GPU whose clock moves by what the calls say they take; graphs record and replay them."""

    def __init__(self):
        self.now = 0.0
        self.recording = None

    def work(self, seconds):
        if self.recording is None:
            self.now += seconds
        else:
            self.recording.append(seconds)

    def install(self, monkeypatch):
        gpu = self

        class Stream:
            def __init__(self, *_):
                self.wait_stream = self.synchronize = lambda *_: None

        class Event:
            def __init__(self, enable_timing):
                self.at = None

            def record(self):
                self.at = gpu.now

            def synchronize(self):
                pass

            def elapsed_time(self, later):
                return 1e3 * (later.at - self.at)

        class Graph:
            def __init__(self):
                self.calls = []

            def replay(self):
                gpu.now += sum(self.calls)

        @contextmanager
        def capture(graph, stream):
            gpu.recording = graph.calls
            try:
                yield
            finally:
                gpu.recording = None

        @contextmanager
        def use(_stream):
            yield

        fake = SimpleNamespace(
            Stream=Stream, Event=Event, CUDAGraph=Graph, graph=capture, stream=use,
            current_stream=lambda *_: None, synchronize=lambda *_: None,
        )  # fmt: skip
        for name, value in vars(fake).items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    fake.install(monkeypatch)
    return fake


def test_seconds_are_those_of_one_call(gpu):
    clock = GraphClock(torch.device("cuda", 0))
    variants = {
        "quick": [lambda: gpu.work(1e-5), lambda: gpu.work(3e-5)],
        "slow": [lambda: gpu.work(5e-2)],
    }
    seconds, problems = clock.time(variants, rounds=4)
    assert problems == {}
    assert seconds == {"quick": pytest.approx([2e-5] * 4), "slow": pytest.approx([5e-2] * 4)}


def test_a_replay_is_long_but_not_endless(gpu):
    clock = GraphClock(torch.device("cuda", 0))
    for took, expected in ((1e-4, 21), (1e-9, 256), (1.0, 1)):
        graph, count = clock._capture([lambda took=took: gpu.work(took)])
        assert count == expected == len(graph.calls)


def test_a_variant_that_cannot_be_captured_is_left_out(gpu):
    def refuse():
        if gpu.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    clock = GraphClock(torch.device("cuda", 0))
    seconds, problems = clock.time({"bad": [refuse], "good": [lambda: gpu.work(1e-3)]}, rounds=2)
    assert "not permitted" in problems["bad"]
    assert seconds == {"good": pytest.approx([1e-3] * 2)}


def test_the_rehearsal_runs_each_call_once():
    ran = []
    calls = {"a": [lambda: ran.append(1), lambda: ran.append(2)], "b": [lambda: 1 // 0]}
    with pytest.raises(ZeroDivisionError):  # only what an op refuses is kept
        RehearsalClock().time(calls, rounds=9)
    assert ran == [1, 2]


def test_quartiles():
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)

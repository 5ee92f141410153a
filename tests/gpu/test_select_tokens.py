"""`select_tokens` on a GPU: exactly what the specification chooses, ties and NaN included."""

from __future__ import annotations

import math

import pytest
import torch

from dustin_trt import ops
from dustin_trt.ops.select_tokens import reference
from tests.gpu.device import DEVICE, needs_gpu, replayed


def check(target, draft, lengths, budget, ahead=0, sink=4, window=16):
    """Against the reference on the CPU."""
    lengths = torch.tensor(lengths, dtype=torch.int32)
    how = (budget, ahead, sink, window)
    expected = reference(target, draft, lengths, *how)
    there = [None if x is None else x.to(DEVICE) for x in (target, draft)]
    found = ops.select_tokens(*there, lengths.to(DEVICE), *how)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine.cpu(), right)
    return found


def scores(rows, n, seed=0):
    return torch.rand(rows, n, generator=torch.Generator().manual_seed(seed))


SIGNALS = {"both": (True, True), "target": (True, False), "draft": (False, True),
           "neither": (False, False)}  # fmt: skip
LENGTHS = [0, 1, 19, 20, 21, 63, 64, 65, 500]


def test_smallest():
    check(scores(2, 30), scores(2, 30, 1), [30, 5], 12, 4, 2, 3)


@pytest.mark.parametrize("signals", SIGNALS.values(), ids=SIGNALS.keys())
@pytest.mark.parametrize("budget", [21, 64, 512])
@pytest.mark.parametrize("sink", [0, 4])
def test_grid(sink, budget, signals):
    drawn = [scores(len(LENGTHS), 500, seed) for seed in (0, 1)]
    target, draft = (x if there else None for x, there in zip(drawn, signals, strict=True))
    for ahead in (0, 1, 20, 10_000):
        for window in (0, 1, 16):
            check(target, draft, LENGTHS, budget, ahead, sink, window)


@pytest.mark.parametrize("values", [1, 2, 3, 50])
def test_ties_go_to_the_lower_index(values):
    target = (scores(3, 40_000) * values).floor()
    draft = (scores(3, 40_000, 1) * values).floor()
    check(target, draft, [40_000, 39_999, 700], 512, 200)


def test_special_values():
    special = torch.tensor(
        [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38]
    )
    generator = torch.Generator().manual_seed(0)
    target, draft = (special[torch.randint(10, (4, 3000), generator=generator)] for _ in range(2))
    for budget in (21, 300, 2000):
        check(target, draft, [3000, 2999, 1500, 20], budget, budget // 3)


@pytest.mark.parametrize("filled", [0.0, math.nan, math.inf, -math.inf])
def test_all_alike(filled):
    alike = torch.full((2, 5000), filled)
    check(alike, alike, [5000, 4097], 512, 100)


@pytest.mark.parametrize("length", [32_768, 131_072])
def test_long_rows(length):
    target, draft = (scores(4, length, seed).softmax(-1) for seed in (0, 1))
    check(target, draft, [length, length - 1, length // 2, 513], 512, 246)
    check(target, None, [length, 600, 512, 0], 4096)


def test_scores_that_differ_in_the_last_bits():
    near = 1 + torch.arange(20_000).flip(0)[None] * 2**-23
    check(near, None, [20_000], 512)
    check(-near, None, [20_000], 512)


def test_scores_are_left_alone_and_rows_stand_for_themselves():
    target, draft = scores(3, 900).to(DEVICE), scores(3, 900, 1).to(DEVICE)
    before = target.clone(), draft.clone()
    lengths = torch.tensor([900, 40, 333], dtype=torch.int32, device=DEVICE)
    whole = ops.select_tokens(target, draft, lengths, 64, 20, 4, 16)
    assert torch.equal(target, before[0]) and torch.equal(draft, before[1])
    for b in range(3):
        one = slice(b, b + 1)
        alone = ops.select_tokens(target[one], draft[one], lengths[one], 64, 20, 4, 16)
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, whole, strict=True))


def test_wider_rows_than_histories():
    target = scores(2, 1000)[:, :700]  # strided rows
    assert not target.is_contiguous()
    check(target, None, [700, 65], 64)


@needs_gpu
def test_a_graph_replays_with_other_scores_and_lengths():
    target, draft = scores(3, 2000).to(DEVICE), scores(3, 2000, 1).to(DEVICE)
    lengths = torch.tensor([2000, 40, 333], dtype=torch.int32, device=DEVICE)
    found = {}

    def call():
        found["is"] = ops.select_tokens(target, draft, lengths, 64, 20, 4, 16)

    replay = replayed(call)
    for seed, other in enumerate(([2000, 40, 333], [1, 1999, 64], [0, 65, 2000])):
        target.copy_(scores(3, 2000, 10 + seed))
        draft.copy_(scores(3, 2000, 20 + seed))
        lengths.copy_(torch.tensor(other))
        found["is"][0].fill_(-7)
        replay()
        expected = check(target.cpu(), draft.cpu(), other, 64, 20)
        assert all(map(torch.equal, found["is"], expected))

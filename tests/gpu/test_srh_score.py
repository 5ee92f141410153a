"""`srh_score` on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import right
from dustin_trt import ops
from tests.gpu.cases import DIMS, PAGES, make
from tests.gpu.device import DEVICE, DTYPES, needs_gpu, replayed

LENGTHS = [0, 1, 63, 200, 517]
HEADS = {
    "all of 4 over 4": (4, 4, [0, 1, 2, 3]),
    "one of 8 over 2": (8, 2, [5]),
    "unordered of 8 over 2": (8, 2, [7, 0, 4, 3]),
    "group borders of 28 over 4": (28, 4, [6, 7, 13, 14, 20, 21, 27]),
    "all of 16 over 1": (16, 1, list(range(16))),
    "one head twice": (4, 2, [3, 3]),
}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


class Scoring:
    """A case, some heads, and R queries of each."""

    def __init__(self, lengths, name, rows=1, **options):
        heads, kv_heads, scored = HEADS[name]
        self.case = make(lengths, w=max(rows, 1), heads=(heads, kv_heads), **options)
        self.kv_heads = [head // (heads // kv_heads) for head in scored]
        self.queries = self.case.q[:, :rows][:, :, scored].contiguous()

    def add_to(self, scores):
        k, _, pages, lengths = self.case.cache
        ops.srh_score(self.queries, self.kv_heads, k, pages, lengths, self.case.scale, scores)
        return scores

    def right(self, row):
        read = torch.arange(int(self.case.lengths[row]), device=DEVICE)
        keys, _ = self.case.read(row, read)
        return right.scores(self.queries[row], self.kv_heads, keys, self.case.scale)

    def check(self, width):
        batch = len(self.case.lengths)
        start = torch.rand(batch, width, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        scores = self.add_to(start.clone())
        for b in range(batch):
            n = int(self.case.lengths[b])
            assert torch.equal(scores[b, n:], start[b, n:]), "written past the history"
            if n:
                expected = start[b, :n].double() + self.right(b)
                torch.testing.assert_close(scores[b, :n].double(), expected, rtol=2e-5, atol=2e-6)


def test_smallest():
    Scoring([0, 3, 9], "one of 8 over 2", 2, dim=64, page_size=4).check(11)


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", HEADS)
def test_grid(name, dim, dtype):
    for rows in (1, 2, 3, 4, 5, 8, 16):
        page_size = PAGES[rows % len(PAGES)]
        scoring = Scoring(LENGTHS, name, rows, dim=dim, page_size=page_size, dtype=dtype, seed=rows)
        scoring.check(530)


@dtypes
@pytest.mark.parametrize("dim", [64, 128])
def test_long_histories_are_split(dim, dtype):
    Scoring([40_000, 0, 12_345], "unordered of 8 over 2", 4, dim=dim, dtype=dtype).check(40_000)


def test_layers_add_up():
    several = [Scoring(LENGTHS, "all of 4 over 4", seed=seed) for seed in (0, 9, 20)]
    scores = torch.zeros(len(LENGTHS), 517, device=DEVICE)
    for scoring in several:
        scoring.add_to(scores)
    mass = scores.sum(1)
    expected = [3.0 * 4 * (n > 0) for n in LENGTHS]
    torch.testing.assert_close(mass.cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_runs_are_equal_and_a_row_does_not_see_its_neighbours():
    scoring = Scoring(LENGTHS, "unordered of 8 over 2", 4, page_size=16)
    scores = scoring.add_to(torch.zeros(len(LENGTHS), 517, device=DEVICE))
    for _ in range(5):
        again = scoring.add_to(torch.zeros(len(LENGTHS), 517, device=DEVICE))
        assert torch.equal(again, scores)
    whole, queries = scoring.case, scoring.queries
    for b in range(len(LENGTHS)):
        scoring.case, scoring.queries = whole.row(b), queries[b : b + 1]
        alone = scoring.add_to(torch.zeros(1, 517, device=DEVICE))
        assert torch.equal(alone[0], scores[b])


def test_huge_logits_stay_finite():
    scoring = Scoring([300], "one of 8 over 2")
    scoring.queries *= 1000
    scores = scoring.add_to(torch.zeros(1, 300, device=DEVICE))
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(float(scores.sum()), 1.0, rtol=1e-4, atol=1e-4)


@needs_gpu
def test_a_graph_replays_with_other_lengths():
    scoring = Scoring([300, 40], "unordered of 8 over 2", 4, page_size=16, room=400)
    scores = torch.zeros(2, 700, device=DEVICE)
    replay = replayed(lambda: scoring.add_to(scores))
    for lengths in ([7, 650], [0, 64], [700, 1]):
        options = {"page_size": 16, "room": 700 - max(lengths)}
        fresh = Scoring(lengths, "unordered of 8 over 2", 4, **options, seed=5)
        scoring.queries.copy_(fresh.queries)
        for mine, its in zip(scoring.case.cache, fresh.case.cache, strict=True):
            mine.copy_(its)
        scores.zero_()
        replay()
        assert torch.equal(scores, fresh.add_to(torch.zeros(2, 700, device=DEVICE)))

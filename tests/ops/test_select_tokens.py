from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin_trt.ops import select_tokens
from tests.ops.kernels import each_kernel  # noqa: F401 — on every instruction set

FEW_VALUES = (-math.inf, -1.0, -0.0, 0.0, 0.25, 1.0)


@dataclass(frozen=True)
class Case:
    target: list[list[float]] | None
    draft: list[list[float]] | None
    lengths: list[int]
    budget: int
    lookahead: int
    sink: int
    window: int

    def run(self) -> tuple[list[list[int]], list[int]]:
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        indices, counts = select_tokens(
            _tensor(self.target), _tensor(self.draft), lengths,
            self.budget, self.lookahead, self.sink, self.window,
        )  # fmt: skip
        assert indices.dtype == counts.dtype == torch.int32
        assert indices.shape == (len(self.lengths), self.budget)
        return indices.tolist(), counts.tolist()

    def expected(self, row: int) -> list[int]:
        """The paper's step 3 with Python sets."""
        length = self.lengths[row]
        tokens = set(range(length))
        first = {j for j in tokens if j < self.sink}
        last = {j for j in tokens if j >= length - self.window}
        target = None if self.target is None else self.target[row]
        draft = None if self.draft is None else self.draft[row]
        wanted = min(self.budget, length)
        chosen = first | last
        if draft is not None:
            share = self.lookahead if target is not None else wanted
            chosen |= set(_best(draft, tokens - chosen, min(share, wanted - len(chosen))))
        fill = target if target is not None else list(range(length))  # without scores: recency
        chosen |= set(_best(fill, tokens - chosen, wanted - len(chosen)))
        return sorted(chosen)


def _best(scores: list[float], tokens: set[int], count: int) -> list[int]:
    return sorted(tokens, key=lambda j: (-scores[j], j))[: max(0, count)]


def _tensor(rows: list[list[float]] | None) -> torch.Tensor | None:
    return None if rows is None else torch.tensor(rows, dtype=torch.float32).view(len(rows), -1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    budget = draw(st.integers(1, 12))
    sink = draw(st.integers(0, budget))
    window = draw(st.integers(0, budget - sink))
    lengths = draw(st.lists(st.integers(0, 3 * budget) | st.just(budget), min_size=1, max_size=4))
    columns = max(lengths) + draw(st.integers(0, 2))

    def scores() -> list[list[float]]:
        row = st.lists(st.sampled_from(FEW_VALUES), min_size=columns, max_size=columns)
        # What lies past a row's history must not matter.
        return [draw(row)[:n] + [math.nan] * (columns - n) for n in lengths]

    return Case(
        target=scores() if draw(st.booleans()) else None,
        draft=scores() if draw(st.booleans()) else None,
        lengths=lengths,
        budget=budget,
        lookahead=draw(st.integers(0, budget + 2)),
        sink=sink,
        window=window,
    )


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(cases())
def test_equals_the_set_construction(case):
    indices, counts = case.run()
    for row, length in enumerate(case.lengths):
        size = min(case.budget, length)
        chosen, padding = indices[row][:size], indices[row][size:]
        assert counts[row] == size
        assert set(padding) <= {-1}
        assert all(a < b for a, b in itertools.pairwise(chosen))
        assert set(range(min(case.sink, length))) <= set(chosen)
        assert set(range(max(0, length - case.window), length)) <= set(chosen)
        assert chosen == case.expected(row)


HAND_WORKED = {
    # 10 tokens, sink 1, window 2: token 0 and tokens 8, 9 are given, three more are chosen.
    "target only": ([0, 1, 5, 1, 9, 1, 1, 7, 0, 0], None, 2, [0, 2, 4, 7, 8, 9]),
    "draft only": (None, [0, 1, 5, 1, 9, 1, 1, 7, 0, 0], 0, [0, 2, 4, 7, 8, 9]),
    "both": ([0, 1, 2, 3, 4, 5, 6, 7, 0, 0], [9, 8, 7, 6, 5, 4, 3, 2, 9, 9], 2, [0, 1, 2, 7, 8, 9]),
    "both, same best": ([0, 9, 8, 7, 6, 5, 4, 3, 9, 9],) * 2 + (2, [0, 1, 2, 3, 8, 9]),
    "lookahead takes all": ([0, 0, 0, 0, 0, 9, 9, 9, 0, 0], [0, 9, 9, 9, 0, 0, 0, 0, 0, 0], 3,
                            [0, 1, 2, 3, 8, 9]),
    "lookahead takes none": ([0, 0, 0, 0, 0, 9, 9, 9, 0, 0], [0, 9, 9, 9, 0, 0, 0, 0, 0, 0], 0,
                             [0, 5, 6, 7, 8, 9]),
    "neither": (None, None, 2, [0, 5, 6, 7, 8, 9]),
    "all tied": ([1] * 10, [1] * 10, 1, [0, 1, 2, 3, 8, 9]),
    "all -inf": ([-math.inf] * 10, None, 0, [0, 1, 2, 3, 8, 9]),
    "zeros of either sign tie": ([0, -0.0, 0.0, -0.0, 0.0, 0.0, 0, 0, 0, 0], None, 0,
                                 [0, 1, 2, 3, 8, 9]),
}  # fmt: skip


@pytest.mark.parametrize(("target", "draft", "lookahead", "chosen"), HAND_WORKED.values(),
                         ids=HAND_WORKED.keys())  # fmt: skip
def test_hand_worked(target, draft, lookahead, chosen):
    case = Case(target and [target], draft and [draft], [10], 6, lookahead, 1, 2)
    assert case.run() == ([chosen], [6])


@pytest.mark.parametrize("length", [0, 1, 5, 6])
def test_takes_everything_within_the_budget(length):
    scores = [[math.nan] * 7]
    indices, counts = Case(scores, scores, [length], 6, 3, 2, 2).run()
    assert indices == [[*range(length), *[-1] * (6 - length)]]
    assert counts == [length]


def test_ties_go_to_the_lower_index_in_a_long_row():
    """Long enough for torch to leave the small sorts, which happen to be stable."""
    length, budget = 40_000, 300
    scores = (torch.arange(length) % 2).float()[None]
    indices, _ = select_tokens(
        scores, None, torch.tensor([length], dtype=torch.int32), budget, 0, 0, 0
    )
    assert indices[0].tolist() == list(range(1, 2 * budget, 2))


def test_rows_do_not_see_each_other():
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.rand(2, 3, 50, generator=generator)
    lengths = torch.tensor([50, 9, 31], dtype=torch.int32)
    indices, counts = select_tokens(target, draft, lengths, 12, 4, 2, 3)
    for b in range(3):
        row = slice(b, b + 1)
        alone = select_tokens(target[row], draft[row], lengths[row], 12, 4, 2, 3)
        assert torch.equal(alone[0], indices[row])
        assert torch.equal(alone[1], counts[row])


def test_scores_are_left_alone():
    target, draft = torch.rand(2, 1, 30, generator=torch.Generator().manual_seed(0))
    before = target.clone(), draft.clone()
    lengths = torch.tensor([30], dtype=torch.int32)
    select_tokens(target, draft, lengths, 8, 3, 1, 1)
    assert torch.equal(target, before[0])
    assert torch.equal(draft, before[1])
    assert lengths.tolist() == [30]

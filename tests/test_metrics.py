from __future__ import annotations

import pytest
import torch

from dustin_trt.metrics import attention_recovery_rate


def _arr(scores, indices, counts) -> list[float]:
    return attention_recovery_rate(
        torch.tensor(scores, dtype=torch.float32),
        torch.tensor(indices, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
    ).tolist()


@pytest.mark.parametrize(
    ("indices", "count", "share"),
    [
        ([0, 1, 2, 3], 4, 1.0),
        ([0, 3, -1, -1], 2, 0.6),  # (1 + 5) / 10
        ([1, -1, -1, -1], 1, 0.1),
        ([2, -1, -1, -1], 1, 0.3),
        ([-1, -1, -1, -1], 0, 0.0),
        ([0, 3, 2, 1], 2, 0.6),  # what lies past the count is not read
    ],
)
def test_hand_worked(indices, count, share):
    assert _arr([[1, 1, 3, 5]], [indices], [count]) == pytest.approx([share])


def test_rows_are_apart():
    """Each row has its own total and its own count; the padding of one is no token of another."""
    scores = [[2, 2, 4, 0], [1, 3, 0, 0], [0.5, 0.25, 0.125, 0.125]]
    indices = [[0, 2, -1], [1, -1, -1], [0, 1, 3]]
    assert _arr(scores, indices, [2, 1, 3]) == pytest.approx([6 / 8, 3 / 4, 0.875])


def test_an_empty_history_is_fully_recovered():
    assert _arr([[0, 0], [1, 3]], [[-1], [0]], [0, 1]) == [1.0, 0.25]


def test_scores_are_left_alone():
    scores = torch.tensor([[1.0, 2.0, 3.0]])
    attention_recovery_rate(scores, torch.tensor([[0, -1]]).int(), torch.tensor([1]).int())
    assert scores.tolist() == [[1.0, 2.0, 3.0]]

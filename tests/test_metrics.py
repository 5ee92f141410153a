from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dustin_trt.metrics import (
    acceptance_length,
    attention_recovery_rate,
    greedy_agreement,
    kl_divergence,
    oracle_indices,
    windowed_attention_recovery_rate,
)


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


def test_a_score_that_is_no_number_is_no_recovery():
    assert math.isnan(_arr([[1, math.nan]], [[0]], [1])[0])


def test_a_longer_neighbour_changes_no_bit():
    """A row's zeros past its history, of which the longest row decides how many there are."""
    for seed in range(50):
        row = torch.rand(777, generator=torch.Generator().manual_seed(seed)).tolist()
        chosen = [list(range(0, 777, 3))]
        assert _arr([row], chosen, [259]) == _arr([row + [0.0] * 3000], chosen, [259])


def test_no_history_at_all_is_fully_recovered():
    assert attention_recovery_rate(
        torch.zeros(2, 0), torch.full((2, 3), -1).int(), torch.zeros(2).int()
    ).tolist() == [1, 1]


# Three steps on four history tokens; tokens 0 and 3 hold
#   step 0: (1 + 5) / (1 + 1 + 3 + 5) = 0.6
#   step 1: 0.25 / (0.25 + 0.25)      = 0.5
#   step 2: 0 / 2                     = 0
# so windowed ARR is 1.1 / 3. The ratio of the sums would be 6.25 / 12.5 = 0.5.
WINDOW = [[1, 1, 3, 5], [0.25, 0, 0.25, 0], [0, 0, 2, 0]]


def _windowed(attention, indices) -> Tensor:
    return windowed_attention_recovery_rate(
        torch.tensor(attention, dtype=torch.float32), torch.tensor(indices, dtype=torch.int32)
    )


class TestWindowedAttentionRecoveryRate:
    @pytest.mark.parametrize(
        ("indices", "rate"),
        [
            ([0, 3], 1.1 / 3),
            ([0, 3, -1, -1], 1.1 / 3),
            ([-1, 3, 0, -1], 1.1 / 3),
            ([2], (0.3 + 0.5 + 1) / 3),
            ([0, 1, 2, 3], 1),
            ([-1, -1], 0),
        ],
    )
    def test_hand_worked(self, indices, rate):
        result = _windowed(WINDOW, indices)
        assert result.shape == ()
        assert result.dtype == torch.float32
        assert result.item() == pytest.approx(rate)

    def test_windows_have_indices_of_their_own(self):
        # The second window's steps are [5, 3, 1, 1], …: its tokens 0 and 3 hold
        # (6 / 10 + 0 / 0.5 + 0 / 2) / 3 = 0.2, its token 1 (3 / 10 + 0.25 / 0.5 + 2 / 2) / 3 = 0.6.
        windows = [WINDOW, [step[::-1] for step in WINDOW]]
        assert _windowed(windows, [[0, 3], [0, 3]]).tolist() == pytest.approx([1.1 / 3, 1.1 / 3])
        assert _windowed(windows, [[0, 3], [1, -1]]).tolist() == pytest.approx([1.1 / 3, 0.6])

    def test_a_step_without_attention_is_recovered(self):
        # 0 of 0, then 1 of 4.
        assert _windowed([[0, 0], [1, 3]], [0]).item() == pytest.approx((1 + 0.25) / 2)

    def test_an_empty_history_is_recovered(self):
        assert _windowed(torch.zeros(3, 0).tolist(), [-1, -1]).item() == 1
        assert _windowed(torch.zeros(2, 3, 0).tolist(), [[-1], [-1]]).tolist() == [1, 1]

    def test_one_step_is_plain_arr(self):
        scores = torch.rand(4, 1, 30, generator=torch.Generator().manual_seed(0))
        indices = torch.stack([torch.randperm(30)[:7] for _ in range(4)]).int()
        assert torch.equal(
            windowed_attention_recovery_rate(scores, indices),
            attention_recovery_rate(scores[:, 0], indices, torch.full((4,), 7).int()),
        )


# Eighths, which sum exactly. The means of the two steps are 2, 3, 2, 3, 0 (eighths): the two best
# are 1 and 3; of 0 and 2, which are equal, 0 is the next. Step 0 alone would take 1 first and then
# 0, step 1 alone 3 and then 0.
PEEK = [[2 / 8, 5 / 8, 2 / 8, 2 / 8, 0], [2 / 8, 1 / 8, 2 / 8, 4 / 8, 0]]


class TestOracleIndices:
    @pytest.mark.parametrize(
        ("budget", "chosen"),
        [
            (1, [1]),
            (2, [1, 3]),
            (3, [0, 1, 3]),
            (4, [0, 1, 2, 3]),
            (5, [0, 1, 2, 3, 4]),
            (7, [0, 1, 2, 3, 4, -1, -1]),
        ],
    )
    def test_hand_worked(self, budget, chosen):
        indices = oracle_indices(torch.tensor(PEEK), budget)
        assert indices.dtype == torch.int32
        assert indices.tolist() == chosen

    def test_windows_are_apart(self):
        windows = torch.tensor([PEEK, [step[::-1] for step in PEEK]])
        assert oracle_indices(windows, 3).tolist() == [[0, 1, 3], [1, 2, 3]]

    def test_equal_means_stay_equal_whatever_the_order_of_the_steps(self):
        # In fp32 (1 + e) + e is 1 for e = 2^-24, but (e + e) + 1 is not.
        e = 2.0**-24
        assert oracle_indices(torch.tensor([[1, e], [e, e], [e, 1]]), 1).tolist() == [0]

    def test_an_empty_history_has_nothing_to_choose(self):
        assert oracle_indices(torch.zeros(3, 0), 2).tolist() == [-1, -1]

    def test_no_other_set_holds_more_of_the_mean(self):
        """Against every set of four of nine tokens."""
        attention = torch.rand(3, 9, generator=torch.Generator().manual_seed(1))
        mean = attention.mean(0)
        best = max(itertools.combinations(range(9), 4), key=lambda s: mean[list(s)].sum().item())
        assert oracle_indices(attention, 4).tolist() == list(best)


def _naive_kl(full: list[float], sparse: list[float]) -> float:
    def log_probabilities(logits):
        top = max(logits)
        log_sum = top + math.log(math.fsum(math.exp(x - top) for x in logits))
        return [x - log_sum for x in logits]

    p, q = log_probabilities(full), log_probabilities(sparse)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def _kl(full, sparse) -> float:
    return kl_divergence(torch.tensor(full), torch.tensor(sparse)).item()


class TestKLDivergence:
    def test_hand_worked(self):
        # full (1/2, 1/2), sparse (1/4, 3/4):
        #   1/2 ln((1/2) / (1/4)) + 1/2 ln((1/2) / (3/4)) = 1/2 ln 2 + 1/2 ln(2/3) = 1/2 ln(4/3)
        # The other way round it is 1/4 ln(1/2) + 3/4 ln(3/2) = 0.1308.
        halves, quarters = [7.0, 7.0], [-2.0, -2.0 + math.log(3)]
        assert _kl(halves, quarters) == pytest.approx(math.log(4 / 3) / 2)
        assert _kl(quarters, halves) == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2))

    def test_a_token_that_full_verification_excludes_adds_nothing(self):
        # full (1, 0), sparse (1/4, 3/4): ln(1 / (1/4)).
        assert _kl([0.0, -math.inf], [0.0, math.log(3)]) == pytest.approx(math.log(4))
        assert _kl([0.0, -math.inf], [3.0, -math.inf]) == 0
        assert _kl([0.0, -2000.0], [3.0, -math.inf]) == 0  # e^-2000 is 0 too

    def test_a_token_that_sparse_verification_alone_excludes_costs_everything(self):
        assert _kl([0.0, 0.0], [0.0, -math.inf]) == math.inf

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    def test_equal_logits_lose_nothing(self, dtype):
        logits = torch.randn(3, 5, 999, generator=torch.Generator().manual_seed(0)).to(dtype) * 9
        assert kl_divergence(logits, logits).tolist() == [[0.0] * 5] * 3
        shifted = kl_divergence(logits.double(), logits.double() + 1 / 3)
        assert (shifted >= 0).all() and (shifted < 1e-12).all()

    @pytest.mark.parametrize("scale", (1e-3, 1.0, 30.0))
    def test_equals_the_formula_in_plain_python(self, scale):
        generator = torch.Generator().manual_seed(2)
        full = 5 * torch.randn(2, 2, 400, generator=generator)
        sparse = full + scale * torch.randn(2, 2, 400, generator=generator)
        result = kl_divergence(full, sparse)
        assert result.shape == (2, 2)
        assert result.dtype == torch.float32
        for i, j in itertools.product(range(2), range(2)):
            naive = _naive_kl(full[i, j].tolist(), sparse[i, j].tolist())
            assert result[i, j].item() == pytest.approx(naive, rel=1e-5)

    def test_what_is_no_number_is_not_taken_for_agreement(self):
        assert math.isnan(_kl([0.0, math.nan], [0.0, 0.0]))
        assert math.isnan(_kl([0.0, 0.0], [0.0, math.nan]))
        assert math.isnan(_kl([-math.inf, -math.inf], [0.0, 0.0]))


def test_greedy_agreement():
    full = torch.tensor([[[0.0, 2, 1], [3, 3, 0]], [[1, 0, 0], [-math.inf, -math.inf, -9]]])
    sparse = torch.tensor([[[5.0, 9, 7], [1, 2, 0]], [[0, 0, 1], [-math.inf, -9, 0]]])
    # Token 1 and 1; 0 (the lower of equals) and 1; 0 and 2; 2 and 2.
    assert greedy_agreement(full, sparse).tolist() == [[True, False], [False, True]]
    assert greedy_agreement(sparse, full).dtype == torch.bool


def test_acceptance_length():
    drafts = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, 6], [4, -1, -1], [-1, -1, -1]])
    target = torch.tensor([[4, 5, 6], [4, 5, 0], [4, 0, 6], [0, 5, 6], [4, 5, 6], [4, 5, 6]])
    # All; two; one, since what agrees after a rejection does not count; none; the padding never.
    assert acceptance_length(drafts, target).tolist() == [3, 2, 1, 0, 1, 0]
    assert acceptance_length(drafts[:, :0], target[:, :0]).tolist() == [0] * 6

"""Values, costs, tuning and thresholds against numbers worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dustin_trt.calibration.check import acceptance, guard_threshold
from dustin_trt.calibration.cost import CostModel
from dustin_trt.calibration.recipe import Search
from dustin_trt.calibration.samples import SCALE, Samples
from dustin_trt.calibration.tune import Trial, pareto_front, pick, settle_join, tune
from dustin_trt.calibration.value import Choice, Judge, Value, recall, select
from dustin_trt.config import Head, ModelSpec
from dustin_trt.metrics import windowed_attention_recovery_rate

HEADS = (Head(0, 0), Head(0, 1))


def _spec(layers: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec("LlamaForCausalLM", layers, 2 * kv_heads, kv_heads, head_dim, 8, 10, 64)


def _samples(truth, history, lookahead, span=(), accepted=(0,)) -> Samples:
    """One window over as many history tokens as `truth` has columns; one candidate head each."""
    truth = torch.tensor(truth, dtype=torch.float32)[None]
    n = truth.shape[-1]
    marked = torch.zeros(1, n, dtype=torch.bool)
    marked[0, list(span)] = True
    rows = torch.tensor(lookahead, dtype=torch.float32)
    return Samples(
        lengths=torch.full((1,), n, dtype=torch.int32),
        span=marked,
        truth=truth,
        by_layer=torch.empty(1, 0, n),
        history=(torch.tensor(history) * SCALE).half()[None, None],
        ages=torch.tensor(history)[None, None].expand(1, 4, n),
        lookahead=(rows * SCALE).half()[None, :, None],
        lookahead_all=rows[None],
        accepted=torch.tensor(accepted, dtype=torch.int32),
        target_heads=HEADS[:1],
        draft_heads=HEADS[:1],
    )


# Six history tokens. The window's first query looks at tokens 1 and 2, its second at 2 and 4.
TEXT = _samples(
    truth=[[0.0, 0.6, 0.4, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0, 0.5, 0.0]],
    history=[0.1, 0.5, 0.3, 0.05, 0.0, 0.05],
    lookahead=[[0.0, 0.0, 0.2, 0.0, 0.7, 0.1]],
)
PROMPT = _samples(
    truth=[[0.2] * 6, [0.2] * 6],
    history=[0.0, 0.0, 0.0, 0.6, 0.3, 0.1],
    lookahead=[[0.0, 0.9, 0.1, 0.0, 0.0, 0.0]],
    span=(1, 3),
)
BOTH = Choice(target_heads=HEADS[:1], draft_heads=HEADS[:1], sink=0, window=0, gamma=1)


def test_history_alone():
    # Two tokens by the history: 1 and 2. Step one keeps 1.0, step two 0.5: ARR 0.75. The oracle by
    # the mean (0, .3, .45, 0, .25, 0) takes 1 and 2 too. On the prompt 3 and 4: one of 1 and 3.
    value = Judge([TEXT, PROMPT], (2,), recall_weight=2.0).value(BOTH.replace(draft_heads=()))
    assert value == pytest.approx(Value(0.75, 0.75, 0.5, 0.75 / 0.75 + 2 * 0.5))


def test_split_takes_the_lookahead_first():
    # m = 1 of 2: token 4 by the lookahead, then 1 by the history: .6 and .5 are kept, .55 of .75.
    value = Judge([TEXT, PROMPT], (2,), 1.0).value(BOTH.replace(join="split", share=0.5))
    assert value.arr == pytest.approx(0.55)
    # On the prompt 1 by the lookahead and 3 by the history: the whole answer.
    assert value.recall == 1.0
    assert value.total == pytest.approx(0.55 / 0.75 + 1.0)


def test_sum_weighs_both():
    # 3/4 history + 1/4 lookahead: token 1: .375, 2: .225 + .05, 4: .175, so 1 and 2: ARR 0.75.
    value = Judge([TEXT], (2,), 1.0).value(BOTH.replace(join="sum", share=0.25))
    assert value.arr == pytest.approx(0.75)
    # 1/4 + 3/4: 1: .125, 2: .075 + .15 = .225, 4: .525, so 2 and 4: .4 and 1: ARR 0.7.
    value = Judge([TEXT], (2,), 1.0).value(BOTH.replace(join="sum", share=0.75))
    assert value.arr == pytest.approx(0.7)


def test_value_is_the_mean_over_budgets_and_prompts_do_not_count_as_texts():
    judge = Judge([TEXT, PROMPT], (2, 3), 1.0)
    one = Judge([TEXT], (2,), 1.0).value(BOTH)
    other = Judge([TEXT], (3,), 1.0).value(BOTH)
    assert judge.value(BOTH).arr == pytest.approx((one.arr + other.arr) / 2)


def test_mean_shares_are_the_windowed_rate():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(2, 40, generator=generator).square().tolist()
    some = _samples(truth, torch.rand(40, generator=generator).tolist(), [[0.0] * 40])
    choice = BOTH.replace(draft_heads=(), sink=1, window=2)
    history = some.history[:, 0].float()
    indices, _ = select(history, None, some.lengths, choice, 9)
    expected = float(windowed_attention_recovery_rate(some.truth, indices)[0])
    assert Judge([some], (9,), 1.0).value(choice).arr == pytest.approx(expected, rel=1e-5)


def test_recall_counts_answer_tokens():
    indices = torch.tensor([[0, 3, 5, -1]], dtype=torch.int32)
    counts = torch.tensor([3], dtype=torch.int32)
    assert recall(PROMPT, indices, counts).tolist() == [0.5]


def test_settled_join_is_never_worse_than_one_signal():
    judge = Judge([TEXT, PROMPT], (2,), 1.0)
    settled = settle_join(judge, BOTH, steps=4)
    best = max(value.total for _, value in settled)
    history = judge.value(BOTH.replace(draft_heads=())).total
    lookahead = judge.value(BOTH.replace(target_heads=())).total
    by_way = {(choice.join, choice.share): value.total for choice, value in settled}
    for join in ("sum", "split"):
        assert by_way[join, 0.0] == pytest.approx(history)
        assert by_way[join, 1.0] == pytest.approx(lookahead)
    assert best >= max(history, lookahead)


def test_cost_counts_bytes():
    # Target: 3 layers of 2 KV heads of 4 numbers, 2 bytes each; draft: 1 layer of 1 KV head of 8.
    cost = CostModel(_spec(3, 2, 4), _spec(1, 1, 8), 1000, 100, 2, batch=2, context=50,
                     draft_window=10)  # fmt: skip
    assert cost.kv_head_bytes("target") == 50 * 4 * 2
    assert cost.kv_head_bytes("draft") == 50 * 8 * 2
    # Query heads 0 and 1 share a KV head; (1, 2) reads another.
    heads = (Head(0, 0), Head(0, 1), Head(1, 2))
    assert cost.scoring_bytes(heads, (Head(0, 1),)) == 2 * 400 + 800
    assert cost.full_attention_bytes() == 2 * 3 * 2 * 4 * 2 * 50
    assert cost.plain_bytes() == 1000 / 2 + 4800
    # Two drafts of 100/2 + 10 tokens of 32 bytes; 1000/2; 20 tokens of 96 bytes; scoring.
    assert cost.step_bytes(2, 20, heads, (Head(0, 1),)) == 2 * (50 + 320) + 500 + 1920 + 1600
    full = CostModel(_spec(3, 2, 4), _spec(1, 1, 8), 1000, 100, 2, 2, 50, 0)
    assert full.step_bytes(1, 99, (), ()) == 50 + 50 * 32 + 500 + 50 * 96


def _trial(number: int, fidelity: float, speed: float) -> Trial:
    return Trial(number, Choice(), Value(0, 1, 0, 0), fidelity, speed)


def test_pick_is_the_fastest_within_the_tolerance():
    trials = [_trial(0, 1.0, 1.0), _trial(1, 0.96, 3.0), _trial(2, 0.94, 9.0), _trial(3, 0.96, 3.0)]
    assert pick(trials, 0.05).number == 1
    assert pick(trials, 0.0).number == 0
    assert pick(trials, 0.1).number == 2


def test_pareto_front():
    trials = [_trial(0, 1.0, 1.0), _trial(1, 0.9, 2.0), _trial(2, 0.9, 1.5), _trial(3, 0.8, 2.0)]
    assert pareto_front(trials) == {0, 1}


def test_tuning_is_repeatable_and_goes_on_after_a_kill(tmp_path):
    judge = Judge([TEXT, PROMPT], (2,), 1.0)
    cost = CostModel(_spec(3, 2, 4), _spec(1, 1, 8), 1000, 100, 2, 2, 50, 0)
    search = Search(trials=12, max_gamma=1, sinks=(0, 1), windows=(0, 1))

    def run(storage, trials=12):
        return tune(judge, cost, BOTH, search.model_copy(update={"trials": trials}), {1: 1.5},
                    budget=2, storage=tmp_path / storage, seed=3)  # fmt: skip

    whole = run("whole.db")
    run("killed.db", 7)
    assert run("killed.db") == whole
    assert run("whole.db") == whole
    assert len({trial.choice for trial in whole}) > 6
    assert whole[0].choice == BOTH  # the start comes first
    assert whole[0].speed == pytest.approx(
        1.5 * cost.plain_bytes() / cost.step_bytes(1, 2, BOTH.target_heads, BOTH.draft_heads)
    )


def test_acceptance_by_position():
    some = _samples([[1.0] * 3] * 4, [0.1] * 3, [[0.0] * 3] * 3, accepted=(0, 1, 3, 3))
    found = acceptance([some], gamma=2)
    # Of four windows three keep the first draft, two of those the second, both the third.
    assert found["by_position"] == pytest.approx([3 / 4, 2 / 3, 1.0])
    assert found["tau_by_gamma"] == pytest.approx({"1": 1.75, "2": 2.25, "3": 2.75})
    assert found["tau"] == pytest.approx(2.25)
    assert found["rate"] == pytest.approx((3 / 4 + 2 / 4) / 2)
    assert all(a <= b for a, b in pairwise(found["tau_by_gamma"].values()))


def test_guard_threshold_leaves_a_share_below():
    coverage = torch.tensor([0.9, 0.5, 0.8, 0.7, 0.6])
    assert guard_threshold(coverage, 0.0) == pytest.approx(0.5, abs=1e-4)
    assert guard_threshold(coverage, 0.4) == pytest.approx(0.7, abs=1e-4)
    for share in (0.0, 0.2, 0.4, 1.0):
        assert int((coverage < guard_threshold(coverage, share)).sum()) <= share * 5


def test_without_draft_heads_there_is_nothing_to_join(tmp_path):
    alone = BOTH.replace(draft_heads=())
    judge = Judge([TEXT, PROMPT], (2,), 1.0)
    assert settle_join(judge, alone) == [(alone.replace(join="sum", share=0.0), judge.value(alone))]
    cost = CostModel(_spec(3, 2, 4), _spec(1, 1, 8), 1000, 100, 2, 2, 50, 0)
    search = Search(trials=6, max_gamma=1, sinks=(0, 1), windows=(0, 1))
    trials = tune(judge, cost, alone, search, {1: 1.5}, budget=2, storage=tmp_path / "a.db", seed=0)
    assert {(trial.choice.join, trial.choice.share) for trial in trials} == {("sum", 0.5)}

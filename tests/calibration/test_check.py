"""The check: what sparse passes are compared with, and what every policy chooses by."""

from __future__ import annotations

import pytest
import torch

from dustin_trt.calibration.check import (
    ALL_HISTORY,
    CHOSEN,
    HISTORY,
    LOOKAHEAD,
    ORACLE,
    POLICIES,
    STREAMING,
    Policies,
    fidelity,
)
from dustin_trt.calibration.profile import profile
from dustin_trt.calibration.samples import Window
from dustin_trt.calibration.value import Choice
from dustin_trt.config import Head
from tests import tiny

from . import planted

GAMMA = 2
CHOICE = Choice(
    (Head(1, 0), Head(2, 3)), (Head(1, 1),), join="sum", share=0.5, sink=1, window=4, gamma=GAMMA
)


@pytest.fixture(scope="module")
def models():
    # Random attention: every token matters a little, so that a wrong history shows in the logits.
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    return planted.pair(
        tiny.make("llama", vocab_size=planted.VOCAB, num_hidden_layers=4, **sizes),
        tiny.make("llama", seed=1, vocab_size=planted.VOCAB, num_hidden_layers=2, **sizes),
    )


def _look(models, tokens, windows):
    samples = profile(
        models, tokens, windows, gamma=GAMMA, target_heads=CHOICE.target_heads,
        draft_heads=CHOICE.draft_heads, layered=GAMMA + 1,
    )  # fmt: skip
    return Policies(samples, CHOICE)


def _measure(models, tokens, policies, budgets=(30,)):
    return fidelity(models, tokens, policies, POLICIES, budgets, lambda done: None)


def test_every_window_is_measured_after_its_own_dense_history(models):
    tokens = planted.text(330, 0)
    many = _look(models, tokens, [Window(200), Window(264), Window(320)])
    _look(models, planted.text(300, 9), [Window(280)])  # another sequence takes the caches
    together = _measure(models, tokens, many)
    for number, at in enumerate((200, 264, 320)):
        alone = _look(models, tokens, [Window(at)])
        for way, values in _measure(models, tokens, alone).items():
            assert values[0] == pytest.approx(together[way][number], abs=1e-5), (way, at)
    assert any(kl > 1e-3 for kl, _ in together[STREAMING, 30])


def test_reading_everything_changes_nothing(models):
    tokens = planted.text(330, 1)
    policies = _look(models, tokens, [Window(200), Window(264)])
    for values in _measure(models, tokens, policies, (400,)).values():
        for kl, agreement in values:
            assert kl == pytest.approx(0, abs=1e-6)
            assert agreement == 1.0


def test_what_the_policies_choose_by(models):
    policies = _look(models, planted.text(330, 2), [Window(200), Window(264)])
    for policy in POLICIES:
        for budget in (16, 40):
            assert (policies.arr(policy, budget) <= policies.arr(ORACLE, budget) + 1e-6).all()
    # A budget beyond the history reads all of it, by any policy.
    assert policies.arr(STREAMING, 500).tolist() == pytest.approx([1.0, 1.0])
    assert policies.indices(STREAMING, 8)[0][0].tolist() == [0, *range(193, 200)]
    history, ahead = policies.signals(CHOSEN)
    assert torch.equal(policies.signals(HISTORY)[0], history)
    assert policies.signals(HISTORY)[1] is None
    assert torch.equal(policies.signals(LOOKAHEAD)[1], ahead)
    every = policies.signals(ALL_HISTORY)[0]
    spec = models.target.spec
    torch.testing.assert_close(
        every.sum(1), torch.full((2,), float(spec.num_layers * spec.num_heads))
    )
    # Layers weigh alike: their rates average to the whole, at the same tokens.
    mean = sum(policies.layer_arr(CHOSEN, 40)) / spec.num_layers
    assert mean == pytest.approx(float(policies.arr(CHOSEN, 40).mean()), abs=1e-4)
    assert policies.age_arr(0, 40).tolist() == policies.arr(ALL_HISTORY, 40).tolist()
    coverage = policies.coverage(40)
    assert ((coverage > 0) & (coverage < 1)).all()

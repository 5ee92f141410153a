"""The search on models whose retrieval heads are known: planted heads are found, decoys are not."""

from __future__ import annotations

import pytest
import torch

from dustin_trt.calibration.cost import CostModel
from dustin_trt.calibration.profile import head_scores, profile
from dustin_trt.calibration.samples import SCALE, Samples, Window
from dustin_trt.calibration.search import candidate_heads, search_heads
from dustin_trt.calibration.value import Choice, Judge
from dustin_trt.config import Head, ModelSpec

from . import planted

RETRIEVAL = {Head(1, 0): planted.FIRST, Head(2, 3): planted.SECOND}
DECOYS = {head: planted.COMMON for head in (Head(0, 0), Head(1, 2), Head(3, 1))}
DRAFT_RETRIEVAL = {Head(1, 1): planted.FIRST}
DRAFT_DECOYS = {Head(0, 2): planted.COMMON}
GAMMA = 3


@pytest.fixture(scope="module")
def models():
    return planted.pair(
        planted.planted(RETRIEVAL | DECOYS),
        planted.planted(DRAFT_RETRIEVAL | DRAFT_DECOYS, layers=2, seed=1),
    )


@pytest.fixture(scope="module")
def scores(models):
    prompts = [planted.prompt(200, seed) for seed in range(4)]
    return {
        "target": head_scores(models.target, prompts),
        "draft": head_scores(models.draft, prompts),
    }


@pytest.fixture(scope="module")
def samples(models) -> list[Samples]:
    found = []
    every = {
        "target_heads": models.target.spec.all_heads(),
        "draft_heads": models.draft.spec.all_heads(),
    }
    for seed in range(2):
        tokens = planted.text(480, 100 + seed)
        windows = [Window(at) for at in (300, 360, 420)]
        found.append(profile(models, tokens, windows, gamma=GAMMA, **every))
    for seed in range(4):
        prompt = planted.prompt(300, 200 + seed)
        tokens = prompt.tokens + prompt.answer + [1] * GAMMA
        found.append(
            profile(models, tokens, [Window(300, tuple(prompt.span))], gamma=GAMMA, **every)
        )
    return found


def test_retrieval_heads_hold_the_answer_and_decoys_do_not(scores):
    for role, heads in (("target", RETRIEVAL), ("draft", DRAFT_RETRIEVAL)):
        for layer, row in enumerate(scores[role].tolist()):
            for head, score in enumerate(row):
                looks_at = heads.get(Head(layer, head))
                # Two tokens of a kind stand in the answer. Those told already draw attention too:
                # 2/2 until the first is told, then 2/3, then 2/4; the second kind 2/2 until it is.
                expected = {
                    planted.FIRST: (1 + 2 / 3 + 2 / 4 + 2 / 4) / 4,
                    planted.SECOND: (1 + 1 + 1 + 2 / 3) / 4,
                    None: 0.01,
                }[looks_at]
                assert score == pytest.approx(expected, abs=0.02), (role, layer, head)


def test_candidates_are_ranked_by_their_best_head(models, scores):
    found = candidate_heads(scores["target"], models.target.spec, 2)
    # Each KV head comes with both its query heads, the better one first.
    assert found == (Head(2, 3), Head(2, 2), Head(1, 0), Head(1, 1))


def _search(models, samples, scores, candidates, min_gain):
    target, draft = models.specs
    return search_heads(
        Judge(samples, (40, 24), recall_weight=1.0),
        CostModel(target, draft, 1000, 100, 4, 1, 400, 0),
        Choice(sink=1, window=4, gamma=GAMMA),
        {
            "target": candidate_heads(scores["target"], target, candidates),
            "draft": candidate_heads(scores["draft"], draft, 1),
        },
        {"target": 6, "draft": 3},
        min_gain=min_gain,
    )


def test_search_finds_exactly_the_planted_heads(models, scores, samples):
    steps = _search(models, samples, scores, candidates=2, min_gain=0.02)
    assert set(steps[-1].choice.target_heads) == set(RETRIEVAL)
    recalls = [step.value.recall for step in steps]
    assert recalls[0] < 0.9 < recalls[1]  # one of them finds half of the answer
    # The draft's head sees nothing that they do not: it is not worth its bytes.
    assert not [step for step in steps if step.role == "draft"]


def test_search_stops_at_its_limits_and_never_loses_value(models, scores, samples):
    steps = _search(models, samples, scores, candidates=8, min_gain=1e-9)
    values = [step.value.total for step in steps]
    assert values == sorted(values)
    target = models.target.spec
    assert all(target.num_kv_heads_of(step.choice.target_heads) <= 6 for step in steps)
    expensive = _search(models, samples, scores, candidates=8, min_gain=10.0)
    assert expensive == []


def test_samples_hold_the_attention_that_the_model_pays(models, samples):
    prompt = samples[-1]
    spec = models.target.spec
    # One softmax a head and query, all of it on the history.
    masses = prompt.truth.sum(-1)
    torch.testing.assert_close(masses, torch.full_like(masses, spec.num_layers * spec.num_heads))
    each = prompt.history.float().sum(1) / SCALE
    torch.testing.assert_close(each, prompt.ages[:, 0], rtol=2e-3, atol=2e-5)
    ahead = prompt.lookahead.float().sum(2) / SCALE
    torch.testing.assert_close(ahead, prompt.lookahead_all, rtol=2e-3, atol=2e-5)
    column = prompt.target_heads.index(Head(1, 0))
    half = prompt.span.nonzero()[:2, 1]
    assert float(prompt.history[0, column, half].float().sum()) / SCALE > 0.95


def test_samples_survive_the_disk(samples, tmp_path):
    samples[0].save(tmp_path / "some.npz")
    again = Samples.load(tmp_path / "some.npz")
    for name, value in vars(samples[0]).items():
        other = getattr(again, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    assert list(tmp_path.iterdir()) == [tmp_path / "some.npz"]


def test_windows_of_one_profile_do_not_disturb_each_other(models, samples):
    tokens = planted.text(480, 100)
    every = {
        "target_heads": models.target.spec.all_heads(),
        "draft_heads": models.draft.spec.all_heads(),
    }
    for number, at in enumerate((300, 360, 420)):
        alone = profile(models, tokens, [Window(at)], gamma=GAMMA, **every)
        for name in ("truth", "ages", "history", "lookahead", "accepted"):
            one, among = getattr(alone, name)[0], getattr(samples[0], name)[number]
            torch.testing.assert_close(one, among[..., : one.shape[-1]] if one.ndim else among)


def _random_samples(seed: int) -> Samples:
    """One window of 16 tokens and six heads, each with a KV head of its own."""
    chance = torch.Generator().manual_seed(seed)
    scores = torch.rand(7, 16, generator=chance).pow(4)
    scores /= scores.sum(1, keepdim=True)
    return Samples(
        lengths=torch.tensor([16], dtype=torch.int32),
        span=torch.zeros(1, 16, dtype=torch.bool),
        truth=scores[None, :1],
        by_layer=torch.empty(1, 0, 16),
        history=(scores[1:] * SCALE).half()[None],
        ages=torch.empty(1, 4, 16),
        lookahead=torch.empty(1, 0, 0, 16),
        lookahead_all=torch.empty(1, 0, 16),
        accepted=torch.zeros(1, dtype=torch.int32),
        target_heads=tuple(Head(layer, 0) for layer in range(6)),
        draft_heads=(),
    )


def test_exchanges_improve_on_additions_alone():
    """On random heads: never worse than adding greedily, and now and then better."""
    spec = ModelSpec("LlamaForCausalLM", 6, 1, 1, 8, 8, 10, 64)
    bare = Choice(sink=0, window=0, gamma=0)
    better = 0
    for seed in range(25):
        some = _random_samples(seed)
        judge = Judge([some], (4,), 0.0)
        steps = search_heads(
            judge, CostModel(spec, spec, 10, 1, 4, 1, 100, 0), bare,
            {"target": some.target_heads, "draft": ()}, {"target": 3, "draft": 0}, min_gain=1e-6,
        )  # fmt: skip
        totals = [step.value.total for step in steps]
        assert totals == sorted(totals)
        heads, best = (), 0.0
        for _ in range(3):
            tried = {
                (*heads, head): judge.value(bare.replace(target_heads=(*heads, head))).total
                for head in some.target_heads if head not in heads
            }  # fmt: skip
            after = max(tried, key=lambda key: tried[key])
            if tried[after] < best + 1e-6:
                break
            heads, best = after, tried[after]
        assert totals[-1] >= best - 1e-9
        better += totals[-1] > best + 1e-6
    assert better

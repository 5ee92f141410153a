"""Sampling against transformers, and acceptance against the verifier's exact distribution."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dustin_trt import LLM, SamplingParams, sampling
from dustin_trt.sampling import SamplingBatch, accept, draft_probabilities, draw, probabilities
from tests.tiny import ids, make

ROWS = 20_000
V = 5
GAMMA = 2
SURE = 1e-4
"""A right sampler stays above this p-value (seeds are fixed); a wrong one falls far below."""


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """What transformers samples from."""
    logits = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits.softmax(-1)


def batch(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    return SamplingBatch(
        torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p)
    )


def goodness(samples: np.ndarray, exact: np.ndarray) -> float:
    """p-value of a chi-square test of integer samples; rare cells are pooled.

    A sample where the exact distribution has no mass is an outright failure.
    """
    observed = np.bincount(samples, minlength=len(exact))
    assert len(observed) == len(exact)
    assert not observed[exact == 0].any(), "a token without probability was produced"
    expected = exact / exact.sum() * observed.sum()
    rare = expected < 5
    cells = [(observed[~rare], expected[~rare])]
    if rare.any() and expected[rare].sum() > 1:
        cells.append((observed[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    observed, expected = (np.concatenate(x) for x in zip(*cells, strict=True))
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


class TestProbabilities:
    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p"),
        list(product((0.3, 1.0, 1.7), (0, 1, 3, 40, 1000), (0.05, 0.5, 0.9, 1.0))),
    )
    def test_are_those_of_transformers(self, temperature, top_k, top_p):
        logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3)) * 3
        options = batch(64, temperature, top_k, top_p)
        ours = probabilities(logits, options.temperature, options.top_k, options.top_p)
        torch.testing.assert_close(ours, warped(logits, temperature, top_k, top_p))
        torch.testing.assert_close(ours.sum(-1), torch.ones(64))

    def test_rows_keep_their_own_settings_in_a_mixed_batch(self):
        settings = [(0.5, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.6), (2.0, 4, 0.7), (1.0, 0, 1.0)]
        logits = torch.randn(len(settings), 30, generator=torch.Generator().manual_seed(4)) * 2
        ours = probabilities(
            logits,
            torch.tensor([t for t, _, _ in settings]),
            torch.tensor([k for _, k, _ in settings]),
            torch.tensor([p for _, _, p in settings]),
        )
        for row, setting in enumerate(settings):
            torch.testing.assert_close(ours[row], warped(logits[row : row + 1], *setting)[0])

    def test_tokens_tied_with_the_kth_stay(self):
        logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
        ours = probabilities(logits, torch.ones(1), torch.tensor([2]), torch.ones(1))
        torch.testing.assert_close(ours, warped(logits, 1.0, 2, 1.0))
        assert (ours[0, :4] > 0).all()
        assert ours[0, 4] == 0

    @pytest.mark.parametrize("top_p", (0.125, 0.25, 0.5, 0.75))
    def test_top_p_among_ties_is_that_of_transformers(self, top_p):
        for logits in (torch.zeros(3, 8), torch.tensor([[3.0, 1, 1, 1, 3, 1, 1, 1]])):
            options = batch(len(logits), top_p=top_p)
            ours = probabilities(logits, options.temperature, options.top_k, options.top_p)
            torch.testing.assert_close(ours, warped(logits, 1.0, 0, top_p))

    def test_top_p_keeps_at_least_one_token(self):
        logits = torch.zeros(1, 6)
        ours = probabilities(logits, torch.ones(1), torch.zeros(1), torch.tensor([1e-6]))
        assert (ours > 0).sum() == 1
        assert ours.sum() == 1


class TestDraw:
    def test_never_returns_a_token_without_weight(self):
        generator = torch.Generator().manual_seed(0)
        weights = torch.rand(5000, 9, generator=generator)
        weights[torch.rand(5000, 9, generator=generator) < 0.6] = 0
        weights[:, 4] += weights.sum(1) == 0
        edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
        uniforms = torch.rand(5000, generator=generator, dtype=torch.float64)
        for uniform in (edges[:1].expand(5000), edges[1:].expand(5000), uniforms):
            tokens = draw(weights, uniform)
            assert (weights.gather(1, tokens[:, None]) > 0).all()

    @pytest.mark.parametrize("total", (1.0, 0.3, 3.0, 1e-30, 7e30))
    def test_edge_uniforms_take_the_first_and_last_token_with_weight(self, total):
        weights = torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]]).double() * total
        edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
        assert draw(weights.expand(2, 6), edges).tolist() == [1, 4]

    def test_inverts_the_cumulative_sum(self):
        weights = torch.tensor([[1.0, 2.0, 0.0, 1.0]]).expand(5, 4)
        uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75], dtype=torch.float64)
        assert draw(weights, uniform).tolist() == [0, 0, 1, 1, 3]

    def test_frequencies_are_the_weights(self):
        weights = torch.tensor([0.5, 3.0, 0.0, 1.5, 2.0])
        uniform = torch.rand(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        tokens = draw(weights.expand(ROWS, 5), uniform)
        assert goodness(tokens.numpy(), weights.numpy() / 7) > SURE

    def test_a_tail_token_of_a_large_vocabulary_is_reached(self):
        weights = torch.full((1, 150_000), 1.0)
        last = torch.tensor([1 - 2.0**-30], dtype=torch.float64)
        assert draw(weights, last).item() == 149_999


class TestGreedy:
    def accept(self, best: list[int], drafts: list[int], count: int) -> tuple[int, int]:
        """One greedy row whose most likely tokens are `best`, beside a row that differs."""
        logits = torch.zeros(2, len(best), 10)
        logits[0, torch.arange(len(best)), torch.tensor(best)] = 1
        logits[1, :, 9] = 1
        accepted, following = accept(
            logits,
            torch.tensor([drafts, [0] * len(drafts)]).view(2, len(drafts)),
            torch.tensor([count, len(drafts)]),
            None,
            torch.zeros(2, len(best), dtype=torch.float64),
            batch(2, temperature=0.0),
        )
        assert (accepted[1].item(), following[1].item()) == (0, 9)
        return accepted[0].item(), following[0].item()

    def test_all_accepted(self):
        assert self.accept([3, 5, 7, 2], [3, 5, 7], 3) == (3, 2)

    def test_none_accepted(self):
        assert self.accept([3, 5, 7, 2], [4, 5, 7], 3) == (0, 3)

    def test_a_match_after_a_miss_does_not_count(self):
        assert self.accept([3, 5, 7, 2], [3, 6, 7], 3) == (1, 5)

    def test_drafts_past_the_count_are_padding(self):
        assert self.accept([3, 5, 7, 2], [3, 5, 7], 1) == (1, 5)
        assert self.accept([3, 5, 7, 2], [3, 5, 7], 0) == (0, 3)

    def test_no_drafts(self):
        assert self.accept([3], [], 0) == (0, 3)

    def test_the_lower_of_tied_tokens_is_the_most_likely(self):
        logits = torch.zeros(1, 1, 200)
        logits[0, 0, [17, 150]] = 1.0
        nothing = torch.empty(1, 0, dtype=torch.long)
        _, following = accept(
            logits, nothing, torch.zeros(1).long(), None, torch.zeros(1, 1).double(),
            batch(1, temperature=0.0),
        )  # fmt: skip
        assert following.item() == 17


def table(seed: int, scale: float = 1.5) -> np.ndarray:
    """Logits of the next token for each token: a verifier that looks one token back."""
    return (np.random.default_rng(seed).normal(size=(V, V)) * scale).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def pick(rng: np.random.Generator, weights: np.ndarray) -> np.ndarray:
    """A draw a row that shares nothing with the code under test."""
    gumbel = rng.gumbel(size=weights.shape)
    with np.errstate(divide="ignore"):
        return (np.log(weights) + gumbel).argmax(-1)


LAST = 2
LOGITS = table(0)
ONE_TOKEN = np.eye(V)[[3, 0, 1, 4, 2]]
HALF = np.where(np.arange(V) < 2, 0.5, 0.0)[None].repeat(V, 0)
"""Only tokens 0 and 1, never one of the others."""

DRAFTS = {
    "good": softmax(LOGITS + 0.3 * table(1)),
    "identical": softmax(LOGITS),
    "bad": softmax(table(2, scale=3)),
    "uniform": np.full((V, V), 1 / V),
    "blind-where-target-has-mass": HALF,
    "certain-but-sampled": ONE_TOKEN,
}
SETTINGS = {
    "plain": (1.0, 0, 1.0),
    "warm": (1.6, 0, 1.0),
    "top-k": (1.0, 2, 1.0),
    "top-p": (0.8, 0, 0.7),
    "all-three": (1.3, 4, 0.8),
}


def target(setting: tuple[float, int, float]) -> np.ndarray:
    """The verifier's exact distribution `[V, V]` of the next token for each token."""
    return warped(torch.from_numpy(LOGITS), *setting).double().numpy()


def sequences(
    q: np.ndarray,
    setting: tuple[float, int, float],
    counts: np.ndarray | None = None,
    *,
    reported: np.ndarray | None = None,
    point_mass: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """`[ROWS, Γ+1]` tokens: what a step commits, completed from the verifier where it is short.

    The completed sequence must be a walk of the verifier alone, whatever drafted.
    `reported` is what the acceptance is told of q, where that is not the truth.
    """
    rng = np.random.default_rng(seed)
    tokens = [np.full(ROWS, LAST)]
    for _ in range(GAMMA):
        tokens.append(pick(rng, q[tokens[-1]]))
    window = np.stack(tokens, 1)
    claimed = q if reported is None else reported
    counts = np.full(ROWS, GAMMA) if counts is None else counts
    accepted, following = accept(
        torch.from_numpy(LOGITS[window]),
        torch.from_numpy(window[:, 1:]),
        torch.from_numpy(counts),
        None if point_mass else torch.from_numpy(claimed[window[:, :-1]]).float(),
        torch.from_numpy(rng.random((ROWS, GAMMA + 1))),
        batch(ROWS, *setting),
    )
    assert (accepted.numpy() <= counts).all()
    p = target(setting)
    out = np.empty((ROWS, GAMMA + 1), dtype=np.int64)
    previous = np.full(ROWS, LAST)
    for i in range(GAMMA + 1):
        own = pick(rng, p[previous])
        if i < GAMMA:
            own = np.where(i < accepted.numpy(), window[:, i + 1], own)
        out[:, i] = previous = np.where(i == accepted.numpy(), following.numpy(), own)
    return out


def walk_p_value(walks: np.ndarray, p: np.ndarray) -> float:
    """The joint distribution of whole walks against the exact one."""
    exact = np.einsum("a,ab,bc->abc", p[LAST], p, p).ravel()
    return goodness(walks @ V ** np.arange(GAMMA, -1, -1), exact)


class TestRejectionSampling:
    @pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
    @pytest.mark.parametrize("draft", DRAFTS)
    def test_is_distributed_as_the_verifier(self, draft, setting):
        walks = sequences(DRAFTS[draft], setting)
        assert walk_p_value(walks, target(setting)) > SURE

    @pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
    def test_draft_warped_like_the_target(self, setting):
        logits = torch.from_numpy(LOGITS + table(5))
        q = draft_probabilities(logits, batch(V, *setting)).double().numpy()
        assert walk_p_value(sequences(q, setting), target(setting)) > SURE

    @pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
    def test_drafts_that_were_not_sampled(self, setting):
        walks = sequences(ONE_TOKEN, setting, point_mass=True)
        assert walk_p_value(walks, target(setting)) > SURE

    @pytest.mark.parametrize("point_mass", (False, True))
    def test_rows_with_fewer_drafts_than_the_batch(self, point_mass):
        counts = np.random.default_rng(9).integers(0, GAMMA + 1, ROWS)
        draft = ONE_TOKEN if point_mass else DRAFTS["bad"]
        walks = sequences(draft, SETTINGS["plain"], counts, point_mass=point_mass)
        for count in range(GAMMA + 1):
            assert walk_p_value(walks[counts == count], target(SETTINGS["plain"])) > SURE

    def test_an_identical_draft_is_always_accepted(self):
        q = torch.from_numpy(target(SETTINGS["all-three"])[[LAST] * ROWS])[:, None].float()
        drafts = draw(q[:, 0], torch.rand(ROWS, generator=torch.Generator().manual_seed(2)))
        accepted, _ = accept(
            torch.from_numpy(LOGITS)[[LAST] * (2 * ROWS)].view(ROWS, 2, V), drafts[:, None],
            torch.ones(ROWS).long(), q, torch.full((ROWS, 2), 1 - 2.0**-20).double(),
            batch(ROWS, *SETTINGS["all-three"]),
        )  # fmt: skip
        assert accepted.float().mean() == 1

    def test_acceptance_rate_is_the_overlap_of_the_distributions(self):
        p, q = target(SETTINGS["plain"])[LAST], DRAFTS["bad"][LAST]
        rng = np.random.default_rng(8)
        drafts = torch.from_numpy(pick(rng, q[None].repeat(ROWS, 0)))
        accepted, _ = accept(
            torch.from_numpy(LOGITS)[[LAST] * (2 * ROWS)].view(ROWS, 2, V), drafts[:, None],
            torch.ones(ROWS).long(), torch.from_numpy(q).float().expand(ROWS, 1, V),
            torch.from_numpy(rng.random((ROWS, 2))), batch(ROWS),
        )  # fmt: skip
        overlap = np.minimum(p, q).sum()
        count = int(accepted.sum())
        assert stats.binomtest(count, ROWS, overlap).pvalue > SURE

    def test_greedy_and_sampled_rows_share_a_batch(self):
        rng = np.random.default_rng(6)
        q = DRAFTS["good"]
        first = pick(rng, q[[LAST] * ROWS])
        greedy = np.arange(ROWS) % 3 == 0
        best = LOGITS.argmax(-1)
        first[greedy] = np.where(np.arange(greedy.sum()) % 2, best[LAST], (best[LAST] + 1) % V)
        q_rows = q[[LAST] * ROWS][:, None]
        q_rows[greedy] = 0
        warm = np.where(np.arange(ROWS) % 3 == 1, 1.0, 1.6).astype(np.float32)
        accepted, following = accept(
            torch.from_numpy(LOGITS[np.stack([np.full(ROWS, LAST), first], 1)]),
            torch.from_numpy(first)[:, None], torch.ones(ROWS).long(),
            torch.from_numpy(q_rows).float(), torch.from_numpy(rng.random((ROWS, 2))),
            SamplingBatch(
                torch.from_numpy(np.where(greedy, 0, warm).astype(np.float32)),
                torch.zeros(ROWS).long(), torch.ones(ROWS),
            ),
        )  # fmt: skip
        token = np.where(accepted.numpy() == 1, first, following.numpy())
        assert (token[greedy] == best[LAST]).all()
        assert (accepted.numpy()[greedy] == (first[greedy] == best[LAST])).all()
        assert (following.numpy()[greedy & (accepted.numpy() == 1)] == best[best[LAST]]).all()
        for remainder, name in ((1, "plain"), (2, "warm")):
            mine = ~greedy & (np.arange(ROWS) % 3 == remainder)
            rows = token[mine]
            # q was drawn for temperature 1; any q leaves p exact.
            assert goodness(rows, target(SETTINGS[name])[LAST]) > SURE


class TestPower:
    """The chi-square test finds acceptance rules that are nearly right."""

    def test_finds_a_draft_distribution_that_is_not_the_one_sampled(self):
        walks = sequences(DRAFTS["good"], SETTINGS["plain"], reported=DRAFTS["uniform"])
        assert walk_p_value(walks, target(SETTINGS["plain"])) < 1e-10

    def test_finds_a_rejection_that_draws_from_p(self, monkeypatch):
        row = torch.arange(ROWS)
        monkeypatch.setattr(sampling, "_residual", lambda p, d, c, accepted, q: p[row, accepted])
        walks = sequences(DRAFTS["good"], SETTINGS["plain"])
        assert walk_p_value(walks, target(SETTINGS["plain"])) < 1e-10

    def test_finds_a_temperature_that_is_a_little_off(self):
        walks = sequences(DRAFTS["good"], SETTINGS["plain"])
        assert walk_p_value(walks, target((1.06, 0, 1.0))) < 1e-4


TINY = {
    "vocab_size": 6, "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
PROMPT = [3, 1, 4]
TOKENS = 4
TEMPERATURE = 1.5


class TestThroughTheLoop:
    """Whole generations of a tiny model against the distribution transformers gives."""

    def exact(self, layers: int) -> np.ndarray:
        """Joint probabilities `[V] * TOKENS` of the continuation."""
        model = make(num_hidden_layers=layers, **TINY)
        joint = np.ones(())
        for length in range(TOKENS):
            prefixes = list(product(range(TINY["vocab_size"]), repeat=length))
            tokens = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
            with torch.inference_mode():
                logits = model(tokens).logits[:, -1].double() / TEMPERATURE
            shape = [TINY["vocab_size"]] * (length + 1)
            joint = joint[..., None] * logits.softmax(-1).numpy().reshape(shape)
        return joint

    @pytest.mark.parametrize(
        ("draft", "layers", "requests"),
        [("model", 1, 1200), ("skip:1", 2, 800), ("lookup", 1, 1000)],
    )
    def test_generations_are_distributed_as_the_target(self, draft, layers, requests):
        llm = LLM(
            make(num_hidden_layers=layers, **TINY),
            make(seed=1, num_hidden_layers=1, **TINY) if draft == "model" else draft,
            policy="dense", gamma=2, max_batch_size=500, max_model_len=16,
        )  # fmt: skip
        params = [
            SamplingParams(temperature=TEMPERATURE, max_tokens=TOKENS, seed=seed)
            for seed in range(requests)
        ]
        outputs = llm.generate(ids(*[PROMPT] * requests), params)
        drafted = sum(output.stats.drafted for output in outputs)
        assert 0.1 < sum(output.stats.accepted for output in outputs) / drafted < 0.95
        tokens = np.array([output.token_ids for output in outputs])
        joint = self.exact(layers)
        for i in range(TOKENS - 1):
            others = tuple(axis for axis in range(TOKENS) if axis not in (i, i + 1))
            pairs = tokens[:, i] * TINY["vocab_size"] + tokens[:, i + 1]
            assert goodness(pairs, joint.sum(others).ravel()) > SURE

from __future__ import annotations

import numpy as np
import pytest
import torch

from dustin_trt.ops import srh_score
from tests.ops.kernels import each_kernel  # noqa: F401 — on every instruction set
from tests.ops.paged import LAYOUTS, paged, queries

SCALE = 0.2
layouts = pytest.mark.parametrize("page_size", LAYOUTS.values(), ids=LAYOUTS.keys())

HEAD_SETS = {
    # name: (query heads, KV heads, the query heads that are scored)
    "4 over 4, all": (4, 4, [0, 1, 2, 3]),
    "8 over 2, one": (8, 2, [5]),
    "8 over 2, unordered": (8, 2, [7, 0, 4, 3]),
    "8 over 1": (8, 1, [6, 1]),
    "28 over 4, group borders": (28, 4, [6, 7, 13, 14, 20, 21, 27]),
    "28 over 4, unordered": (28, 4, [27, 0, 14, 8, 20, 7, 6]),
    "same head twice": (4, 2, [3, 3]),
}
head_sets = pytest.mark.parametrize(
    ("heads", "kv_heads", "scored"), HEAD_SETS.values(), ids=HEAD_SETS.keys()
)


def _score(q, kv, cache, lengths, scores):
    srh_score(
        q, kv, cache.k_cache, cache.page_table, torch.tensor(lengths, dtype=torch.int32), SCALE,
        scores,
    )  # fmt: skip
    return scores


def _naive(q, kv, cache, lengths, columns):
    """Softmax a row and head at a time, in float64."""
    scores = np.zeros((len(lengths), columns))
    for b, n in enumerate(lengths):
        keys = cache.k[b].double().numpy()[:, :n]
        for row in q[b].double().numpy():
            for query, kv_head in zip(row, kv, strict=True):
                if n:
                    weights = np.exp(keys[kv_head] @ query * SCALE)
                    scores[b, :n] += weights / weights.sum()
    return scores


@layouts
@head_sets
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_naive_scores(page_size, heads, kv_heads, scored, rows, dtype):
    lengths = [29, 0, 1, 16]
    cache = paged(lengths, kv_heads, 64, page_size=page_size, dtype=dtype)
    q = queries(len(lengths), rows, len(scored), 64, dtype=dtype)
    kv = [head // (heads // kv_heads) for head in scored]
    scores = _score(q, kv, cache, lengths, torch.zeros(4, 31))
    right = _naive(q, kv, cache, lengths, 31)
    # fp32 inside, whatever the cache holds: one tolerance for all dtypes.
    np.testing.assert_allclose(scores.numpy(), right, rtol=2e-5, atol=1e-6)
    mass = [len(scored) * rows * (n > 0) for n in lengths]
    np.testing.assert_allclose(scores.sum(1).numpy(), mass, rtol=1e-5)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_sizes(dim):
    cache = paged([13, 40], 4, dim, page_size=7)
    q = queries(2, 2, 3, dim)
    scores = _score(q, [3, 0, 3], cache, [13, 40], torch.zeros(2, 40))
    np.testing.assert_allclose(
        scores.numpy(), _naive(q, [3, 0, 3], cache, [13, 40], 40), rtol=2e-5, atol=1e-6
    )


@layouts
def test_accumulates_and_leaves_the_rest(page_size):
    lengths = [12, 0, 5]
    cache = paged([n + 4 for n in lengths], 2, 64, page_size=page_size)
    q = queries(3, 2, 3, 64)
    start = torch.rand(3, 20, generator=torch.Generator().manual_seed(2))
    scores = _score(q, [1, 0, 1], cache, lengths, start.clone())
    right = start.numpy() + _naive(q, [1, 0, 1], cache, lengths, 20)
    np.testing.assert_allclose(scores.numpy(), right, rtol=2e-5, atol=1e-6)
    for b, n in enumerate(lengths):
        assert torch.equal(scores[b, n:], start[b, n:])


def test_two_layers_add_up():
    lengths = [9, 14]
    layers = [paged(lengths, 2, 64, page_size=4, seed=seed) for seed in (0, 5)]
    q = queries(2, 1, 2, 64)
    scores = torch.zeros(2, 14)
    for cache in layers:
        _score(q, [0, 1], cache, lengths, scores)
    right = sum(_naive(q, [0, 1], cache, lengths, 14) for cache in layers)
    np.testing.assert_allclose(scores.numpy(), right, rtol=2e-5, atol=1e-6)


def test_queries_of_another_dtype_lose_nothing():
    cache = paged([25], 2, 64, dtype=torch.bfloat16)
    q = queries(1, 2, 2, 64)
    scores = _score(q, [0, 1], cache, [25], torch.zeros(1, 25))
    right = _naive(q, [0, 1], cache, [25], 25)
    np.testing.assert_allclose(scores.numpy(), right, rtol=2e-5, atol=1e-6)


def test_order_of_heads_does_not_matter():
    cache = paged([25], 4, 64)
    q = queries(1, 1, 4, 64)
    kv, order = [2, 0, 3, 0], [3, 1, 0, 2]
    ordered = _score(q, kv, cache, [25], torch.zeros(1, 25))
    shuffled = _score(q[:, :, order], [kv[c] for c in order], cache, [25], torch.zeros(1, 25))
    torch.testing.assert_close(ordered, shuffled)


def test_stays_finite_for_huge_logits():
    cache = paged([6], 1, 64)
    scores = _score(1e4 * queries(1, 1, 1, 64), [0], cache, [6], torch.zeros(1, 6))
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(scores.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_through(broken):
    cache = paged([1500, 20], 1, 64)
    q = queries(2, 1, 1, 64)
    clean = _score(q, [0], cache, [1500, 20], torch.zeros(2, 1500))
    cache.k_cache[cache.place(0, 3)] = broken
    scores = _score(q, [0], cache, [1500, 20], torch.zeros(2, 1500))
    assert scores[0].isnan().all()
    assert torch.equal(scores[1], clean[1])


def test_more_weights_than_are_kept_at_once():
    lengths = [1 + b % 7 for b in range(70)]
    cache = paged(lengths, 1, 16)
    q = queries(70, 8, 8, 16)
    scores = _score(q, [0] * 8, cache, lengths, torch.zeros(70, 7))
    right = _naive(q, [0] * 8, cache, lengths, 7)
    np.testing.assert_allclose(scores.numpy(), right, rtol=2e-5, atol=1e-6)


def test_rows_do_not_see_each_other():
    lengths = [21, 3, 8]
    cache = paged(lengths, 2, 64, page_size=5)
    q = queries(3, 2, 2, 64)
    scores = _score(q, [0, 1], cache, lengths, torch.zeros(3, 21))
    for b in range(3):
        alone = torch.zeros(1, 21)
        srh_score(
            q[b : b + 1], [0, 1], cache.k_cache, cache.page_table[b : b + 1],
            torch.tensor(lengths[b : b + 1], dtype=torch.int32), SCALE, alone,
        )  # fmt: skip
        assert torch.equal(alone[0], scores[b])

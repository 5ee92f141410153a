"""The CUDA ops' Python side over the emulated kernels, on CPU tensors.

The kernels themselves are tested at length in tests/cuda.
"""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

from dustin_trt.ops import cuda
from tests.emulated import emulated_library
from tests.ops.paged import paged, queries

OPS = {
    name: importlib.import_module(f"dustin_trt.ops.{name}")
    for name in ("kv_append", "srh_score", "select_tokens", "sparse_attention", "dense_attention")
}
SCALE = 0.2
LENGTHS = [37, 0, 5, 70]
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
pages = pytest.mark.parametrize("page_size", [None, 1, 7, 16])


@pytest.fixture(autouse=True)
def emulated():
    """Every fallback to the reference is an error, so that no test compares it with itself."""
    with cuda.using(emulated_library()), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _close(result, right, dtype):
    tolerance = 2e-3 if dtype is torch.float16 else 1.5e-2
    torch.testing.assert_close(result.float(), right.float(), rtol=tolerance, atol=tolerance)


class Problem:
    def __init__(self, dtype, page_size, w=3, heads=8, kv_heads=2, dim=64):
        self.dtype = dtype
        self.cache = paged(
            [n + w for n in LENGTHS], kv_heads, dim, page_size=page_size, dtype=dtype
        )
        # As in a fused projection: rows further apart than their heads.
        self.q = queries(len(LENGTHS), w, heads + 2, dim, dtype=dtype)[:, :, :heads]
        self.where = (
            self.cache.k_cache,
            self.cache.v_cache,
            self.cache.page_table,
            _int32(LENGTHS),
        )


@dtypes
@pages
def test_attention(dtype, page_size):
    problem = Problem(dtype, page_size)
    out, lse = OPS["dense_attention"]._cuda(problem.q, *problem.where, SCALE)
    right, right_lse = OPS["dense_attention"].reference(problem.q, *problem.where, SCALE)
    _close(out, right, dtype)
    torch.testing.assert_close(lse, right_lse, rtol=1e-4, atol=1e-4)

    # Fewer, none of none, everything, and everything beyond the budget.
    indices = torch.full((4, 12), -1, dtype=torch.int32)
    indices[0, :9] = _int32([0, 1, 4, 9, 16, 25, 30, 35, 36])
    indices[2, :5] = torch.arange(5)
    chosen = (indices, _int32([9, 0, 5, 70]), SCALE, 70)
    sparse, sparse_lse = OPS["sparse_attention"]._cuda(problem.q, *problem.where, *chosen)
    right, right_lse = OPS["sparse_attention"].reference(problem.q, *problem.where, *chosen)
    _close(sparse, right, dtype)
    torch.testing.assert_close(sparse_lse, right_lse, rtol=1e-4, atol=1e-4)
    for row in (1, 2, 3):
        assert torch.equal(sparse[row], out[row])
    assert not torch.equal(sparse[0], out[0])


@dtypes
@pages
def test_srh_score(dtype, page_size):
    problem = Problem(dtype, page_size)
    k_cache, _, table, lengths = problem.where
    kv_heads = [1, 0, 1]
    arguments = (problem.q[:, :, :3], kv_heads, k_cache, table, lengths, SCALE)
    added, right = torch.full((4, 75), 0.5), torch.full((4, 75), 0.5)
    OPS["srh_score"]._cuda(*arguments, added[:, :73])
    OPS["srh_score"].reference(*arguments, right[:, :73])
    torch.testing.assert_close(added, right, rtol=1e-4, atol=1e-5)
    assert added[0].sum() == pytest.approx(75 * 0.5 + 9, rel=1e-4)  # 3 rows of 3 heads


@pytest.mark.parametrize("given", ["both", "target", "draft", "neither"])
def test_select_tokens(given):
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.rand(2, 4, 90, generator=generator)
    target = target if given in ("both", "target") else None
    draft = draft[:, :80] if given in ("both", "draft") else None
    arguments = (target, draft, _int32(LENGTHS), 20, 6, 2, 3)
    result = OPS["select_tokens"]._cuda(*arguments)
    for got, right in zip(result, OPS["select_tokens"].reference(*arguments), strict=True):
        assert torch.equal(got, right)


@dtypes
@pages
def test_kv_append(dtype, page_size):
    problem = Problem(dtype, page_size)
    k_cache, v_cache, table, lengths = problem.where
    k, v = (queries(4, 3, 2, 64, dtype=dtype, seed=seed) for seed in (5, 6))
    right_k, right_v = k_cache.clone(), v_cache.clone()
    OPS["kv_append"]._cuda(k, v, k_cache, v_cache, table, lengths)
    OPS["kv_append"].reference(k, v, right_k, right_v, table, lengths)
    for cache, right in ((k_cache, right_k), (v_cache, right_v)):
        assert torch.equal(cache.view(torch.int16), right.view(torch.int16))


def test_long_histories_need_a_workspace():
    """Parts of rows and chunks of scores go through memory of torch's."""
    lengths, w = [1500, 3], 2
    cache = paged([n + w for n in lengths], 1, 64, page_size=64, dtype=torch.bfloat16)
    where = (cache.k_cache, cache.v_cache, cache.page_table, _int32(lengths))
    q = queries(2, w, 2, 64, dtype=torch.bfloat16)
    out, _ = OPS["dense_attention"]._cuda(q, *where, SCALE)
    _close(out, OPS["dense_attention"].reference(q, *where, SCALE)[0], torch.bfloat16)
    scores, right = torch.zeros(2, 2, 1500)
    k_cache, _, table, history = where
    OPS["srh_score"]._cuda(q, [0, 0], k_cache, table, history, SCALE, scores)
    OPS["srh_score"].reference(q, [0, 0], k_cache, table, history, SCALE, right)
    torch.testing.assert_close(scores, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"dtype": torch.float32}, "float32"), ({"dim": 48}, "head_dim is 48"),
     ({"heads": 34}, "groups of at most 16")],
)  # fmt: skip
def test_what_the_kernels_do_not_take_is_said_and_answered_by_the_reference(change, words):
    problem = Problem(**{"dtype": torch.bfloat16, "page_size": 16, **change})
    heads = problem.q.shape[2]
    assert not cuda.takes(problem.where[0], heads)
    with pytest.warns(UserWarning, match=words):
        out, lse = OPS["dense_attention"]._cuda(problem.q, *problem.where, SCALE)
    right, right_lse = OPS["dense_attention"].reference(problem.q, *problem.where, SCALE)
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)
    assert cuda.takes(Problem(torch.bfloat16, 16).where[0], 8)


def test_tensors_that_do_not_fit_are_refused():
    problem = Problem(torch.bfloat16, 16)
    k_cache, v_cache, table, lengths = problem.where
    with pytest.raises(ValueError, match=r"torch\.int32"):
        OPS["dense_attention"]._cuda(problem.q, k_cache, v_cache, table, lengths.long(), SCALE)
    with pytest.raises(ValueError, match="must be alike"):
        OPS["dense_attention"]._cuda(problem.q, k_cache, v_cache.float(), table, lengths, SCALE)
    with pytest.raises(ValueError, match="q must be"):
        OPS["dense_attention"]._cuda(problem.q[:3], k_cache, v_cache, table, lengths, SCALE)


def test_without_a_library_the_reference_works():
    problem = Problem(torch.bfloat16, 16)
    with cuda.using(cuda.CudaLibrary(None)):
        assert "make cuda" in cuda.problem()
        assert not cuda.takes(problem.where[0], 8)
        out, _ = OPS["dense_attention"]._cuda(problem.q, *problem.where, SCALE)
    assert torch.equal(out, OPS["dense_attention"].reference(problem.q, *problem.where, SCALE)[0])


def test_the_emulated_library_is_not_for_gpus():
    assert "emulated" in cuda.problem()

from __future__ import annotations

import numpy as np
import pytest
import torch

from dustin_trt.ops import dense_attention, sparse_attention
from dustin_trt.ops.dense_attention import reference as dense_reference
from dustin_trt.ops.sparse_attention import reference as sparse_reference
from tests.ops.kernels import KERNELS, on
from tests.ops.paged import LAYOUTS, naive_attention, paged, queries

HEADS = [(4, 4), (4, 2), (9, 3), (8, 2), (5, 1), (6, 1), (28, 4), (8, 1)]  # G = 1 … 8
IMPLEMENTATIONS = {
    "reference": (dense_reference, sparse_reference),
    **{
        kernels: (on(kernels, dense_attention), on(kernels, sparse_attention))
        for kernels in KERNELS
    },
}
# Relative to 1 + |value|: fp32 inside, so little more than rounding the output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 5e-3}
LSE_TOLERANCE = 1e-5
FUSED_HALF_LSE_TOLERANCE = 2e-4  # torch's kernel approximates exp for half-precision inputs

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
layouts = pytest.mark.parametrize("page_size", LAYOUTS.values(), ids=LAYOUTS.keys())


def _int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _padded(rows: list[list[int]], width: int) -> torch.Tensor:
    return _int32([[*row, *[-1] * (width - len(row))] for row in rows])


def _choice(length: int, count: int) -> list[int]:
    """`count` history positions, ascending, neither all at the start nor evenly spread."""
    generator = torch.Generator().manual_seed(length)
    return sorted(torch.randperm(length, generator=generator)[:count].tolist())


class Problem:
    """One ragged batch, and what is right for it."""

    def __init__(self, lengths, w, heads, dim, *, page_size=None, dtype=torch.float32):
        self.lengths, self.w, self.scale = lengths, w, 1.3 * dim**-0.5
        self.cache = paged(
            [n + w for n in lengths], heads[1], dim, page_size=page_size, dtype=dtype
        )
        self.q = queries(len(lengths), w, heads[0], dim, dtype=dtype)

    def arguments(self, rows=slice(None)):
        cache = self.cache
        return (
            self.q[rows],
            cache.k_cache,
            cache.v_cache,
            cache.page_table[rows],
            _int32(self.lengths)[rows],
        )

    def dense(self, op, rows=slice(None)):
        return op(*self.arguments(rows), self.scale)

    def sparse(self, op, chosen, rows=slice(None), width=None):
        indices = _padded(chosen, width or max(1, *map(len, chosen)))
        counts = _int32([len(row) for row in chosen])
        return op(*self.arguments(rows), indices[rows], counts[rows], self.scale)

    def check(self, result, chosen, implementation):
        out, lse = result
        assert out.dtype == self.q.dtype
        assert lse.dtype == torch.float32
        tolerance, lse_tolerance = TOLERANCE[out.dtype], LSE_TOLERANCE
        if implementation == "torch" and out.dtype != torch.float32:
            lse_tolerance = FUSED_HALF_LSE_TOLERANCE
        for b, n in enumerate(self.lengths):
            right, right_lse = naive_attention(
                self.q[b], self.cache.k[b], self.cache.v[b], chosen[b], n, self.scale
            )
            np.testing.assert_allclose(
                out[b].double().numpy(), right, rtol=tolerance, atol=tolerance
            )
            np.testing.assert_allclose(
                lse[b].numpy(), right_lse, rtol=lse_tolerance, atol=lse_tolerance
            )


@implementations
@dtypes
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
def test_equals_naive_attention(implementation, dtype, dim, heads):
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([11, 0, 4], 5, heads, dim, page_size=7, dtype=dtype)
    problem.check(problem.dense(dense), [range(11), [], range(4)], implementation)
    chosen = [_choice(11, 6), [], _choice(4, 2)]
    problem.check(problem.sparse(sparse, chosen), chosen, implementation)


@implementations
@dtypes
@layouts
@pytest.mark.parametrize("w", [1, 5, 33])
def test_every_layout_and_window(implementation, dtype, page_size, w):
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([40, 0, 17, 1], w, (28, 4), 64, page_size=page_size, dtype=dtype)
    whole = [range(n) for n in problem.lengths]
    problem.check(problem.dense(dense), whole, implementation)
    chosen = [_choice(40, 12), [], _choice(17, 16), [0]]  # fewer, none, all but one, N < k
    problem.check(problem.sparse(sparse, chosen), chosen, implementation)


@implementations
def test_long_history(implementation):
    """Longer than the blocks a fused kernel works in."""
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([1301], 5, (6, 2), 64, page_size=64)
    problem.check(problem.dense(dense), [range(1301)], implementation)
    chosen = [_choice(1301, 700)]
    problem.check(problem.sparse(sparse, chosen), chosen, implementation)


@implementations
@layouts
def test_rows_that_read_no_history(implementation, page_size):
    """All -1: a query sees the new tokens only, and nothing is NaN."""
    _, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([20, 0, 9], 3, (4, 2), 64, page_size=page_size)
    result = problem.sparse(sparse, [[], [], []], width=8)
    problem.check(result, [[], [], []], implementation)


@implementations
@dtypes
@layouts
@pytest.mark.parametrize("w", [1, 5])
def test_reading_everything_is_bit_identical_to_dense(implementation, dtype, page_size, w):
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([37, 0, 8, 21], w, (28, 4), 96, page_size=page_size, dtype=dtype)
    chosen = [list(range(n)) for n in problem.lengths]
    chosen[3] = _choice(21, 5)  # a neighbour that reads less changes nothing
    out, lse = problem.dense(dense)
    sparse_out, sparse_lse = problem.sparse(sparse, chosen, width=64)
    assert torch.equal(out[:3], sparse_out[:3])
    assert torch.equal(lse[:3], sparse_lse[:3])
    assert not torch.equal(out[3], sparse_out[3])


@implementations
@layouts
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e4])
def test_tokens_that_are_not_read_do_not_leak(implementation, page_size, garbage):
    """Rejected drafts beyond the window, and history outside the index list."""
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([23, 6], 4, (6, 2), 64, page_size=page_size)
    cache = problem.cache
    clean = problem.dense(dense)
    chosen = [_choice(23, 9), _choice(6, 3)]
    clean_sparse = problem.sparse(sparse, chosen)
    for store in (cache.k_cache, cache.v_cache):
        store[store.isnan()] = garbage
    assert all(map(torch.equal, problem.dense(dense), clean))
    for b, n in enumerate(problem.lengths):
        for position in set(range(n)) - set(chosen[b]):
            cache.k_cache[cache.place(b, position)] = garbage
            cache.v_cache[cache.place(b, position)] = garbage
    result = problem.sparse(sparse, chosen)
    assert all(map(torch.equal, result, clean_sparse))
    problem.check(result, chosen, implementation)


@implementations
@dtypes
@layouts
def test_rows_do_not_depend_on_neighbours(implementation, dtype, page_size):
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([30, 2, 0, 19], 5, (9, 3), 80, page_size=page_size, dtype=dtype)
    chosen = [_choice(30, 7), [0, 1], [], _choice(19, 4)]
    together, together_sparse = problem.dense(dense), problem.sparse(sparse, chosen)
    for b in range(4):
        row = slice(b, b + 1)
        for both, alone in (
            (together, problem.dense(dense, row)),
            (together_sparse, problem.sparse(sparse, chosen, row)),
        ):
            assert torch.equal(both[0][row], alone[0])
            assert torch.equal(both[1][row], alone[1])


@implementations
@dtypes
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_not_finite_comes_through(implementation, dtype, broken, where):
    """A model that overflows must be noticed; the other rows are not touched by it."""
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([90, 30], 3, (4, 2), 64, dtype=dtype)
    cache, chosen = problem.cache, [list(range(0, 90, 4)), [1, 8]]
    clean = problem.dense(dense), problem.sparse(sparse, chosen)
    if where == "query":
        problem.q[0, 1] = broken
    else:
        store = cache.k_cache if where == "key" else cache.v_cache
        store[cache.place(0, 8)] = broken
    for right, op, reference in (
        (clean[0], lambda: problem.dense(dense), lambda: problem.dense(dense_reference)),
        (
            clean[1],
            lambda: problem.sparse(sparse, chosen),
            lambda: problem.sparse(sparse_reference, chosen),
        ),
    ):
        (out, lse), (want, want_lse) = op(), reference()
        assert torch.equal(out.isfinite(), want.isfinite())
        assert torch.equal(lse.isnan(), want_lse.isnan())
        assert torch.equal(out[1], right[0][1])
        assert torch.equal(lse[1], right[1][1])


@implementations
def test_indices_past_the_count_are_ignored(implementation):
    _, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([12], 2, (4, 2), 64)
    right = problem.sparse(sparse, [[1, 5]])
    stale = sparse(*problem.arguments(), _int32([[1, 5, 7, 11]]), _int32([2]), problem.scale)
    assert all(map(torch.equal, right, stale))


@implementations
def test_scale_is_obeyed(implementation):
    """With scale 0 every token weighs the same, so the output is a running mean."""
    dense, _ = IMPLEMENTATIONS[implementation]
    problem = Problem([3], 2, (2, 1), 64)
    problem.scale = 0.0
    out, lse = problem.dense(dense)
    values = problem.cache.v[0][0]
    for i in range(2):
        torch.testing.assert_close(out[0, i], values[: 4 + i].mean(0).expand(2, -1))
        torch.testing.assert_close(lse[0, i], torch.tensor(4.0 + i).log().expand(2))


@implementations
@pytest.mark.parametrize("w", [1, 20])
def test_queries_of_any_layout(implementation, w):
    """Where heads are not contiguous a kernel reads a copy, which must outlive the call."""
    problem = Problem([30, 9], w, (8, 2), 64)
    chosen = [_choice(30, 12), _choice(9, 4)]
    ops = IMPLEMENTATIONS[implementation]
    dense, sparse = problem.dense(ops[0]), problem.sparse(ops[1], chosen)
    problem.q = problem.q.transpose(2, 3).contiguous().transpose(2, 3)
    again = [*problem.dense(ops[0]), *problem.sparse(ops[1], chosen)]
    for before, after in zip([*dense, *sparse], again, strict=True):
        if implementation == "reference":  # torch's products may round by layout
            torch.testing.assert_close(after, before)
        else:
            assert torch.equal(after, before)


@implementations
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_queries_of_another_dtype_lose_nothing(implementation, stored):
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([12, 3], 2, (4, 2), 64, dtype=stored)
    problem.q = queries(2, 2, 4, 64)
    problem.check(problem.dense(dense), [range(12), range(3)], implementation)
    chosen = [_choice(12, 5), [1]]
    problem.check(problem.sparse(sparse, chosen), chosen, implementation)


@implementations
def test_arguments_are_left_alone(implementation):
    dense, sparse = IMPLEMENTATIONS[implementation]
    problem = Problem([9, 3], 2, (4, 2), 64, page_size=4)
    arguments = [x.clone() for x in problem.arguments()]
    problem.dense(dense)
    problem.sparse(sparse, [[2, 4], [0]])
    for before, after in zip(arguments, problem.arguments(), strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num())

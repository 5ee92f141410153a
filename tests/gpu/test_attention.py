"""`sparse_attention` and `dense_attention` on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import DIMS, GROUPS, PAGES, choose, make
from tests.gpu.device import DEVICE, DTYPES, close, needs_gpu, poison_outputs, replayed

LENGTHS = [0, 1, 63, 64, 65, 200, 517]
BUDGET = 64

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def check(case, indices=None, counts=None):
    """Every row against float64; outputs lay in poisoned memory."""
    poison_outputs(case.q, case.q[..., 0].float())
    out, lse = case.dense() if indices is None else case.sparse(indices, counts)
    for b in range(len(case.lengths)):
        if indices is None:
            read = torch.arange(int(case.lengths[b]), device=DEVICE)
        else:
            read = indices[b, : int(counts[b])]
        right_out, right_lse = case.right(b, read)
        close(out[b], right_out, case.q.dtype, f"row {b}")
        torch.testing.assert_close(lse[b].double(), right_lse, atol=2e-3, rtol=1e-4)
    return out, lse


def test_smallest_of_each():
    case = make([0, 3, 9], w=2, heads=(4, 2), dim=64, page_size=4)
    check(case)
    check(case, *choose([0, 3, 9], 4))


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_grid(group, dim, dtype):
    for w in range(1, 17):
        page_size = PAGES[w % len(PAGES)]
        options = {"w": w, "heads": GROUPS[group], "dim": dim, "page_size": page_size}
        case = make(LENGTHS, dtype=dtype, seed=w, **options)
        check(case)
        check(case, *choose(LENGTHS, BUDGET, seed=w))


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size", PAGES)
def test_long_histories_are_split(page_size, dim, dtype):
    lengths = [5000, 0, 12345, 777]
    case = make(lengths, heads=(8, 1), dim=dim, page_size=page_size, dtype=dtype)
    check(case)
    check(case, *choose(lengths, 2048))


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("history", "chunk"), [(0, 17), (0, 300), (129, 128), (1000, 512)])
def test_chunks_of_a_prefill(history, chunk, dim, dtype):
    check(make([history], w=chunk, heads=(8, 2), dim=dim, page_size=16, dtype=dtype))


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("w", [1, 5, 16])
def test_a_budget_of_the_whole_history_is_dense_bit_by_bit(w, dim, dtype):
    case = make(LENGTHS, w=w, heads=(28, 4), dim=dim, page_size=7, dtype=dtype)
    for budget in (max(LENGTHS), 1000):
        sparse = case.sparse(*choose(LENGTHS, budget))
        assert all(map(torch.equal, sparse, case.dense()))


def test_short_rows_are_dense_bit_by_bit_beside_longer_ones():
    case = make(LENGTHS)
    sparse, dense = case.sparse(*choose(LENGTHS, BUDGET)), case.dense()
    for b, length in enumerate(LENGTHS):
        if length <= BUDGET:
            assert torch.equal(sparse[0][b], dense[0][b])
            assert torch.equal(sparse[1][b], dense[1][b])


@dtypes
def test_nothing_chosen_leaves_the_new_tokens(dtype):
    case = make([40, 7], dtype=dtype)
    indices = torch.full((2, 8), -1, dtype=torch.int32, device=DEVICE)
    check(case, indices, torch.zeros(2, dtype=torch.int32, device=DEVICE))


@dtypes
def test_a_row_does_not_see_its_neighbours(dtype):
    case = make(LENGTHS, dtype=dtype, page_size=16)
    indices, counts = choose(LENGTHS, BUDGET)
    dense, sparse = case.dense(), case.sparse(indices, counts)
    for b in range(len(LENGTHS)):
        row, one = case.row(b), slice(b, b + 1)
        # Pages and budget stay what they were: how a call is split follows from them.
        assert all(torch.equal(x[0], y[b]) for x, y in zip(row.dense(), dense, strict=True))
        alone = row.sparse(indices[one], counts[one])
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, sparse, strict=True))


def test_runs_are_equal():
    lengths = [9000, 20000]
    case = make(lengths, heads=(16, 2), page_size=64)
    chosen = choose(lengths, 1024)
    dense, sparse = case.dense(), case.sparse(*chosen)
    for _ in range(10):
        assert all(map(torch.equal, case.dense(), dense))
        assert all(map(torch.equal, case.sparse(*chosen), sparse))


def test_strided_queries():
    case = make([30, 90])
    wide = torch.cat([case.q, case.q.flip(2)], 2)
    case.q = wide[:, :, : case.q.shape[2]]
    assert not case.q.is_contiguous()
    check(case)
    check(case, *choose([30, 90], 16))


@needs_gpu
@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_a_graph_replays_with_other_lengths_lists_and_pages(attention):
    lengths = [300, 40]
    case = make(lengths, page_size=16, room=400)
    indices, counts = choose(lengths, BUDGET)
    found = {}

    def call():
        found["is"] = case.dense() if attention == "dense" else case.sparse(indices, counts)

    replay = replayed(call)
    for seed, other in enumerate(([300, 40], [7, 650], [0, 64], [699, 1])):
        fresh = make(other, page_size=16, room=700 - max(other), seed=seed)
        assert fresh.k_cache.shape == case.k_cache.shape
        for mine, its in zip((case.q, *case.cache), (fresh.q, *fresh.cache), strict=True):
            mine.copy_(its)
        chosen, number = choose(other, BUDGET, seed)
        indices.copy_(chosen)
        counts.copy_(number)
        found["is"][0].fill_(torch.nan)
        replay()
        right = fresh.dense() if attention == "dense" else fresh.sparse(chosen, number)
        assert all(map(torch.equal, found["is"], right))
        check(fresh, *(() if attention == "dense" else (chosen, number)))

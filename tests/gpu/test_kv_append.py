"""`kv_append` on a GPU: the rows it is given, and nothing else."""

from __future__ import annotations

import pytest
import torch

from dustin_trt import ops
from dustin_trt.ops.kv_append import reference
from tests.gpu.cases import DIMS, PAGES, make
from tests.gpu.device import DTYPES, needs_gpu, replayed

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def bits(x):
    return x.view(torch.int16)


def check(case, k, v):
    """Every bit of the pools, those that hold no token included."""
    right = [case.k_cache.clone(), case.v_cache.clone()]
    reference(k, v, *right, case.page_table, case.lengths)
    ops.kv_append(k, v, *case.cache)
    assert torch.equal(bits(case.k_cache), bits(right[0]))
    assert torch.equal(bits(case.v_cache), bits(right[1]))


def test_smallest():
    case = make([0, 5], w=2, heads=(4, 2), dim=64, page_size=4)
    check(case, case.k_new + 1, case.v_new + 1)


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size", PAGES)
def test_grid(page_size, dim, dtype):
    for w in (1, 2, 5, 16, 300):
        for heads in ((2, 2), (28, 4), (8, 1)):
            lengths = [0, 1, 15, 16, 64, 99]
            case = make(lengths, w=w, heads=heads, dim=dim, page_size=page_size, dtype=dtype)
            check(case, case.k_new + 1, case.v_new - 1)


def test_strided_rows():
    case = make([3, 40], w=5, page_size=16)
    both = torch.cat([case.k_new + 1, case.v_new + 1], 2)  # as a joint projection leaves them
    heads = case.k_new.shape[2]
    check(case, both[:, :, :heads], both[:, :, heads:])


@needs_gpu
def test_a_graph_replays_with_other_lengths_and_pages():
    case = make([3, 40], w=5, page_size=16, room=60)
    k, v = case.k_new.clone(), case.v_new.clone()
    replay = replayed(lambda: ops.kv_append(k, v, *case.cache))
    for lengths in ([90, 0], [17, 61]):
        case.lengths.copy_(torch.tensor(lengths))
        case.page_table.copy_(case.page_table.flip(1))
        k.normal_()
        v.normal_()
        right = [case.k_cache.clone(), case.v_cache.clone()]
        reference(k, v, *right, case.page_table, case.lengths)
        replay()
        assert torch.equal(bits(case.k_cache), bits(right[0]))
        assert torch.equal(bits(case.v_cache), bits(right[1]))

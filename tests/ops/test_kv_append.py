from __future__ import annotations

import pytest
import torch

from dustin_trt.ops import kv_append
from tests.ops.kernels import each_kernel  # noqa: F401 — on every instruction set

LENGTHS = [0, 3, 4, 10]  # a fresh row, one before a page border, on it, in the last page


def _cache(page_size, dtype=torch.float32, kv_heads=2, dim=8):
    """K, V filled with numbers no test writes, and a page table in random order."""
    per_row = -(-16 // page_size)
    order = torch.randperm(len(LENGTHS) * per_row + 1, generator=torch.Generator().manual_seed(0))
    shape = (len(order), kv_heads, page_size, dim)
    table = order[:-1].view(len(LENGTHS), per_row).int()
    return torch.full(shape, 777.0, dtype=dtype), torch.full(shape, -777.0, dtype=dtype), table


def _new(w, dtype=torch.float32, kv_heads=2, dim=8):
    generator = torch.Generator().manual_seed(1)
    shape = (2, len(LENGTHS), w, kv_heads, dim)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("w", [1, 5])
@pytest.mark.parametrize("page_size", [1, 4, 5, 16])
@pytest.mark.parametrize(
    ("source", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_writes_the_window_and_nothing_else(w, page_size, source, stored):
    k_cache, v_cache, table = _cache(page_size, stored)
    right_k, right_v = k_cache.clone(), v_cache.clone()
    k, v = _new(w, source)
    for b, length in enumerate(LENGTHS):
        for i in range(w):
            page, offset = int(table[b, (length + i) // page_size]), (length + i) % page_size
            for h in range(2):
                right_k[page, h, offset] = k[b, i, h].to(stored)
                right_v[page, h, offset] = v[b, i, h].to(stored)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    pages = table.clone()
    kv_append(k, v, k_cache, v_cache, table, lengths)
    assert torch.equal(k_cache, right_k)
    assert torch.equal(v_cache, right_v)
    assert lengths.tolist() == LENGTHS
    assert torch.equal(table, pages)
    assert int((k_cache != 777).any(-1).any(1).sum()) == w * len(LENGTHS)


def test_appending_twice_continues():
    k_cache, v_cache, table = _cache(4)
    once_k, once_v = k_cache.clone(), v_cache.clone()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    k, v = _new(5)
    kv_append(k, v, once_k, once_v, table, lengths)
    kv_append(k[:, :2], v[:, :2], k_cache, v_cache, table, lengths)
    kv_append(k[:, 2:], v[:, 2:], k_cache, v_cache, table, lengths + 2)
    assert torch.equal(k_cache, once_k)
    assert torch.equal(v_cache, once_v)
    assert not torch.equal(k_cache, v_cache)


def test_accepts_transposed_views():
    """What a model hands over: `[B, H, w, D]` turned to `[B, w, H, D]` without a copy."""
    k_cache, v_cache, table = _cache(5)
    right_k, right_v = k_cache.clone(), v_cache.clone()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    k, v = _new(3)
    kv_append(k, v, right_k, right_v, table, lengths)
    kv_append(
        k.transpose(1, 2).contiguous().transpose(1, 2),
        v.transpose(1, 2).contiguous().transpose(1, 2),
        k_cache, v_cache, table, lengths,
    )  # fmt: skip
    assert torch.equal(k_cache, right_k)
    assert torch.equal(v_cache, right_v)


def test_a_position_without_a_page_is_an_error():
    k_cache, v_cache, table = _cache(4)
    k, v = _new(3)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        kv_append(k, v, k_cache, v_cache, table, torch.tensor([0, 3, 4, 14], dtype=torch.int32))

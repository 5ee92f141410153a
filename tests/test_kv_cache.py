from __future__ import annotations

import itertools

import pytest
import torch

from dustin_trt import kv_cache, ops
from dustin_trt.kv_cache import CacheFullError, PagedKVCache


def _cache(**changes) -> PagedKVCache:
    """3 slots of up to 20 tokens over 8 pages of 4: the pool is smaller than all slots full."""
    sizes = {
        "num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "num_slots": 3, "capacity": 20,
        "page_size": 4, "num_pages": 8,
    }  # fmt: skip
    return PagedKVCache(**{**sizes, **changes})


def _pages(cache: PagedKVCache, slot: int, count: int) -> set[int]:
    return set(cache.page_table[slot, :count].tolist())


def _state(cache: PagedKVCache) -> tuple:
    return cache.free_pages, cache.page_table.tolist(), cache.lengths.tolist()


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (17, 5), (20, 5)]
)
def test_reserve_takes_the_pages_that_hold_the_tokens(tokens, pages):
    cache = _cache()
    cache.reserve(1, tokens)
    assert cache.free_pages == 8 - pages
    assert len(_pages(cache, 1, pages)) == pages


def test_slots_never_share_a_page():
    cache = _cache()
    for slot, tokens in enumerate((9, 8, 12)):
        cache.reserve(slot, tokens)
    owned = [_pages(cache, slot, count) for slot, count in enumerate((3, 2, 3))]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(owned, 2))
    assert set.union(*owned) == set(range(8))
    assert cache.free_pages == 0


def test_reserving_more_keeps_what_is_there():
    cache = _cache()
    cache.reserve(0, 5)
    cache.reserve(1, 4)
    before = cache.page_table[0, :2].tolist()
    cache.reserve(0, 13)
    assert cache.page_table[0, :2].tolist() == before
    assert len(_pages(cache, 0, 4)) == 4
    assert cache.free_pages == 8 - 5


def test_reserving_less_gives_nothing_back():
    cache = _cache()
    cache.reserve(0, 13)
    before = _state(cache)
    cache.reserve(0, 2)
    assert _state(cache) == before


def test_an_exhausted_pool_raises_and_takes_nothing():
    cache = _cache()
    cache.reserve(0, 16)
    cache.reserve(1, 4)
    before = _state(cache)
    assert cache.fits(16)
    assert not cache.can_reserve(2, 16)
    with pytest.raises(CacheFullError, match="4 pages wanted, 3 free"):
        cache.reserve(2, 16)
    assert _state(cache) == before
    assert cache.can_reserve(2, 12)
    cache.reserve(2, 12)
    assert cache.free_pages == 0


def test_pages_already_owned_count_towards_a_reservation():
    cache = _cache()
    cache.reserve(0, 16)
    cache.reserve(1, 12)
    assert cache.can_reserve(0, 20)
    assert not cache.can_reserve(1, 20)
    cache.reserve(0, 20)
    assert not cache.can_reserve(1, 13)
    assert cache.can_reserve(1, 12)


def test_release_returns_every_page():
    cache = _cache()
    for _ in range(5):
        cache.reserve(0, 20)
        cache.reserve(2, 12)
        cache.lengths[0] = 9
        cache.resident[0] = [1, 2, 3]
        cache.release(0)
        assert cache.free_pages == 5
        assert cache.lengths[0] == 0
        assert cache.resident[0] == []
        assert cache.page_table[0].tolist() == [0] * 5
        cache.release(0)  # twice is harmless
        cache.release(2)
        assert cache.free_pages == 8
    cache.reserve(0, 16)
    cache.reserve(1, 16)
    assert _pages(cache, 0, 4) | _pages(cache, 1, 4) == set(range(8))


@pytest.mark.parametrize(
    ("changes", "tokens", "fits"),
    [
        ({}, 20, True),
        ({}, 21, False),  # beyond a slot's capacity
        ({"num_pages": 4}, 16, True),
        ({"num_pages": 4}, 17, False),  # beyond the pool
        ({"page_size": None, "num_pages": None}, 20, True),
        ({"page_size": None, "num_pages": None}, 21, False),
        ({"page_size": 3}, 21, False),  # seven pages hold 21, a slot does not
    ],
)
def test_fits(changes, tokens, fits):
    cache = _cache(**changes)
    assert cache.fits(tokens) is fits
    assert cache.can_reserve(0, tokens) is fits
    if fits:
        cache.reserve(0, tokens)
    else:
        before = _state(cache)
        with pytest.raises(CacheFullError, match=f"{tokens} tokens do not fit"):
            cache.reserve(0, tokens)
        assert _state(cache) == before


def test_without_a_page_size_every_slot_is_one_page():
    cache = _cache(page_size=None, num_pages=None, dtype=torch.bfloat16)
    assert cache.page_table.shape == (3, 1)
    assert [layer.shape for layer in cache.k + cache.v] == [(3, 2, 20, 4)] * 4
    assert {layer.dtype for layer in cache.k + cache.v} == {torch.bfloat16}
    assert cache.nbytes == 2 * 2 * 3 * 2 * 20 * 4 * 2


def test_rows_follow_the_order_of_the_slots():
    cache = _cache()
    for slot in range(3):
        cache.reserve(slot, 4)
        cache.lengths[slot] = slot + 1
    pages, lengths = cache.rows(torch.tensor([2, 0]))
    assert lengths.tolist() == [3, 1]
    assert pages.tolist() == [cache.page_table[2].tolist(), cache.page_table[0].tolist()]


@pytest.mark.parametrize("page_size", [4, None])
def test_rollback_is_a_smaller_length(page_size):
    """Append 6, keep 3, append 4 others: the rejected tokens are gone, the neighbour untouched."""
    cache = _cache(page_size=page_size, num_pages=None)
    cache.k[0].zero_()
    cache.reserve(0, 10)
    cache.reserve(1, 10)
    slots = torch.tensor([0, 1])
    generator = torch.Generator().manual_seed(0)
    kept: list[list[torch.Tensor]] = [[], []]
    for width, keep in ((6, (3, 6)), (4, (4, 2)), (1, (1, 1))):
        k, v = torch.randn(2, 2, width, 2, 4, generator=generator)
        ops.kv_append(k, v, cache.k[1], cache.v[1], *cache.rows(slots))
        cache.lengths[slots] += torch.tensor(keep, dtype=torch.int32)
        for b in range(2):
            kept[b] += list(k[b, : keep[b]])
    for b, length in enumerate(cache.lengths[:2].tolist()):
        size = cache.page_size
        held = [cache.k[1][cache.page_table[b, j // size], :, j % size] for j in range(length)]
        assert torch.equal(torch.stack(held), torch.stack(kept[b]))
    assert not cache.k[0].any()


@pytest.mark.parametrize(
    ("tokens", "shared"),
    [
        ([5, 6, 7, 8], 4),
        ([5, 6, 7, 8, 9], 4),
        ([5, 6], 2),
        ([5, 6, 0, 8], 2),
        ([0, 6, 7, 8], 0),
        ([], 0),
    ],
)
def test_resident_prefix(tokens, shared):
    cache = _cache()
    cache.resident[1] = [5, 6, 7, 8]
    assert cache.resident_prefix(1, tokens) == shared
    assert cache.resident_prefix(0, tokens) == 0


HUGE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1024, "num_slots": 1024,
        "capacity": 2**20, "page_size": None, "num_pages": None,
        "dtype": torch.float16}  # fmt: skip
HUGE_MESSAGE = r"4096\.0 GiB \(1024 slots of 1048576 tokens\): lower max_batch_size or max_model_"


def test_absurd_sizes_are_refused_with_their_size():
    with pytest.raises(MemoryError, match="no memory for a KV cache of " + HUGE_MESSAGE):
        _cache(**HUGE)


def test_a_cache_may_take_all_memory_but_not_more(monkeypatch):
    """Asked first: an allocator that overcommits would let the process be killed later."""
    size = _cache().nbytes
    monkeypatch.setattr(kv_cache, "_physical_memory", lambda: size)
    _cache()
    monkeypatch.setattr(kv_cache, "_physical_memory", lambda: size - 1)
    with pytest.raises(MemoryError, match="no memory for a KV cache"):
        _cache()


def test_a_failed_allocation_says_its_size(monkeypatch):
    monkeypatch.setattr(kv_cache, "_physical_memory", lambda: 2**60)

    def fail(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(MemoryError, match="cannot allocate a KV cache of " + HUGE_MESSAGE):
        _cache(**HUGE)

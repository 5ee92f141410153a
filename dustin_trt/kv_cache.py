"""Paged KV cache for ragged batches: one object for prefill and decoding, all backends."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor


class CacheFullError(RuntimeError):
    """The pool has no room for a request now; `fits` says whether it ever can."""


class PagedKVCache:
    """Keys and values of every layer for a fixed number of slots.

    `lengths` is the only truth about what is cached. Rolling back is a smaller length: no data
    moves, and what lies past it is overwritten by the next append.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : shape of the model that writes here
    num_slots : sequences held at a time
    capacity : tokens a slot can hold
    page_size : tokens a page; None makes one page a slot (a contiguous cache, which torch ops
        read without a copy)
    num_pages : size of the pool; None gives every slot its full capacity
    beside : bytes that other caches may come to take of the same memory

    Attributes
    ----------
    k, v : list of Tensor `[num_pages, Hkv, page_size, D]`, one a layer
    page_table : Tensor `[num_slots, max_pages]` int32; pages a slot does not own are 0
    lengths : Tensor `[num_slots]` int32
    resident : the tokens at the start of each slot whose K and V come from a dense prefill. They
        outlive the request, so that a later prompt with the same beginning need not be run again.
    in_use : set while a decoder runs on it; slots belong to one run at a time

    Raises
    ------
    MemoryError
        When the pool cannot be allocated; says the size asked for.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        capacity: int,
        page_size: int | None = None,
        num_pages: int | None = None,
        beside: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.page_size = page_size or capacity
        max_pages = math.ceil(capacity / self.page_size)
        self.num_pages = num_pages or num_slots * max_pages
        shape = (self.num_pages, num_kv_heads, self.page_size, head_dim)
        size = 2 * num_layers * math.prod(shape) * dtype.itemsize
        wanted = (
            f"a KV cache of {size / 2**30:.1f} GiB ({num_slots} slots of {capacity} tokens): "
            "lower max_batch_size or max_model_len"
        )
        if torch.device(device).type == "cpu" and size + beside > _physical_memory():
            raise MemoryError(f"this machine has no memory for {wanted}")
        try:
            # empty, not zeros: nothing reads what was not appended, and memory that nothing has
            # touched costs nothing and can still become huge pages.
            self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        except RuntimeError as error:  # what torch raises when an allocation fails
            raise MemoryError(f"cannot allocate {wanted}") from error
        for pool in (*self.k, *self.v):
            _advise_huge_pages(pool)
        self.nbytes = size
        self.page_table = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._owned: list[list[int]] = [[] for _ in range(num_slots)]
        self._free = list(range(self.num_pages))[::-1]
        self.in_use = False
        self.resident: list[list[int]] = [[] for _ in range(num_slots)]

    @property
    def free_pages(self) -> int:
        """Pages that no slot owns."""
        return len(self._free)

    def fits(self, tokens: int) -> bool:
        """Whether an otherwise empty cache can hold a sequence of `tokens`."""
        return tokens <= self.capacity and self._pages(tokens) <= self.num_pages

    def can_reserve(self, slot: int, tokens: int) -> bool:
        """Whether `reserve(slot, tokens)` succeeds now."""
        wanted = self._pages(tokens) - len(self._owned[slot])
        return self.fits(tokens) and wanted <= len(self._free)

    def reserve(self, slot: int, tokens: int) -> None:
        """Give `slot` the pages for `tokens` in all; those it has stay where they are.

        Raises
        ------
        CacheFullError
            When the pool is short; nothing is taken then.
        """
        if not self.fits(tokens):
            raise CacheFullError(
                f"{tokens} tokens do not fit a cache of {self.capacity} tokens a slot "
                f"and {self.num_pages} pages of {self.page_size}"
            )
        owned = self._owned[slot]
        wanted = self._pages(tokens) - len(owned)
        if wanted > len(self._free):
            raise CacheFullError(f"{wanted} pages wanted, {len(self._free)} free")
        owned += [self._free.pop() for _ in range(wanted)]
        self.page_table[slot, : len(owned)] = torch.tensor(owned, dtype=torch.int32)

    def forget(self, slot: int) -> None:
        """Forget the slot's tokens; its pages stay its own."""
        self.resident[slot] = []
        self.lengths[slot] = 0

    def release(self, slot: int) -> None:
        """Forget the slot's tokens and return its pages."""
        self.forget(slot)
        self._free += self._owned[slot][::-1]
        self._owned[slot] = []
        self.page_table[slot] = 0

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Page table `[B, max_pages]` and lengths `[B]` of a batch of `slots [B]`."""
        return self.page_table[slots], self.lengths[slots]

    def resident_prefix(self, slot: int, tokens: Sequence[int]) -> int:
        """How many of `tokens` at their beginning the slot holds already."""
        held = self.resident[slot]
        return next(
            (i for i, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b),
            min(len(held), len(tokens)),
        )

    def _pages(self, tokens: int) -> int:
        return math.ceil(tokens / self.page_size)


def _advise_huge_pages(pool: Tensor) -> None:
    """Ask Linux for 2 MiB pages under a CPU tensor.

    Chosen tokens are rows of a few hundred bytes all over the pool: with 4 KiB pages nearly every
    one costs a walk through the page tables (docs/kernels.md has the figures). Advice only: where
    it is not taken, nothing but speed is lost.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or pool.device.type != "cpu":
        return
    first = -(-pool.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    last = (pool.data_ptr() + pool.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if first < last:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


_HUGE_PAGE = 2 << 20


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""What the C ABI of the CUDA library does not take is refused by name, and nothing is written."""

from __future__ import annotations

import ctypes
import re
from functools import partial

import pytest
import torch

from benchmarks.gpu import building
from tests.gpu import abi
from tests.gpu.device import DEVICE, REHEARSAL

pytestmark = pytest.mark.skipif(
    REHEARSAL == "cpu", reason="a rehearsal with the ops of the CPU has no CUDA library"
)
B, W, HQ, HKV, D, PAGE, PAGES, BUDGET = 2, 2, 4, 2, 64, 8, 4, 8
HEADS = (ctypes.c_int32 * 2)(0, 1)
BF16 = 2


def library():
    emulated = REHEARSAL == "emulated"
    return abi.load(building.EMULATED_LIBRARY if emulated else building.CUDA_LIBRARY)


def last_error():
    return abi.last_error(library())


class Memory:
    """Tensors that the structs point to, and that a refused call must leave alone."""

    def __init__(self):
        new = partial(torch.zeros, device=DEVICE)
        self.k = new(B * PAGES, HKV, PAGE, D, dtype=torch.bfloat16)
        self.v = self.k.clone()
        self.table = torch.arange(B * PAGES, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.full((B,), 9, dtype=torch.int32, device=DEVICE)
        self.q = new(B, W, HQ, D, dtype=torch.bfloat16)
        self.out = torch.full_like(self.q, 3.0)
        self.lse = new(B, W, HQ)
        self.scores = new(B, 32)
        self.indices = new(B, BUDGET, dtype=torch.int32)
        self.counts = torch.full((B,), BUDGET, dtype=torch.int32, device=DEVICE)
        self.workspace = new(1 << 20, dtype=torch.uint8)
        self.written = (self.k, self.v, self.out, self.lse, self.scores, self.indices)

    def rows(self, x, heads):
        return abi.Rows(x.data_ptr(), W * heads * D, heads * D, D)

    def cache(self):
        return abi.KvCache(
            self.k.data_ptr(), self.v.data_ptr(), self.table.data_ptr(), self.lengths.data_ptr(),
            HKV * PAGE * D, PAGE * D, D, PAGES, BF16, B, B * PAGES, HKV, PAGE, D, PAGES, 0,
        )  # fmt: skip

    def params(self, op):
        dense = abi.DenseAttention(
            self.cache(), self.rows(self.q, HQ), self.rows(self.out, HQ), self.lse.data_ptr(), W,
            HQ, 0.125, 0,
        )  # fmt: skip
        scores = self.scores.data_ptr()
        lists = (self.indices.data_ptr(), self.counts.data_ptr())
        return {
            "kv_append": lambda: abi.KvAppend(
                self.cache(), self.rows(self.q, HKV), self.rows(self.out, HKV), W, 0
            ),
            "srh_score": lambda: abi.SrhScore(
                self.cache(), self.rows(self.q, 2), HEADS, scores, 32, 32, 1, 2, 0.125
            ),
            "select_tokens": lambda: abi.SelectTokens(
                scores, None, self.lengths.data_ptr(), *lists, 32, 0, BUDGET, 32, 0, B, BUDGET, 2,
                1, 1, 0,
            ),
            "dense_attention": lambda: dense,
            "sparse_attention": lambda: abi.SparseAttention(dense, *lists, BUDGET, BUDGET, 0),
        }[op]()  # fmt: skip


def call(op, params, workspace, size=1 << 20):
    function = getattr(library(), f"dustin_cuda_{op}")
    if op in ("kv_append", "select_tokens"):
        return function(ctypes.byref(params), None)
    start = ctypes.c_void_p(workspace.data_ptr())
    return function(ctypes.byref(params), start, ctypes.c_int64(size), None)


def cache_of(params):
    if isinstance(params, abi.SparseAttention):
        return params.attention.cache
    return params.cache


def set_cache(**fields):
    def change(params):
        for name, value in fields.items():
            setattr(cache_of(params), name, value)

    return change


def set_field(name, value):
    return lambda params: setattr(params, name, value)


CACHED = ("kv_append", "srh_score", "dense_attention", "sparse_attention")
U, I = abi.UNSUPPORTED, abi.INVALID_ARGUMENT  # noqa: E741
WRONG = {
    "float32": (CACHED, set_cache(dtype=0), U, "float32"),
    "an unknown dtype": (CACHED, set_cache(dtype=9), U, "dtype 9"),
    "a head size of 72": (CACHED, set_cache(head_dim=72), U, "head_dim is 72"),
    "a head size of 192": (CACHED, set_cache(head_dim=192), U, "head_dim is 192"),
    "no page": (CACHED, set_cache(page_size=0), I, "page_size"),
    "no keys": (CACHED, set_cache(k=None), I, "k cache is null"),
    "no page table": (CACHED, set_cache(page_table=None), I, "page_table is null"),
    "no lengths": (CACHED, set_cache(lengths=None), I, "lengths is null"),
    "a negative batch": (CACHED, set_cache(batch=-1), I, "batch"),
    "tokens at odd places": (CACHED, set_cache(token_stride=D + 4), U, "token_stride"),
    "negative rows": (("kv_append", "srh_score", "dense_attention"), set_field("rows", -1), I,
                      "rows"),
    "heads that do not divide": (("dense_attention",), set_field("heads", 5), I, "5 query heads"),
    "groups of 17": (("dense_attention",), set_field("heads", 34), U, "34 query heads"),
    "too many scored heads": (("srh_score",), set_field("query_heads", 129), U, "129"),
    "no kv_heads": (("srh_score",), set_field("kv_heads", None), I, "kv_heads is null"),
    "no scores": (("srh_score",), set_field("scores", None), I, "scores is null"),
    "no counts": (("sparse_attention", "select_tokens"), set_field("counts", None), I,
                  "counts is null"),
    "no indices": (("sparse_attention", "select_tokens"), set_field("indices", None), I,
                   "indices is null"),
    "a negative budget": (("sparse_attention", "select_tokens"), set_field("budget", -1), I,
                          "budget"),
    "sink and window above the budget": (("select_tokens",), set_field("sink", 8), I, "sink 8"),
}  # fmt: skip


@pytest.fixture
def memory():
    return Memory()


@pytest.mark.parametrize(
    ("op", "wrong"), [(op, wrong) for wrong, (ops, *_) in WRONG.items() for op in ops]
)
def test_is_refused(memory, op, wrong):
    _, change, status, message = WRONG[wrong]
    params = memory.params(op)
    change(params)
    if wrong == "too many scored heads":
        many = (ctypes.c_int32 * 129)(*[0] * 129)
        params.kv_heads = many
    before = [x.clone() for x in memory.written]
    assert call(op, params, memory.workspace) == status, last_error()
    assert re.search(re.escape(message), last_error()), last_error()
    for x, was in zip(memory.written, before, strict=True):
        assert torch.equal(x, was)


def test_a_bad_kv_head(memory):
    params = memory.params("srh_score")
    params.kv_heads = (ctypes.c_int32 * 2)(0, HKV)
    assert call("srh_score", params, memory.workspace) == I
    assert "kv_heads[1] is 2" in last_error()


@pytest.mark.parametrize("op", ["srh_score", "dense_attention", "sparse_attention"])
def test_a_workspace_that_is_too_small(memory, op):
    params = memory.params(op)
    # A history that is surely split over blocks.
    cache_of(params).max_pages, cache_of(params).page_size = 1 << 10, 1 << 7
    needed = getattr(library(), f"dustin_cuda_{op}_workspace")(ctypes.byref(params))
    assert needed >= 0, last_error()
    if needed:
        assert call(op, params, memory.workspace, needed - 1) == I
        assert f"workspace has {needed - 1} bytes" in last_error()


@pytest.mark.parametrize("op", (*CACHED, "select_tokens"))
def test_the_calls_to_be_spoilt_are_taken(memory, op):
    assert call(op, memory.params(op), memory.workspace) == abi.OK, last_error()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("op", (*CACHED, "select_tokens"))
def test_no_params(op):
    function = getattr(library(), f"dustin_cuda_{op}")
    extra = () if op in ("kv_append", "select_tokens") else (None, ctypes.c_int64(0))
    assert function(None, *extra, None) == I
    assert "params is null" in last_error()

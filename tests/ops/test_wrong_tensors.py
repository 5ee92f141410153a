"""Tensors whose memory is not what a kernel would take it for: refused, never read."""

from __future__ import annotations

import pytest
import torch

from dustin_trt import ops
from dustin_trt.ops import native
from tests.ops.paged import paged, queries

LENGTHS, W, HEADS, KV_HEADS, DIM = [9, 5], 2, 4, 2, 16

pytestmark = pytest.mark.skipif(not native.isas(), reason="there is no native library")


@pytest.fixture(autouse=True)
def natively():
    with native.using(native.isas()[0]):
        yield


def _arguments(op):
    cache = paged([n + W for n in LENGTHS], KV_HEADS, DIM, page_size=4)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    where = {
        "k_cache": cache.k_cache,
        "v_cache": cache.v_cache,
        "page_table": cache.page_table,
        "lengths": lengths,
    }
    q = queries(2, W, HEADS, DIM)
    new = queries(2, W, KV_HEADS, DIM, seed=2)
    scores = torch.zeros(2, 12)
    indices = torch.tensor([[0, 3, 7], [0, 2, -1]], dtype=torch.int32)
    counts = torch.tensor([3, 2], dtype=torch.int32)
    if op == "kv_append":
        return {"k": new, "v": new.clone(), **where}
    if op == "srh_score":
        del where["v_cache"]
        return {"queries": q, "kv_heads": [0, 0, 1, 1], **where, "scale": 0.25, "scores": scores}
    if op == "select_tokens":
        given = {"target_scores": scores, "draft_scores": scores.clone(), "lengths": lengths}
        return {**given, "budget": 4, "lookahead": 1, "sink": 1, "window": 1}
    if op == "sparse_attention":
        return {"q": q, **where, "indices": indices, "counts": counts, "scale": 0.25}
    return {"q": q, **where, "scale": 0.25}


def _strided(x):
    """The same numbers, every other element of a wider tensor."""
    return torch.stack((x, x), -1)[..., 0]


WRONG = {
    "int64": lambda x: x.long(),
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "on another device": lambda x: x.to("meta"),
    "strided": _strided,
    "a row short": lambda x: x[:1],
    "another head size": lambda x: x[..., :8],
    "a head short": lambda x: x[:, :, :1],
    "one number for all rows": lambda x: x[:1].expand(x.shape),
}
_LENGTHS = ("int64", "strided", "a row short")  # elsewhere, they lead to another implementation
_LISTS = (*_LENGTHS, "on another device")
_SCORES = ("float64", "strided", "a row short", "on another device")
_K_CACHE = ("strided", "on another device")
_V_CACHE = (*_K_CACHE, "float16", "a row short", "another head size", "one number for all rows")
_ROWS = ("a row short", "another head size", "on another device")
_NEW = (*_ROWS, "a head short")
_PLACE = {
    "page_table": _LISTS,
    "lengths": (*_LENGTHS, "one number for all rows"),
    "k_cache": _K_CACHE,
}
CASES = {
    "kv_append": {"k": _NEW, "v": _NEW, "v_cache": _V_CACHE, **_PLACE},
    "srh_score": {"queries": _NEW, "scores": _SCORES, **_PLACE},
    "select_tokens": {"target_scores": _SCORES, "draft_scores": _SCORES, "lengths": _LENGTHS},
    "sparse_attention": {
        "q": _ROWS, "indices": _LISTS, "counts": _LISTS, "v_cache": _V_CACHE, **_PLACE,
    },
    "dense_attention": {"q": _ROWS, "v_cache": _V_CACHE, **_PLACE},
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "name", "wrong"),
    [(op, name, w) for op, names in CASES.items() for name, ws in names.items() for w in ws],
)
def test_is_refused(op, name, wrong):
    arguments = _arguments(op)
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    spoilt = {**arguments, name: WRONG[wrong](arguments[name])}
    with pytest.raises(ValueError):
        getattr(ops, op)(*spoilt.values())
    for n, x in before.items():
        torch.testing.assert_close(arguments[n], x, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("op", CASES)
def test_the_calls_to_be_spoilt_are_right(op):
    getattr(ops, op)(*_arguments(op).values())


def test_a_head_short_of_kv_heads():
    arguments = _arguments("srh_score") | {"kv_heads": [0, 0, 1]}
    with pytest.raises(ValueError, match="4 heads, kv_heads names 3"):
        ops.srh_score(*arguments.values())


def test_results_lie_on_the_cpu_whatever_the_default_device():
    arguments = _arguments("dense_attention").values()
    right = ops.dense_attention(*arguments)
    with torch.device("meta"):
        actual = ops.dense_attention(*arguments)
    assert all(map(torch.equal, actual, right))

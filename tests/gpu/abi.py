"""The C ABI of the CUDA library without torch's binding: its structs, by field name."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

OK, INVALID_ARGUMENT, UNSUPPORTED = 0, 1, 2
WITH_WORKSPACE = ("srh_score", "dense_attention", "sparse_attention")


class Rows(Structure):
    _fields_ = [("data", c_void_p)] + [
        (name, c_int64) for name in ("batch_stride", "row_stride", "head_stride")
    ]


class KvCache(Structure):
    _fields_ = (
        [(name, c_void_p) for name in ("k", "v", "page_table", "lengths")]
        + [(f"{name}_stride", c_int64) for name in ("page", "head", "token", "page_table")]
        + [
            (name, c_int32)
            for name in (
                "dtype", "batch", "num_pages", "num_kv_heads", "page_size", "head_dim",
                "max_pages", "max_length",
            )
        ]
    )  # fmt: skip


class KvAppend(Structure):
    _fields_ = [("cache", KvCache), ("k", Rows), ("v", Rows), ("rows", c_int32),
                ("reserved", c_int32)]  # fmt: skip


class SrhScore(Structure):
    _fields_ = [
        ("cache", KvCache), ("queries", Rows), ("kv_heads", POINTER(c_int32)),
        ("scores", c_void_p), ("scores_stride", c_int64), ("scores_width", c_int32),
        ("rows", c_int32), ("query_heads", c_int32), ("scale", c_float),
    ]  # fmt: skip


class SelectTokens(Structure):
    _fields_ = (
        [(n, c_void_p) for n in ("target_scores", "draft_scores", "lengths", "indices", "counts")]
        + [(f"{name}_stride", c_int64) for name in ("target", "draft", "indices")]
        + [
            (name, c_int32)
            for name in (
                "target_width", "draft_width", "batch", "budget", "lookahead", "sink", "window",
                "reserved",
            )
        ]
    )  # fmt: skip


class DenseAttention(Structure):
    _fields_ = [
        ("cache", KvCache), ("q", Rows), ("out", Rows), ("lse", c_void_p), ("rows", c_int32),
        ("heads", c_int32), ("scale", c_float), ("reserved", c_int32),
    ]  # fmt: skip


class SparseAttention(Structure):
    _fields_ = [
        ("attention", DenseAttention), ("indices", c_void_p), ("counts", c_void_p),
        ("indices_stride", c_int64), ("budget", c_int32), ("max_count", c_int32),
    ]  # fmt: skip


@cache
def load(path: Path) -> ctypes.CDLL:
    """A library of the CUDA kernels, for a GPU or emulated."""
    loaded = ctypes.CDLL(str(path))
    loaded.dustin_last_error.restype = ctypes.c_char_p
    for op in WITH_WORKSPACE:
        getattr(loaded, f"dustin_cuda_{op}_workspace").restype = c_int64
    return loaded


def last_error(library: ctypes.CDLL) -> str:
    """Why the last call of this thread failed."""
    return str(library.dustin_last_error().decode())

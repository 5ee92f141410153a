"""The native CPU kernels: found, loaded, and told which threads to run on.

The library (`plugins/cpu`) knows nothing of torch. Each op's file packs the parameter struct of
`plugins/include/dustin/kernels.h` and calls it through `call`. `DUSTIN_CPU_ISA` in the environment
names an instruction set, or `reference` for torch alone.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dustin_trt.ops._native_library import find_library

ABI_VERSION = 1
REFERENCE = "reference"

CPU = torch.device("cpu")
"""Said outright where memory is made: torch's default may be another."""
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Codes of `DustinDtype`."""

CACHE = "4P4q8i"
"""Layout of `DustinKvCache`, for `struct`; `cache_fields` fills it."""
_BATCH, _HEAD_DIM = 9, 13  # places in it
ROWS = "P3q"
"""Layout of `DustinRows`; `rows_fields` fills it."""

_ERRORS = {1: ValueError, 2: NotImplementedError, 3: MemoryError}


class _Kernels:
    """The loaded library, or why there is none."""

    def __init__(self) -> None:
        self.path = find_library()
        self.library: ctypes.CDLL | None = None
        self.isas: tuple[str, ...] = ()
        self.isa = REFERENCE
        self.pool: str | None = None
        self.takes: dict[torch.dtype, int] = {}
        self.failure = self._load()

    @property
    def problem(self) -> str | None:
        """Why torch does the work."""
        return "DUSTIN_CPU_ISA=reference" if self.library and not self.takes else self.failure

    def use(self, isa: str) -> None:
        if isa != REFERENCE:
            if isa not in self.isas or not self.library:
                there = ", ".join((*self.isas, REFERENCE))
                raise ValueError(
                    f"instruction set {isa!r} (DUSTIN_CPU_ISA) is not available: this build and "
                    f"processor have {there}"
                )
            self.library.dustin_cpu_use_isa(isa.encode())
        self.isa = isa
        self.takes = {} if isa == REFERENCE else DTYPES

    def _load(self) -> str | None:
        if self.path is None:
            return "no library was built; install a C++ compiler and install dustin-trt again"
        try:
            library = ctypes.CDLL(str(self.path))
        except OSError as error:
            return f"{self.path} cannot be loaded: {error}"
        version = library.dustin_abi_version()
        if version != ABI_VERSION:
            return (
                f"{self.path} has ABI version {version}, this package needs {ABI_VERSION}: "
                "install dustin-trt again"
            )
        for name in ("dustin_last_error", "dustin_cpu_isas", "dustin_cpu_isa"):
            getattr(library, name).restype = ctypes.c_char_p
        for name in _OPS:
            # The struct travels as bytes: one pack is far cheaper than thirty ctypes fields.
            getattr(library, name).argtypes = (ctypes.c_char_p, ctypes.c_int32)
        library.dustin_cpu_use_pool.argtypes = (ctypes.c_void_p,)
        library.dustin_cpu_read_rows.argtypes = (
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p,
            ctypes.c_int32,
        )  # fmt: skip
        self.isas = tuple(library.dustin_cpu_isas().decode().split())
        self.library = library
        if pool := _openmp_of_torch():
            self.pool = pool._name
            library.dustin_cpu_use_pool(ctypes.cast(pool.GOMP_parallel, ctypes.c_void_p))
        self.use(os.environ.get("DUSTIN_CPU_ISA") or self.isas[0])
        return None


_OPS = (
    "dustin_cpu_kv_append",
    "dustin_cpu_srh_score",
    "dustin_cpu_select_tokens",
    "dustin_cpu_dense_attention",
    "dustin_cpu_sparse_attention",
    "dustin_cpu_rms_norm",
    "dustin_cpu_rotate",
    "dustin_cpu_silu_mul",
)


def _openmp_of_torch() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded.

    Two runtimes would be two pools of threads that spin against each other. The kernels start
    theirs through `GOMP_parallel` of this one (libgomp, and libiomp5 and libomp on Linux).
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The path is the rest of the line from the first slash; it may contain spaces.
    paths = re.findall(r"^[^/]*(/.*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*)$", maps, re.MULTILINE)
    home = str(Path(torch.__file__).parent)  # also of the sister folder torch.libs
    for path in sorted(set(paths), key=lambda p: not p.startswith(home)):
        library = ctypes.CDLL(path)
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


_kernels = _Kernels()


def isas() -> tuple[str, ...]:
    """Instruction sets that the library and this processor have, best first; () without library."""
    return _kernels.isas


def isa() -> str:
    """The instruction set in use, or "reference" where torch does the work."""
    return _kernels.isa


def problem() -> str | None:
    """Why torch does the work, in one phrase; None where the kernels do."""
    return _kernels.problem


def library_path() -> Path | None:
    """Where the library lies."""
    return _kernels.path


def pool() -> str:
    """Whose threads the kernels run on, in one phrase."""
    if _kernels.pool is None:
        return "one thread: no OpenMP runtime of torch's was found"
    return f"{torch.get_num_threads()} threads of torch's OpenMP pool"


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Use another instruction set, or "reference", for a while; for tests and benchmarks.

    Raises
    ------
    ValueError
        One that `isas` does not name.
    """
    before = _kernels.isa
    _kernels.use(isa)
    try:
        yield
    finally:
        _kernels.use(before)


def active() -> bool:
    """Whether the kernels are in use."""
    return bool(_kernels.takes)


def takes(cache: Tensor) -> bool:
    """Whether the kernels are in use and work on a cache of this dtype."""
    return cache.dtype in _kernels.takes


def cache_fields(
    k: Tensor, v: Tensor | None, page_table: Tensor, lengths: Tensor
) -> tuple[int, ...]:
    """Values for `CACHE`.

    Parameters
    ----------
    k, v : Tensor `[pages, Hkv, page_size, D]`, of equal strides; v None where it is not read
    page_table : Tensor `[B, max_pages]` int32
    lengths : Tensor `[B]` int32, contiguous
    """
    pages, heads, page_size, dim = k.shape
    page, head, token, element = strides = k.stride()
    dtype = k.dtype
    if not k.is_cpu or (element != 1 and dim > 1):
        raise ValueError(f"the cache must lie on the CPU with contiguous heads: {_describe(k)}")
    if v is not None and (
        v.dtype is not dtype or v.stride() != strides or v.shape != k.shape or not v.is_cpu
    ):
        raise ValueError(f"k and v cache must be alike: {_describe(k)}, {_describe(v)}")
    table, rows, batch, stride, max_pages = list_fields(page_table, lengths)
    return (
        k.data_ptr(), 0 if v is None else v.data_ptr(), table, rows, page, head, token, stride,
        DTYPES[dtype], batch, pages, heads, page_size, dim, max_pages, 0,
    )  # fmt: skip


def list_fields(table: Tensor, rows: Tensor) -> tuple[int, int, int, int, int]:
    """Addresses of `table [B, n]` and `rows [B]`, both int32; B, the table's row stride, and n."""
    batch, width = table.shape
    stride, column = table.stride()
    if (
        table.dtype is not torch.int32
        or rows.dtype is not torch.int32
        or rows.numel() != batch
        or not rows.is_contiguous()
        or (column != 1 and width > 1)
        or not table.is_cpu
        or not rows.is_cpu
    ):
        raise ValueError(
            "page_table and lengths, or indices and counts, must be [B, n] and [B] of torch.int32, "
            f"contiguous, on the CPU: {_describe(table)}, {_describe(rows)}"
        )
    return table.data_ptr(), rows.data_ptr(), batch, stride, width


def score_fields(scores: Tensor, batch: int) -> tuple[int, int, int]:
    """Address, row stride and width of `scores [B, N]` fp32."""
    rows, width = scores.shape
    stride, column = scores.stride()
    if (
        scores.dtype is not torch.float32
        or rows != batch
        or (column != 1 and width > 1)
        or not scores.is_cpu
    ):
        raise ValueError(
            f"scores must be [{batch}, N] of torch.float32, contiguous in each row, on the CPU: "
            f"{_describe(scores)}"
        )
    return scores.data_ptr(), stride, width


def rows_fields(x: Tensor, cache: tuple[int, ...], name: str) -> tuple[int, int, int, int]:
    """Values for `ROWS`: `x [B, rows, heads, D]` from `dense_rows`, of the cache's B and D."""
    rows, _, _, dim = x.shape
    batch_stride, row, head, _ = x.stride()
    if rows != cache[_BATCH] or dim != cache[_HEAD_DIM] or not x.is_cpu:
        raise ValueError(
            f"{name} must be [{cache[_BATCH]}, rows, heads, {cache[_HEAD_DIM]}] on the CPU: "
            f"{_describe(x)}"
        )
    return x.data_ptr(), batch_stride, row, head


def dense_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x [B, rows, heads, D]` in `dtype` with contiguous heads; a copy only where it must be.

    The caller keeps it until the kernel, which has but its address, returns.
    """
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride()[3] == 1 else x.contiguous()


def _describe(x: Tensor) -> str:
    return f"{[*x.shape]} of {x.dtype} on {x.device}, strides {[*x.stride()]}"


def call(function: str, params: bytes) -> None:
    """Call an op with its packed parameter struct.

    Raises
    ------
    ValueError, NotImplementedError, MemoryError
        What the kernels refuse; the message says why.
    """
    library = _kernels.library
    assert library is not None, "takes() was not asked"
    status = getattr(library, function)(params, torch.get_num_threads())
    if status:
        message = library.dustin_last_error().decode(errors="replace")
        raise _ERRORS[status](f"{function.removeprefix('dustin_cpu_')}: {message}")


def read_rows(base: Tensor, row_bytes: int, rows: Tensor | None = None) -> int:
    """Read memory and do nothing else, for benchmarks; returns the sum of its 64-bit words.

    Parameters
    ----------
    base : contiguous Tensor
    row_bytes : bytes a row, a multiple of 64
    rows : Tensor `[n]` int64, row numbers in the order to read them; None reads all of `base`

    Raises
    ------
    RuntimeError
        Without the library.
    """
    if _kernels.library is None:
        raise RuntimeError(f"the native kernels are not there: {_kernels.problem}")
    count = base.nbytes // row_bytes if rows is None else len(rows)
    if rows is not None and len(rows):
        first, last = (int(row) for row in rows.aminmax())
        if rows.dtype != torch.int64 or first < 0 or last >= base.nbytes // row_bytes:
            raise ValueError("rows must be int64 and lie within base")
    total = ctypes.c_uint64()
    status = _kernels.library.dustin_cpu_read_rows(
        base.data_ptr(), row_bytes, None if rows is None else rows.data_ptr(), count,
        ctypes.byref(total), torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise _ERRORS[status](_kernels.library.dustin_last_error().decode(errors="replace"))
    return total.value

"""The native CPU kernels: found, loaded, and told which threads to run on.

The library (`plugins/cpu`) knows nothing of torch. Each op's file packs the parameter struct of
`plugins/include/dustin/kernels.h` and calls it through `call`. `DUSTIN_CPU_ISA` in the environment
names an instruction set, or `reference` for torch alone. `cuda` is the same for NVIDIA GPUs.
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

from dustin_trt.ops._native_library import CPU_LIBRARY, abi_problem, error_of, find_library
from dustin_trt.ops._params import DTYPES

REFERENCE = "reference"


class _Kernels:
    """The loaded library, or why there is none."""

    def __init__(self) -> None:
        self.path = find_library(CPU_LIBRARY)
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
        if problem := abi_problem(library, self.path):
            return problem
        for name in ("dustin_cpu_isas", "dustin_cpu_isa"):
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


def call(function: str, params: bytes) -> None:
    """Call an op with its packed parameter struct.

    Raises
    ------
    ValueError, NotImplementedError, MemoryError
        What the kernels refuse; the message says why.
    """
    library = _kernels.library
    assert library is not None, "takes() was not asked"
    if status := getattr(library, function)(params, torch.get_num_threads()):
        raise error_of(library, status, function.removeprefix("dustin_cpu_"))


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
        raise error_of(_kernels.library, status, "read_rows")
    return total.value

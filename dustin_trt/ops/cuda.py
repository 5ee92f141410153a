"""The CUDA kernels: found, loaded and queued on torch's stream.

The library (`plugins/cuda`) is built by `make cuda`. It takes float16 and bfloat16 and the head
sizes of common models; the rest runs the torch reference, which is said once. A build for the host
(`make emulated`) has the same functions and works on CPU tensors: the tests run this very module
over it.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dustin_trt.ops._native_library import CUDA_LIBRARY, abi_problem, error_of, find_library

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Head sizes that the kernels are compiled for."""
MAX_GROUP = 16
"""Query heads a KV head."""
MAX_SCORED_HEADS = 128
"""Query heads of a scoring call."""

_WITH_WORKSPACE = ("srh_score", "dense_attention", "sparse_attention")
_OPS = ("kv_append", "select_tokens", *_WITH_WORKSPACE)
_ALIGNMENT = 256  # of a workspace, bytes


class CudaLibrary:
    """The library, or why there is none.

    Parameters
    ----------
    path : of the library; None where none was built

    Attributes
    ----------
    problem : why the torch reference does the work, in one phrase; None where the kernels do
    emulated : whether this is the build for the host, which works on CPU tensors
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.emulated = False
        self._library: ctypes.CDLL | None = None
        self.problem = self._load()

    def _load(self) -> str | None:
        if self.path is None:
            return "no library was built (make cuda builds it)"
        try:
            library = ctypes.CDLL(str(self.path))
        except OSError as error:
            return f"{self.path} cannot be loaded: {error}"
        if problem := abi_problem(library, self.path):
            return problem
        for op in _OPS:
            extra: tuple[Any, ...] = ()
            if op in _WITH_WORKSPACE:
                extra = (ctypes.c_void_p, ctypes.c_int64)
                query = getattr(library, f"dustin_cuda_{op}_workspace")
                query.argtypes, query.restype = (ctypes.c_char_p,), ctypes.c_int64
            getattr(library, f"dustin_cuda_{op}").argtypes = (
                ctypes.c_char_p, *extra, ctypes.c_void_p,
            )  # fmt: skip
        self._library = library
        self.emulated = hasattr(library, "dustin_cuda_emulated")
        return None

    def call(self, op: str, params: bytes, device: torch.device) -> None:
        """Queue an op on the device's current stream, with a workspace of torch's allocator.

        Raises
        ------
        ValueError, NotImplementedError, RuntimeError
            What the kernels refuse; nothing was queued then.
        """
        library = self._library
        assert library is not None, "there is no library"
        on_device: AbstractContextManager[Any] = nullcontext()
        if not self.emulated:
            on_device = torch.cuda.device(device)
        with on_device:
            stream = None if self.emulated else torch.cuda.current_stream().cuda_stream
            arguments: tuple[Any, ...] = (params,)
            if op in _WITH_WORKSPACE:
                size = getattr(library, f"dustin_cuda_{op}_workspace")(params)
                # Not zeroed; free again at once, for what is queued on this stream behind the op.
                memory = torch.empty(max(size, 0) + _ALIGNMENT, dtype=torch.uint8, device=device)
                address = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
                arguments = (params, address, size)
            if status := getattr(library, f"dustin_cuda_{op}")(*arguments, stream):
                raise error_of(library, status, op)


_library = CudaLibrary(find_library(CUDA_LIBRARY))


def library_path() -> Path | None:
    """Where the library lies."""
    return _library.path


def problem() -> str | None:
    """Why torch does the work on CUDA tensors, in one phrase; None where the kernels do."""
    if _library.problem is None and _library.emulated:
        return f"{_library.path} is the emulated build, for CPU tensors: unset DUSTIN_CUDA_LIBRARY"
    return _library.problem


def use(library: CudaLibrary) -> None:
    """Use another library from now on."""
    global _library
    _library = library


@contextmanager
def using(library: CudaLibrary) -> Iterator[None]:
    """Use another library for a while; for tests."""
    before = _library
    use(library)
    try:
        yield
    finally:
        use(before)


def takes(cache: Tensor, heads: int) -> bool:
    """Whether the kernels do the work on a cache `[pages, Hkv, page_size, D]` for `heads` heads."""
    return (
        _works_on(cache)
        and cache.dtype in (torch.float16, torch.bfloat16)
        and cache.shape[-1] in HEAD_DIMS
        and heads <= MAX_GROUP * cache.shape[1]
    )


def _works_on(x: Tensor) -> bool:
    return _library.problem is None and x.is_cpu == _library.emulated


Result = TypeVar("Result")


def run(
    op: str,
    prepared: Callable[[], tuple[bytes, Result]],
    reference: Callable[[], Result],
    on: Tensor,
) -> Result:
    """Run an op by its kernel or, where that does not take the arguments, by its reference.

    Parameters
    ----------
    op : name
    prepared : returns the parameter struct, and the outputs that it points to; raises ValueError
        for tensors that do not fit together
    reference : the specification, on the same arguments
    on : a tensor on the device that is worked on
    """
    if not _works_on(on):
        return reference()
    params, outputs = prepared()
    try:
        _library.call(op, params, on.device)
    except NotImplementedError as error:  # nothing was queued
        warnings.warn(f"{error}: the torch reference runs instead, slowly", stacklevel=3)
        return reference()
    return outputs

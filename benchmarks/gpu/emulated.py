"""The CUDA ops of `dustin_trt.ops` on CPU tensors, for a rehearsal.

The binding is the one of a GPU; the library the kernels' own source compiled for the host
(`tests/cuda`).
"""

from __future__ import annotations

import importlib

from benchmarks.gpu.building import EMULATED_LIBRARY
from dustin_trt import ops
from dustin_trt.ops import cuda


def install() -> None:
    """Put them in the place of `dustin_trt.ops`, for what calls them as `ops.NAME`, for good.

    Raises
    ------
    RuntimeError
        Where they have not been built.
    """
    library = cuda.CudaLibrary(EMULATED_LIBRARY if EMULATED_LIBRARY.is_file() else None)
    if not library.emulated:
        raise RuntimeError(f"{EMULATED_LIBRARY} is not there or not usable: run make emulated")
    cuda.use(library)
    for name in ops.__all__:
        setattr(ops, name, importlib.import_module(f"dustin_trt.ops.{name}")._cuda)

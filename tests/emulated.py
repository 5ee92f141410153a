"""The CUDA kernels' build for the host."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from dustin_trt.ops.cuda import CudaLibrary

PATH = Path(__file__).parents[1] / "build" / "emulated" / "libdustin_cuda_emulated.so"


@lru_cache
def emulated_library() -> CudaLibrary:
    """The library; skips the test where it was not built."""
    if not PATH.is_file():
        pytest.skip("the emulated CUDA kernels are not built: run make emulated")
    library = CudaLibrary(PATH)
    assert library.problem is None, library.problem
    return library

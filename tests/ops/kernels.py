"""Everything that can run behind the ops: torch, and each instruction set there is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import pytest

from dustin_trt.ops import native

KERNELS = ("torch", *native.isas())

_TORCH = {"torch": native.REFERENCE}


def on(kernels: str, op: Callable) -> Callable:
    """The op, run by one of `KERNELS`."""

    @wraps(op)
    def run(*arguments):
        with native.using(_TORCH.get(kernels, kernels)):
            return op(*arguments)

    return run


@pytest.fixture(autouse=True, params=KERNELS)
def each_kernel(request):
    """Imported into a module: each of its tests runs on each of `KERNELS`."""
    with native.using(_TORCH.get(request.param, request.param)):
        yield request.param

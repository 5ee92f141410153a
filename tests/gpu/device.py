"""Where the tests of this folder run: on an NVIDIA GPU, or in a rehearsal on CPU tensors.

Importing this skips the importing module where there is neither. `DUSTIN_REHEARSAL` is "cpu" for
the ops of the CPU, or "emulated" for the CUDA kernels under their emulator; `make gpu-dry` sets it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = os.environ.get("DUSTIN_REHEARSAL")
if REHEARSAL not in (None, "cpu", "emulated"):
    raise ValueError(f"DUSTIN_REHEARSAL is {REHEARSAL!r}: write cpu or emulated")
if REHEARSAL is None and not torch.cuda.is_available():
    pytest.skip("torch finds no NVIDIA GPU here (make gpu-dry rehearses)", allow_module_level=True)

if REHEARSAL == "emulated":
    from benchmarks.gpu import emulated

    emulated.install()

DEVICE = "cpu" if REHEARSAL else "cuda"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""`‖out - right‖ / ‖right‖` of the whole; one head of one token may be off three times as much."""

needs_gpu = pytest.mark.skipif(REHEARSAL is not None, reason="a rehearsal has no GPU")


def replayed(call: Callable[[], object]) -> Callable[[], None]:
    """`call` captured in a CUDA graph; what it returned is written anew by every replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # what loads lazily must be loaded
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def poison_outputs(*likes: Tensor) -> None:
    """Leave NaN where the allocator finds memory for outputs: none may stay unwritten."""
    # Freed blocks of a size are handed out again, last in, first out.
    for _ in range(2):
        blocks = [torch.full_like(like, torch.nan) for like in likes for _ in range(2)]
        del blocks


def close(found: Tensor, right: Tensor, dtype: torch.dtype, what: str) -> None:
    """Compare in the norm, as a whole and by the last dimension."""
    found = found.double()
    assert not found.isnan().any(), f"{what}: NaN"
    error = float((found - right).norm() / right.norm().clamp(min=1e-30))
    assert error <= TOLERANCE[dtype], f"{what}: off by {error:.1e}"
    each = (found - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-3)
    worst = float(each.max())
    assert worst <= 3 * TOLERANCE[dtype], f"{what}: one row is off by {worst:.1e}"

"""The libraries for this machine: CUDA kernels for its GPU, CPU kernels where they are missing."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.phases import Phase, run

LIBRARIES = ROOT / "dustin_trt" / "lib"
CUDA_LIBRARY = LIBRARIES / "libdustin_cuda.so"
CPU_LIBRARY = LIBRARIES / "libdustin_cpu.so"
EMULATED_LIBRARY = ROOT / "build" / "emulated" / "libdustin_cuda_emulated.so"


def build_cuda(capability: str, budget: float) -> Phase:
    """Build `libdustin_cuda.so` for one compute capability, like "9.0"."""
    name = capability.replace(".", "")
    # Machine code of one chip is built with what only that chip has.
    architecture = f"{name}a-real" if name in ("90", "100", "103", "120") else f"{name}-real"
    options = ["-DDUSTIN_CUDA=ON", f"-DDUSTIN_CUDA_ARCHITECTURES={architecture}"]
    return _build("build CUDA kernels", ROOT / "build" / "cuda", options, CUDA_LIBRARY, budget)


def build_cpu(budget: float) -> Phase:
    """Build the CPU kernels, which prepare inputs and serve what stays on the CPU."""
    return _build("build CPU kernels", ROOT / "build" / "cpu", [], CPU_LIBRARY, budget)


def _build(name: str, folder: Path, options: list[str], library: Path, budget: float) -> Phase:
    configure = ["cmake", "-S", ".", "-B", str(folder), "-G", "Ninja", *options]
    configured = run(name, configure, budget, echo=False)
    if not configured.ok:
        return configured
    compile_it = ["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 2)]
    built = run(name, compile_it, max(1.0, budget - configured.seconds), echo=False)
    problem = built.problem
    if problem is None and not library.is_file():
        problem = f"the build left no {library.relative_to(ROOT)}"
    return Phase(name, configured.seconds + built.seconds, problem, built.output)

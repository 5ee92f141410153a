"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch
import transformers

from dustin_trt.ops import native


def describe() -> dict[str, str | int]:
    """Processor, cores, threads, kernels and versions, for reports."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "last_level_cache_mib": last_level_cache() // 2**20,
        "kernels": kernels(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def kernels() -> str:
    """Which implementation of the ops is in use, and on whose threads."""
    if problem := native.problem():
        return f"torch ({problem})"
    return f"native {native.isa()}, {native.pool()}"


def in_one_line() -> str:
    """Machine and software for the foot of a picture."""
    name = re.sub(r"\(R\)|\(TM\)|Processor|CPU", "", _cpuinfo("model name") or platform.machine())
    isa = "torch ops" if native.problem() else f"native {native.isa()} kernels"
    return (
        f"{' '.join(name.split())}, {os.cpu_count()} cores, threads: {torch.get_num_threads()}, "
        f"{describe()['memory_gib']} GiB; {isa}; torch {torch.__version__}"
    )


def slug() -> str:
    """The machine as a part of a file name, like "intel-xeon-2c-amx"."""
    name = re.sub(r"\(R\)|\(TM\)|Processor|CPU|@.*", "", _cpuinfo("model name") or "cpu")
    words = re.findall(r"[a-z0-9]+", f"{name} {os.cpu_count()}c".lower())
    return "-".join([*words, "torch" if native.problem() else native.isa().replace("_", "-")])


def last_level_cache() -> int:
    """Bytes of the largest cache the first core sees; 32 MiB where that is not known."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        found = [int(file.read_text().strip().removesuffix("K")) * 1024 for file in sizes]
    except (OSError, ValueError):
        found = []
    return max(found, default=32 * 2**20)


def available_memory() -> int:
    """Bytes that can be allocated now without swapping; all there are where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kib) * 1024
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def instruction_sets() -> list[str]:
    """The vector and matrix extensions that matter here, as Linux names them; empty elsewhere."""
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
    flags = set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())
    return [name for name in known if name in flags]


def fastest_dtype() -> str:
    """What computes fastest here: "bfloat16" where the processor multiplies it, or "float32"."""
    has_bfloat16 = {"amx_bf16", "avx512_bf16"} & set(instruction_sets())
    return "bfloat16" if has_bfloat16 else "float32"


def _processor() -> str:
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    return f"{name} ({', '.join(instruction_sets())})" if instruction_sets() else name


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, "")

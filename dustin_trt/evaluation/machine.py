"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers


def describe() -> dict[str, str | int]:
    """Processor, cores, threads and versions, for reports."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


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

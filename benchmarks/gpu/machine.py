"""What this machine has, and what is missing to build, test and measure on its GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {
    "nvcc": "install the CUDA toolkit, or put its bin folder on PATH",
    "cmake": "pip install cmake",
    "ninja": "pip install ninja",
}
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pytest")
EXTRA_PACKAGES = ROOT / "build" / "gpu-packages"
"""Where packages may lie that the machine's Python lacks; `environment` puts it on the path."""


def environment() -> dict[str, str]:
    """For every process of a run: this folder's package first, then its own, then carried ones."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(EXTRA_PACKAGES)]
    bins = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PATH": os.pathsep.join(filter(None, bins)),
    }


_PROBE = """
import importlib.util, json
found = {"absent": [n for n in %r if importlib.util.find_spec(n) is None], "gpu": None}

def look():
    import torch, transformers
    found.update(torch=torch.__version__, cuda=torch.version.cuda,
                 transformers=transformers.__version__)
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        found.update(gpu=p.name, capability=f"{p.major}.{p.minor}",
                     multiprocessors=p.multi_processor_count, l2_mib=p.L2_cache_size >> 20,
                     memory_gib=p.total_memory >> 30)

try:
    if not found["absent"]:
        look()
except Exception as error:
    found["broken"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@cache
def probe() -> dict[str, Any]:
    """What Python and torch see here, from a process of its own: this one never holds the GPU."""
    line = first_line([sys.executable, "-c", _PROBE % (PACKAGES,)], r"^{.*}$")
    return json.loads(line) if line else {"absent": [], "broken": "Python itself fails"}


def first_line(command: Sequence[str], pattern: str = "") -> str | None:
    """The first line of a command's output in which `pattern` is found; None where it fails."""
    environ = environment()
    program = shutil.which(command[0], path=environ["PATH"])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=60, env=environ,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (line.strip() for line in done.stdout.splitlines() if done.returncode == 0)
    return next((line for line in lines if re.search(pattern, line)), None)


def missing(rehearse: bool) -> list[str]:
    """What has to be there and is not, with its cure, in the order to see to it."""
    seen, found = probe(), []
    if absent := seen["absent"]:
        names = " ".join(absent)
        found.append(f"{sys.executable} has no {', '.join(absent)}: pip install {names}")
    if broken := seen.get("broken"):
        found.append(f"{sys.executable} cannot import torch and transformers: {broken}")
    if rehearse or broken:
        return found
    if not absent and seen["gpu"] is None:
        if seen["cuda"] is None:
            found.append("this torch was built without CUDA: install one with it")
        else:
            found.append("torch finds no NVIDIA GPU: run this on a machine with one")
    path = environment()["PATH"]
    for tool, cure in TOOLS.items():
        if shutil.which(tool, path=path) is None:
            found.append(f"there is no {tool}: {cure}")
    return found


def describe(rehearse: bool) -> dict[str, Any]:
    """Machine and versions, for the record: nothing of where it stands or what it is called."""
    seen = probe()
    gpu = ("gpu", "capability", "multiprocessors", "l2_mib", "memory_gib")
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        **{name: None if rehearse else seen.get(name) for name in gpu},
        "driver": None if rehearse else first_line(driver),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: seen.get(name) for name in ("torch", "cuda", "transformers")},
        "nvcc": first_line(["nvcc", "--version"], "release"),
        "commit": commit(),
    }


def _processor() -> str | None:
    line = first_line(["grep", "-m1", "model name", "/proc/cpuinfo"]) or ""
    return line.partition(":")[2].strip() or None


def commit() -> str | None:
    """The commit measured, with "+changes" where files differ from it; None in a copy without git.

    `DUSTIN_COMMIT` names it where the tree was copied without its history.
    """
    if named := os.environ.get("DUSTIN_COMMIT"):
        return named
    head = first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if head is None:
        return None
    changed = first_line(["git", "-C", str(ROOT), "status", "--porcelain"])
    return head + ("+changes" if changed else "")


def slug(gpu: str | None) -> str:
    """A GPU's name as a part of a file name, like "nvidia-h200"."""
    return "-".join(re.findall(r"[a-z0-9]+", (gpu or "gpu").lower()))

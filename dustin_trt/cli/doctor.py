"""`dustin-trt doctor`: which backends work here, found by trying them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata

from dustin_trt import __version__

OLDEST_TRANSFORMERS = (4, 57)
NEWEST_TESTED_TRANSFORMERS = (5, 24)


@dataclass(frozen=True)
class Finding:
    """What trying a backend showed.

    Attributes
    ----------
    name : of the backend
    works : whether it did what this version of dustin-trt needs of it
    detail : what was tried or found
    why_not : why it does not work
    to_do : what to install or change
    generates : whether `dustin-trt generate` can run on it
    """

    name: str
    works: bool
    detail: str
    why_not: str = ""
    to_do: str = ""
    generates: bool = False


def run(*, json: bool) -> int:  # named as the flag is
    """Print what was found; 0 if something can generate."""
    findings = examine()
    if json:
        print(_as_json(findings))
    else:
        _print_table(findings)
    return 0 if any(finding.generates for finding in findings) else 1


def examine() -> list[Finding]:
    """Try everything; a check that itself fails is a finding too."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def _guarded(name: str, check: Callable[[str], Finding]) -> Finding:
    try:
        return check(name)
    except Exception as error:
        reason = " ".join(str(error).split())
        to_do = "report this"
        if isinstance(error, ImportError):
            to_do = "install what is missing"
        elif isinstance(error, (ValueError, FileNotFoundError)):  # of an environment variable
            to_do = "correct what this names, or report it"
        return Finding(name, False, "tried", f"{type(error).__name__}: {reason}", to_do)


def _torch_cpu(name: str) -> Finding:
    return _torch(name, "cpu", f"{os.cpu_count()} processors, {_bfloat16_hint()}")


def _torch_cuda(name: str) -> Finding:
    import torch

    if not torch.cuda.is_available():
        why, to_do = "torch finds no usable NVIDIA GPU", "check the driver with nvidia-smi"
        if torch.version.cuda is None:
            why, to_do = "this torch is built without CUDA", "with an NVIDIA GPU, get one with CUDA"
        return Finding(name, False, f"torch {torch.__version__}", why, to_do)
    count = torch.cuda.device_count()
    devices = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    return _torch(name, "cuda", devices)


def _torch(name: str, device: str, found: str) -> Finding:
    import torch

    from dustin_trt.cli import selfcheck

    wrong = selfcheck.wrong_ops(device)
    if not wrong:
        selfcheck.generate(device)
    detail = f"torch {torch.__version__}; {found}; "
    if wrong:
        why = f"differs from the reference: {', '.join(wrong)}"
        return Finding(name, False, detail + "compared the five ops", why, "use another torch")
    detail += "ran the five ops against their references, and a small random model end to end"
    return Finding(name, True, detail, generates=True)


def _bfloat16_hint() -> str:
    from dustin_trt.evaluation.machine import instruction_sets

    if not sys.platform.startswith("linux"):
        return "whether it has bfloat16 instructions is not known on this system"
    found = [flag for flag in instruction_sets() if flag in ("amx_bf16", "avx512_bf16", "bf16")]
    if found:
        return f"bfloat16 instructions ({', '.join(found)}): try --dtype bfloat16"
    return "no bfloat16 instructions: float32 is probably faster"


def _transformers(name: str) -> Finding:
    oldest, newest = ("{}.{}".format(*v) for v in (OLDEST_TRANSFORMERS, NEWEST_TESTED_TRANSFORMERS))
    to_do = f"pip install 'transformers>={oldest}'"
    if (version := _version("transformers")) is None:
        return Finding(name, False, "not installed", "models are run through it", to_do)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST_TRANSFORMERS:
        return Finding(name, False, version, f"older than {oldest}", to_do)
    from dustin_trt.models import causal_lm

    detail = f"{version}; models: {', '.join(causal_lm.SUPPORTED)}"
    if numbers > NEWEST_TESTED_TRANSFORMERS:
        detail += f"; newer than {newest}, the newest tested"
    return Finding(name, True, detail)


def _native_cpu(name: str) -> Finding:
    from dustin_trt.ops import native

    path, isas = native.library_path(), native.isas()
    found = f"library {path}" if path else "no library"
    if (why_not := native.problem()) is None:
        others = [isa for isa in isas if isa != native.isa()]
        found = f"{native.isa()} in use; {found}; {native.pool()}"
        if others:
            found += f"; DUSTIN_CPU_ISA can choose {', '.join(others)} or reference"
        return Finding(name, True, found)
    if path is None:
        to_do = "install a C++ compiler, then dustin-trt anew; until then torch serves"
    elif isas:
        to_do = f"unset DUSTIN_CPU_ISA, or set it to one of: {', '.join(isas)}"
    else:
        to_do = "install dustin-trt anew, so that the library is built for it"
    return Finding(name, False, found, why_not, to_do)


def _native_cuda(name: str) -> Finding:
    import torch

    from dustin_trt.ops import cuda

    path = cuda.library_path()
    found = f"library {path}" if path else "no library"
    if why_not := cuda.problem():
        to_do = "on a machine with an NVIDIA GPU and nvcc, build it; until then torch serves"
        return Finding(name, False, found, why_not, to_do)
    if not torch.cuda.is_available():
        to_do = "see torch on CUDA above"
        return Finding(name, False, found, "torch finds no usable NVIDIA GPU", to_do)
    # One real call: a library for another GPU's architecture loads, and fails only here.
    lengths = torch.ones(1, dtype=torch.int32, device="cuda")
    from dustin_trt import ops

    ops.select_tokens(None, None, lengths, 1, 0, 0, 1)
    torch.cuda.synchronize()
    return Finding(name, True, f"{found}; float16 and bfloat16, head sizes {cuda.HEAD_DIMS}")


def _tensorrt_plugins(name: str) -> Finding:
    from dustin_trt.engines.plugin_library import VARIABLE, fingerprint, plugin_library

    if (path := plugin_library()) is None:
        why = f"{VARIABLE} names none, and none was built"
        to_do = "with nvcc and TensorRT's headers: make plugins, see docs/tensorrt.md"
        return Finding(name, False, "no library", why, to_do)
    return Finding(name, True, f"library {path}, fingerprint {fingerprint(path)}")


def _tensorrt(name: str) -> Finding:
    return _compiler(
        name, "tensorrt", "a container with TensorRT 10.14 or newer, see docs/tensorrt.md"
    )


def _tensorrt_rtx(name: str) -> Finding:
    return _compiler(name, "tensorrt_rtx", "pip install 'dustin-trt[tensorrt-rtx]'")


def _compiler(name: str, module: str, to_do: str) -> Finding:
    """Whether it takes the plugins and, with a GPU, starts a runtime for engines."""
    import torch

    from dustin_trt.engines.plugin_library import require_plugins
    from dustin_trt.engines.tensorrt_device import TensorRTError
    from dustin_trt.engines.tensorrt_runtime import import_tensorrt, runtime

    if importlib.util.find_spec(module) is None:
        return Finding(name, False, "not installed", "engines are built and run by it", to_do)
    found = f"{name} {import_tensorrt(module).__version__}"
    try:
        plugins = require_plugins()
    except FileNotFoundError as error:
        return Finding(name, False, found, str(error), "see TensorRT plugins")
    if not torch.cuda.is_available():
        if module == "tensorrt_rtx":
            detail = f"{found}; builds engines for another machine's GPU, runs none without one"
            return Finding(name, True, detail)
        why = "it builds and runs engines on an NVIDIA GPU only"
        return Finding(name, False, found, why, "see torch on CUDA above")
    try:
        runtime(module, plugins)
    except (TensorRTError, ValueError) as error:
        return Finding(name, False, found, str(error), "correct what it names")
    return Finding(name, True, f"{found}; loaded the plugins and started")


def _tensorrt_llm(name: str) -> Finding:
    # Looked up, not imported: importing TensorRT-LLM takes long and starts MPI.
    installed = importlib.util.find_spec("tensorrt_llm") is not None
    detail = f"{name} {_version('tensorrt_llm') or 'of unknown version'}"
    return Finding(
        name,
        False,
        detail if installed else "not installed",
        "this version of dustin-trt does not run inside its executor",
        "build TensorRT engines: dustin-trt build",
    )


def _triton(name: str) -> Finding:
    server = shutil.which("tritonserver")
    return Finding(
        name,
        False,
        f"tritonserver is {server}" if server else "tritonserver is not on PATH",
        "serving is not part of this version",
        "use dustin-trt generate, or the library",
    )


CHECKS: dict[str, Callable[[str], Finding]] = {
    "transformers": _transformers,
    "torch on CPU": _torch_cpu,
    "torch on CUDA": _torch_cuda,
    "native CPU kernels": _native_cpu,
    "CUDA kernels": _native_cuda,
    "TensorRT plugins": _tensorrt_plugins,
    "TensorRT": _tensorrt,
    "TensorRT-RTX": _tensorrt_rtx,
    "TensorRT-LLM": _tensorrt_llm,
    "Triton": _triton,
}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _as_json(findings: list[Finding]) -> str:
    report = {
        "dustin_trt": __version__,
        "python": sys.version.partition(" ")[0],
        "can_generate": any(finding.generates for finding in findings),
        "backends": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=2, ensure_ascii=False)


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "works", "what was found", "why not, and what to do")
    for finding in findings:
        reasons = [part for part in (finding.why_not, finding.to_do) if part]
        works = Text("yes", "green") if finding.works else Text("no")
        detail = Text(finding.detail, overflow="fold")  # a path is shown whole
        table.add_row(finding.name, works, detail, Text("; ".join(reasons)))
    console = Console()
    console.print(f"dustin-trt {__version__}, Python {sys.version.partition(' ')[0]}")
    console.print(table)
    usable = [finding.name for finding in findings if finding.generates]
    console.print(
        f"dustin-trt generate runs on: {', '.join(usable)}"
        if usable
        else "dustin-trt generate cannot run here; see what to do above"
    )

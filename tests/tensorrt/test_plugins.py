"""The TensorRT plugins over the emulated kernels, and what their libraries show to the outside."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "build" / "host" / "tests" / "tensorrt" / "test_plugins"
LIBRARIES = {
    "emulated": ROOT / "build" / "emulated" / "libdustin_trt_plugins_emulated.so",
    "CUDA": ROOT / "dustin_trt" / "lib" / "libdustin_trt_plugins.so",
}


@pytest.fixture(params=LIBRARIES)
def library(request):
    path = LIBRARIES[request.param]
    if not path.is_file():
        pytest.skip(f"the {request.param} plugins are not built: run make emulated or make plugins")
    return path


@pytest.mark.parametrize("seed", [1, 2])
def test_every_plugin_as_tensorrt_would_run_it(seed):
    if not PROGRAM.is_file():
        pytest.skip("not built: make emulated, where TensorRT's headers are installed")
    ran = subprocess.run([PROGRAM, str(seed)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    checks, wrong = re.fullmatch(
        r"TensorRT plugins: (\d+) checks, (\d+) wrong\n", ran.stdout
    ).groups()
    assert int(checks) > 100_000
    assert int(wrong) == 0


def test_tensorrt_finds_five_creators(library):
    plugins = ctypes.CDLL(str(library))
    plugins.getCreators.restype = ctypes.POINTER(ctypes.c_void_p)
    count = ctypes.c_int32()
    creators = plugins.getCreators(ctypes.byref(count))
    assert count.value == 5
    assert all(creators[i] for i in range(5))


def test_nothing_else_is_exported(library):
    if not shutil.which("nm"):
        pytest.skip("needs nm of the binutils")
    command = ["nm", "--dynamic", "--format=posix", library]
    lines = [
        line.split() for line in subprocess.check_output(command, text=True).splitlines() if line
    ]
    exported = {name for name, kind, *_ in lines if kind in "TDBRVW"}
    # A header's inline functions may call what only libnvinfer has.
    wanted = {name for name, kind, *_ in lines if kind == "U"}
    assert {"getCreators", "setLoggerFinder", "dustin_abi_version"} <= exported
    assert all(name.startswith("dustin_") for name in exported - {"getCreators", "setLoggerFinder"})
    assert not any("nvinfer" in name for name in wanted)

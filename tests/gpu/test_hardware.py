"""What only hardware can say: fragment layouts, and compute-sanitizer's verdict."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from tests.gpu.device import REHEARSAL, ROOT

PROBE = ROOT / "tests" / "cuda" / "layout_probe.cu"
DRIVER = ROOT / "tests" / "gpu" / "driver.cu"
EMULATED = ROOT / "build" / "emulated"
TOOLS = {
    "memcheck": ["--leak-check", "full"],
    "racecheck": [],
    "synccheck": [],
    "initcheck": [],
}


def run(*command, seconds=120):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=seconds, check=False
    )
    return done.returncode, done.stdout + done.stderr


def built(folder, *arguments):
    """A program for this GPU, made by nvcc."""
    major, minor = torch.cuda.get_device_capability()
    program = folder / "program"
    nvcc = shutil.which("nvcc")
    assert nvcc, "nvcc is not on PATH"
    options = ["-std=c++17", "-O1", "-lineinfo", f"-arch=sm_{major}{minor}"]
    status, output = run(nvcc, *options, *arguments, "-o", program)
    assert status == 0, output
    return program


@pytest.mark.skipif(REHEARSAL is not None, reason="a rehearsal has no GPU")
@pytest.mark.skipif(not PROBE.is_file(), reason=f"there is no {PROBE.relative_to(ROOT)}")
def test_fragments_of_mma_and_ldmatrix_lie_where_the_emulator_says(tmp_path):
    program = built(
        tmp_path, PROBE, f"-I{ROOT}",
        *(f"-I{ROOT / 'plugins' / folder}" for folder in ("include", "common", "cuda")),
    )  # fmt: skip
    status, output = run(program)
    assert status == 0 and "layout ok" in output, output


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    libraries = ROOT / "dustin_trt" / "lib"
    return built(
        tmp_path_factory.mktemp("driver"), DRIVER, f"-I{ROOT / 'plugins/include'}",
        f"-L{libraries}", "-ldustin_cuda", "-Xlinker", f"-rpath={libraries}",
    )  # fmt: skip


@pytest.mark.skipif(REHEARSAL is not None, reason="a rehearsal has no GPU")
class TestSanitizer:
    def test_the_driver_runs(self, driver):
        status, output = run(driver)
        assert status == 0 and "driver ok" in output, output

    @pytest.mark.parametrize("tool", TOOLS)
    def test_finds_nothing(self, driver, tool):
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None:
            pytest.skip("there is no compute-sanitizer")
        options = ["--tool", tool, "--error-exitcode", "9", *TOOLS[tool]]
        status, output = run(sanitizer, *options, driver)
        if "Device not supported" in output:
            pytest.skip("compute-sanitizer does not support this device or its runtime")
        assert status == 0 and "driver ok" in output, output[-3000:]


@pytest.mark.skipif(REHEARSAL != "emulated", reason="only in a rehearsal with emulated kernels")
def test_the_driver_runs_on_emulated_kernels_smallest(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "driver"
    status, output = run(
        compiler, "-std=c++17", "-O1", "-DDUSTIN_EMULATED", "-x", "c++", DRIVER, "-x", "none",
        f"-I{ROOT / 'plugins/include'}", EMULATED / "libdustin_cuda_emulated.so",
        f"-Wl,-rpath,{EMULATED}", "-o", program,
    )  # fmt: skip
    assert status == 0, output
    status, output = run(program)
    assert status == 0 and "driver ok" in output, output

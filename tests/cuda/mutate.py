"""Runs the emulated kernels' tests on broken kernels.

python -m tests.cuda.mutate                 # all of tests/cuda/mutants.py
python -m tests.cuda.mutate --only "mask"   # those whose mistake has the word in it
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.cuda.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "plugins" / "cuda"
TIMEOUT = 120  # seconds; a broken kernel may run forever

# What a file's mistake shows in: the op's test, its sources, and the head size to test. One head
# size of attention keeps a mutant to seconds; scoring's leftover dimensions need one of 80.
ATTENTION = ("attention", ("attention.cu", "attention_64.cu"), 64)
SRH_SCORE = ("srh_score", ("srh_score.cu",), 0)
OPS = {
    "attention.cu": ATTENTION,
    "attention.cuh": ATTENTION,
    "attention_launch.cuh": ATTENTION,
    "cache.cuh": ATTENTION,
    "kv_append.cuh": ("kv_append", ("kv_append.cu",), 0),
    "srh_score.cu": SRH_SCORE,
    "srh_score.cuh": SRH_SCORE,
    "select_tokens.cuh": ("select_tokens", ("select_tokens.cu",), 0),
}
FLAGS = ("-std=c++17", "-O1", "-w", "-fno-math-errno")


@dataclass(frozen=True)
class Outcome:
    caught: bool
    how: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Builds every kernel of tests/cuda/mutants.py under the emulator and runs its "
        "tests: each must fail. Exits with 1 if one survives."
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="mistakes with this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th of them")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.mistake][:: options.every]
    if not chosen:
        parser.error(f"no mutant's mistake has {options.only!r} in it")
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        objects = build_shared(Path(folder))
        for file in sorted({OPS[m.file]: m.file for m in chosen}.values()):  # one of each op
            if (outcome := run(Path(folder), objects, file, None)).caught:
                print(f"error: the unbroken kernels of {file} fail: {outcome.how}")
                return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = pool.map(lambda m: run(Path(folder), objects, m.file, m), chosen)
            for number, (mutant, outcome) in enumerate(zip(chosen, outcomes, strict=True), 1):
                word = "caught  " if outcome.caught else "SURVIVED"
                print(
                    f"{number:3}/{len(chosen)} {word} {outcome.seconds:5.1f} s  {mutant.file}: "
                    f"{mutant.mistake} ({outcome.how})",
                    flush=True,
                )
                if not outcome.caught:
                    survivors.append(mutant.mistake)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} broken kernels caught")
    return 1 if survivors else 0


def build_shared(folder: Path) -> list[Path]:
    """Objects without kernels: the emulator, the checks, the tests."""
    sources = [
        ROOT / "tests/cuda/emulator.cpp",
        ROOT / "tests/cuda/test_cuda.cpp",
        ROOT / "tests/cuda/test_refusals.cpp",
        CUDA / "supported.cpp",
        ROOT / "plugins/common/checks.cpp",
        ROOT / "plugins/common/status.cpp",
    ]
    objects = []
    for source in sources:
        objects.append(folder / f"{source.stem}.o")
        compile_one(source, objects[-1], CUDA)
    return objects


def run(folder: Path, objects: list[Path], file: str, mutant: Mutant | None) -> Outcome:
    """Build and test one mutant, or the unbroken kernels."""
    started = time.perf_counter()
    op, sources, head_dim = OPS[file]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        kernels = work / "cuda"
        shutil.copytree(CUDA, kernels)
        if mutant:
            broken(mutant, kernels / mutant.file)
        compiled = [work / f"{Path(source).stem}.o" for source in sources]
        for source, output in zip(sources, compiled, strict=True):
            compile_one(kernels / source, output, kernels)
        program = work / "test_cuda"
        # Ops that are not tested need not be there; a static program does not look for them.
        missing = ("-static", "-Wl,--unresolved-symbols=ignore-all")
        command = ["g++", *compiled, *objects, *missing, "-o", program]
        subprocess.run(command, check=True)
        how = test(program, op, head_dim)
    return Outcome(how != "", how or "no test failed", time.perf_counter() - started)


def test(program: Path, op: str, head_dim: int) -> str:
    """How the tests fail, by the first failure; "" where they pass."""
    command = [program, "8", "1", op, str(head_dim)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(TIMEOUT, process.kill)
        timer.start()
        said = process.stderr.readline().strip()
        if said.startswith("FAILED"):
            process.kill()  # what is left takes as long as tests that pass
        process.stderr.read()
        process.wait()
        timer.cancel()
    if process.returncode == 0:
        return ""
    if process.returncode == -signal.SIGKILL and not said:
        return "no end"
    said = said or f"signal {-process.returncode}"
    return said.removeprefix("FAILED ").split(" page=")[0][:80]


def broken(mutant: Mutant, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.find) != 1:
        raise ValueError(f"{mutant.mistake!r}: its text occurs {text.count(mutant.find)} times")
    path.write_text(text.replace(mutant.find, mutant.replace), encoding="utf-8")


def compile_one(source: Path, output: Path, kernels: Path) -> None:
    folders = [
        kernels,
        *(ROOT / f for f in ("plugins/include", "plugins/common", "tests/cuda", "tests/native")),
    ]
    includes = [f"-I{folder}" for folder in folders]
    subprocess.run(["g++", "-x", "c++", *FLAGS, *includes, "-c", source, "-o", output], check=True)


if __name__ == "__main__":
    sys.exit(main())

"""What nvcc makes of the CUDA kernels, judged by its disassembly: `make cuda-check`.

Every source is compiled for every architecture, warnings being errors, with the compiler of the
`cuda-checks` extra. What must hold of each kernel's instructions stands in `complaints`, how many
blocks share a multiprocessor in `BLOCKS`. No GPU takes part.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"
BUILD = ROOT / "build" / "machine_code"
TOOLS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
INSTALLED = all((TOOLS / tool).is_file() for tool in ("nvcc", "ptxas", "cuobjdump", "nvdisasm"))

# The slowest to compile come first.
SOURCES = (
    "srh_score", "attention_128", "attention_256", "attention_96", "attention_80", "attention_64",
    "select_tokens", "attention", "kv_append",
)  # fmt: skip
REGISTERS = 65536  # of a multiprocessor, in all three architectures


@dataclass(frozen=True)
class Architecture:
    """Shared memory in KiB, from the tables of the CUDA programming guide."""

    name: str
    shared_of_block: int
    shared_of_multiprocessor: int


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("80", 163, 164),
        Architecture("90a", 227, 228),
        Architecture("100", 227, 228),
    )
}

BLOCKS = {
    # Attention by the query rows of a block: blocks on sm_80, and on sm_90a and sm_100.
    ("attention", 64, 16): (2, 4),
    ("attention", 80, 16): (2, 3),
    ("attention", 96, 16): (1, 2),
    ("attention", 128, 16): (1, 2),
    ("attention", 256, 16): (1, 2),
    ("attention", 64, 64): (1, 1),
    ("attention", 80, 64): (1, 1),
    ("attention", 96, 64): (1, 1),
    ("attention", 128, 64): (1, 1),
    ("attention", 256, 64): (1, 1),
    ("attention", 64, 128): (1, 1),
    ("attention", 80, 128): (1, 1),
    ("attention", 96, 128): (1, 1),
    ("attention", 128, 128): (1, 1),
    ("attention", 256, 128): (1, 1),
    # The rest by their names, srh_logits by its head size too.
    ("srh_logits", 64): (2, 2),
    ("srh_logits", 80): (2, 2),
    ("srh_logits", 96): (2, 2),
    ("srh_logits", 128): (2, 2),
    ("srh_logits", 256): (1, 1),
    ("srh_add",): (4, 4),
    ("join_parts",): (5, 5),
    ("select_tokens",): (1, 1),
    ("kv_append",): (8, 8),
}
"""Blocks that a multiprocessor holds at once, at least: (sm_80, sm_90a and sm_100)."""

SCORED_ROWS = 80  # query rows of a KV head for which srh_score's occupancy is stated
SELECTED_FROM = 128 << 10  # scores a row for which select_tokens' is


@dataclass(frozen=True)
class Kernel:
    name: str  # mangled
    registers: int
    stack: int
    local: int
    threads: int
    code: tuple[str, ...]  # instructions as nvdisasm writes them, predicates included

    @property
    def family(self) -> str:
        return re.search(r"\d((?:[a-z]+_)+?)kernel", self.name)[1].rstrip("_")

    @property
    def dtype(self) -> str | None:
        """The type that the kernel was compiled for, where it is a template over it."""
        found = re.search(r"(?<=\d)B?Float16", self.name)
        return found and found[0]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The template's numbers: head size, and attention's shape."""
        return tuple(map(int, re.findall(r"Li(\d+)E", self.name)))

    @property
    def title(self) -> str:
        numbers = ",".join(map(str, self.numbers))
        arguments = ", ".join(filter(None, (self.dtype, numbers)))
        return f"{self.family}<{arguments}>" if arguments else self.family

    @property
    def key(self) -> tuple:
        if self.family == "attention":
            head_dim, tiles, row_warps, _, _ = self.numbers
            return self.family, head_dim, 16 * tiles * row_warps
        if self.family == "srh_logits":
            return self.family, self.numbers[0]
        return (self.family,)

    def operations(self) -> Counter[str]:
        """How often each operation occurs, with what follows its name behind a dot."""
        return Counter(re.sub(r"^@!?U?P\w+ +", "", line).split()[0] for line in self.code)

    def shared_bytes(self, arch: Architecture) -> int:
        """Of a block, by the formulas of plugins/cuda."""
        if self.family == "attention":
            head_dim, tiles, row_warps, key_warps, stages = self.numbers
            keys = 16 * key_warps
            stage = 2 * keys * (head_dim + 8) * 2
            join = key_warps // 2 * row_warps * 32 * tiles * (head_dim // 2 + 4) * 4
            offsets = 4 * keys * 8
            while stages > 2 and max(stages * stage, join) + offsets > arch.shared_of_block << 10:
                stages -= 1
            return max(stages * stage, join) + offsets
        if self.family == "srh_logits":
            pieces = (self.numbers[0] // 8 + 3) // 8 * 8 + 4
            return SCORED_ROWS * pieces * 16
        if self.family == "srh_add":
            return SCORED_ROWS * 8
        if self.family == "select_tokens":
            return (2048 + 32 + 4) * 4 + 2 * SELECTED_FROM // 8
        return 0

    def blocks(self, arch: Architecture) -> int:
        """Blocks that a multiprocessor has room for."""
        # Registers go to warps in pieces of 256; 1 KiB of shared memory a block is the system's.
        registers = (self.registers + 7) // 8 * 8 * self.threads
        shared = self.shared_bytes(arch) + 1024
        room = arch.shared_of_multiprocessor << 10
        return min(REGISTERS // registers, room // shared, 2048 // self.threads, 32)


def _matching(operations: Counter[str], pattern: str) -> Counter[str]:
    return Counter({op: n for op, n in operations.items() if re.match(pattern, op)})


def complaints(kernel: Kernel, arch: Architecture) -> list[str]:
    """What is wrong with a kernel; empty where nothing is."""
    operations = kernel.operations()
    wrong: list[str] = []

    def none(pattern: str, what: str) -> None:
        if found := _matching(operations, pattern):
            wrong.append(f"{what}: {', '.join(sorted(found))}")

    def some(pattern: str, what: str, least: int = 1) -> None:
        if (found := _matching(operations, pattern).total()) < least:
            wrong.append(f"{found} of at least {least} {what}")

    def only(pattern: str, among: str, what: str, least: int = 1) -> None:
        """Operations `among` which all must match `pattern`."""
        some(pattern, what, least)
        none(rf"(?!{pattern}){among}", f"not {what}")

    if kernel.stack or kernel.local:
        wrong.append(f"{kernel.stack} bytes of stack, {kernel.local} of local memory")
    none(r"(LDL|STL)\b", "local memory")
    # What is called lies at a label of the kernel, or is a function: a division, say.
    called = {line.split("`")[-1] for line in kernel.code if "CALL" in line}
    if functions := sorted(target for target in called if not target.startswith("(.L_x_")):
        wrong.append(f"calls of functions: {', '.join(functions)}")
    none(r"D(ADD|MUL|FMA|SETP|MNMX|MMA)\b|\w+(\.\w+)*\.F64|MUFU\.\w+64", "double precision")
    none(r"(ATOM|ATOMG|RED|REDG)\b", "atomics in global memory")

    head_dim = kernel.numbers[0] if kernel.numbers else 0
    product = r"HMMA\.16816\.F32" + (r"\.BF16$" if kernel.dtype == "BFloat16" else r"$")
    if kernel.family == "attention":
        steps, tiles = head_dim // 16, kernel.numbers[1]
        only(r"LDGSTS\.E\.BYPASS\.128\b", "LDGSTS", "asynchronous 128-bit copies past L1", 2)
        only(r"LDSM\.16\.(M88|MT88)\.4$", "LDSM", "matrix loads, four at once", 2 * steps)
        some(r"LDSM\.16\.M88\.4$", "matrix loads of keys", steps)
        some(r"LDSM\.16\.MT88\.4$", "transposed matrix loads of values", steps)
        only(product, ".?MMA", f"products of {kernel.dtype} summed in fp32", 4 * steps * tiles)
    elif kernel.family == "srh_logits":
        only(r"LDG\.E\.NA\.(128|64)\.CONSTANT$", r"LDG.*\.CONSTANT", "key loads past L1")
        some(r"LDG\.E\.NA\.128\.CONSTANT$", "128-bit key loads", 2 * 2 * (head_dim // 32))
        if head_dim % 32 == 0:
            none(r"LDG.*\.64\.CONSTANT", "key loads of 64 bits")
        only(product, ".?MMA", f"products of {kernel.dtype} summed in fp32", head_dim // 16)
        none("LDGSTS|LDSM", "copies or loads that are not meant")
    else:
        none(".?MMA|LDSM|LDGSTS", "tensor cores or copies that are not meant")
    if kernel.family in ("attention", "join_parts", "srh_logits", "srh_add"):
        some(r"MUFU\.EX2$", "exponentials in hardware")
    else:
        none(r"MUFU\.EX2", "exponentials")

    if (stated := BLOCKS.get(kernel.key)) is None:
        wrong.append(f"BLOCKS says nothing of {kernel.key}")
    elif (blocks := kernel.blocks(arch)) < (least := stated[arch.name != "80"]):
        wrong.append(
            f"{blocks} blocks a multiprocessor, stated {least}: {kernel.registers} registers, "
            f"{kernel.threads} threads, {kernel.shared_bytes(arch)} bytes of shared memory"
        )
    if kernel.shared_bytes(arch) > arch.shared_of_block << 10:
        wrong.append(f"{kernel.shared_bytes(arch)} bytes of shared memory a block")
    return wrong


class CompileError(Exception):
    pass


def _run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(done.stdout + done.stderr)
    return done.stdout


def compiled(source: str, arch: str, plugins: Path = PLUGINS, build: Path = BUILD) -> Path:
    """A source's machine code, anew only where a source or this file is younger."""
    cubin = build / f"{source}.sm_{arch}.cubin"
    files = [Path(__file__), TOOLS / "nvcc"]
    files += (f for f in plugins.rglob("*") if f.suffix in (".cu", ".cuh", ".h"))
    if cubin.is_file() and cubin.stat().st_mtime > max(f.stat().st_mtime for f in files):
        return cubin
    build.mkdir(parents=True, exist_ok=True)
    making = cubin.with_suffix(".new")
    _run(
        TOOLS / "nvcc", "-cubin", "-std=c++17", "-O3", f"-arch=sm_{arch}", "--Werror=all-warnings",
        "-Xptxas", "-warn-spills,-warn-lmem-usage",
        *(f"-I{plugins / folder}" for folder in ("include", "common", "cuda")),
        plugins / "cuda" / f"{source}.cu", "-o", making,
    )  # fmt: skip
    making.replace(cubin)
    return cubin


def parsed(assembly: str, resources: str, elf: str) -> list[Kernel]:
    """Kernels from what `nvdisasm -c`, `cuobjdump -res-usage` and `cuobjdump -elf` print."""
    code: dict[str, list[str]] = {}
    name = ""
    for line in assembly.splitlines():
        if section := re.match(r"\.text\.(\w+):", line):
            name = section[1]
            code[name] = []
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/ +(.*?) *;", line):
            code[name].append(instruction[1].lstrip("{ "))
    used = {
        function: dict(re.findall(r"(\w+):(\d+)", numbers))
        for function, numbers in re.findall(r"Function (\w+):\n(.*)", resources)
    }
    threads: dict[str, int] = {}
    for section in re.split(r"^\.nv\.info\.(?=_Z)", elf, flags=re.MULTILINE)[1:]:
        if bound := re.search(r"EIATTR_MAX_THREADS\s.*\n\s*Value:\s*0x([0-9a-f]+)", section):
            threads[section.split()[0]] = int(bound[1], 16)
    return [
        Kernel(
            name,
            int(used[name]["REG"]),
            int(used[name]["STACK"]),
            int(used[name]["LOCAL"]),
            threads[name],
            tuple(lines),
        )
        for name, lines in code.items()
    ]


def kernels_of(cubin: Path) -> list[Kernel]:
    return parsed(
        _run(TOOLS / "nvdisasm", "-c", cubin),
        _run(TOOLS / "cuobjdump", "-res-usage", cubin),
        _run(TOOLS / "cuobjdump", "-elf", cubin),
    )


def main() -> int:
    if not INSTALLED:
        print(f"error: no compiler in {TOOLS}; run make cuda-check", file=sys.stderr)
        return 2
    start, failed = time.monotonic(), False
    todo = [(source, arch) for source in SOURCES for arch in ARCHITECTURES]
    print(f"{'kernel':44}{'sm':>4}{'registers':>10}{'threads':>8}{'shared':>8}{'blocks':>7}")
    with ThreadPoolExecutor(2) as pool:
        for (source, arch), job in [(each, pool.submit(compiled, *each)) for each in todo]:
            try:
                kernels = kernels_of(job.result())
            except CompileError as error:
                print(f"{source} for sm_{arch}: {error}")
                failed = True
                continue
            for kernel in sorted(kernels, key=lambda k: k.title):
                a = ARCHITECTURES[arch]
                print(
                    f"{kernel.title:44}{arch:>4}{kernel.registers:10}{kernel.threads:8}"
                    f"{kernel.shared_bytes(a):8}{kernel.blocks(a):7}"
                )
                for complaint in complaints(kernel, a):
                    print(f"  WRONG: {complaint}")
                    failed = True
    print(f"{len(todo)} builds in {time.monotonic() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""The gates on the kernels' machine code: that they hold, and that they can fail."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace

import pytest

from tests.cuda import machine_code
from tests.cuda.machine_code import ARCHITECTURES, SOURCES, Kernel, complaints

needs_nvcc = pytest.mark.skipif(
    "DUSTIN_CUDA_CHECKS" not in os.environ, reason="minutes of compiling: make cuda-check does it"
)
SM_80, SM_90 = ARCHITECTURES["80"], ARCHITECTURES["90a"]
PREFIX = "_ZN6dustin4cuda"

ATTENTION = Kernel(
    f"{PREFIX}16attention_kernelINS0_8BFloat16ENS0_14AttentionShapeILi64ELi1ELi1ELi4ELi3EEEEE"
    "vNS0_15AttentionParamsE",
    registers=128, stack=0, local=0, threads=128,
    code=(
        *["LDGSTS.E.BYPASS.128.ZFILL [R9], [R2.64], P3"] * 4,
        *["LDSM.16.M88.4 R8, [R8]"] * 4,
        *["@P1 LDSM.16.MT88.4 R8, [R8+0x10]"] * 4,
        *["@!P2 HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 16,
        "MUFU.EX2 R3, R3",
        "@P0 CALL.REL.NOINC `(.L_x_4)",
    ),
)  # fmt: skip
LOGITS = Kernel(
    f"{PREFIX}17srh_logits_kernelINS0_7Float16ELi64EEEvNS0_14SrhScoreParamsE",
    registers=90, stack=0, local=0, threads=256,
    code=(
        *["@P0 LDG.E.NA.128.CONSTANT R4, [R2.64]"] * 8,
        *["HMMA.16816.F32 R4, R8, R12, R4"] * 4,
        "MUFU.EX2 R3, R3",
    ),
)  # fmt: skip
SELECT = Kernel(
    f"{PREFIX}20select_tokens_kernelE24DustinSelectTokensParams",
    registers=40, stack=0, local=0, threads=1024,
    code=("ATOMS.POPC.INC.32 RZ, [R4]", "LDS R3, [R5]", "@P0 EXIT"),
)  # fmt: skip


def test_names_say_what_a_kernel_is():
    assert ATTENTION.title == "attention<BFloat16, 64,1,1,4,3>"
    assert ATTENTION.key == ("attention", 64, 16)
    assert LOGITS.title == "srh_logits<Float16, 64>"
    assert SELECT.title == "select_tokens"


@pytest.mark.parametrize("kernel", [ATTENTION, LOGITS, SELECT], ids=lambda k: k.family)
def test_a_good_kernel_passes(kernel):
    assert complaints(kernel, SM_90) == []


def test_disassembly_is_read():
    name = SELECT.name
    assembly = f"""
\t.section\t.text.{name},"ax",@progbits
{name}:
.text.{name}:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_7) ;
.L_x_7:
        /*10020*/                  STL [R1], R4 (*"SpillRefill"*);
"""
    resources = f" Function {name}:\n  REG:26 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:696\n"
    elf = (
        f".nv.info.{name}\n\tAttribute:\tEIATTR_MAX_THREADS\n"
        "\tFormat:\tEIFMT_SVAL\n\tValue:\t0x400 0x1 0x1 \n"
    )
    (kernel,) = machine_code.parsed(assembly, resources, elf)
    assert kernel.code == (
        "LDC R1, c[0x0][0x28]", "@!P0 BRA `(.L_x_7)", 'STL [R1], R4 (*"SpillRefill"*)',
    )  # fmt: skip
    assert (kernel.registers, kernel.stack, kernel.threads) == (26, 8, 1024)
    assert complaints(kernel, SM_90) == [
        "8 bytes of stack, 0 of local memory", "local memory: STL",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "old", "new", "complaint"),
    [
        (ATTENTION, "BYPASS.128.ZFILL", "64", "not asynchronous 128-bit copies past L1: LDGSTS.E"),
        (ATTENTION, "LDGSTS.E.BYPASS.128.ZFILL", "LDG.E.128", "0 of at least 2 asynchronous"),
        (ATTENTION, "MT88", "M88", "0 of at least 4 transposed matrix loads of values"),
        (ATTENTION, "M88.4", "M88.2", "not matrix loads, four at once: LDSM.16.M88.2"),
        (ATTENTION, ".BF16", "", "not products of BFloat16 summed in fp32: HMMA.16816.F32"),
        (ATTENTION, "HMMA.16816.F32.BF16", "FFMA", "0 of at least 16 products"),
        (ATTENTION, "MUFU.EX2", "MUFU.LG2", "0 of at least 1 exponentials"),
        (ATTENTION, "(.L_x_4)", "($__internal_0_$__cuda_sm20_div_s64)", "calls of functions"),
        (LOGITS, ".NA.128", ".128", "not key loads past L1: LDG.E.128.CONSTANT"),
        (LOGITS, ".NA.128", ".NA.64", "key loads of 64 bits"),
        (LOGITS, "F32", "F16", "not products of Float16 summed in fp32: HMMA.16816.F16"),
        (LOGITS, "MUFU.EX2", "F2F.F64.F32", "double precision: F2F.F64.F32"),
        (SELECT, "LDS", "HMMA.16816.F32", "tensor cores or copies that are not meant"),
        (SELECT, "ATOMS", "RED", "atomics in global memory: RED.POPC.INC.32"),
        (SELECT, "LDS", "LDL", "local memory: LDL"),
    ],
)
def test_gates_can_fail(kernel, old, new, complaint):
    assert any(old in line for line in kernel.code)
    changed = replace(kernel, code=tuple(line.replace(old, new) for line in kernel.code))
    assert any(found.startswith(complaint) for found in complaints(changed, SM_90)), complaint


def test_occupancy_gate_can_fail():
    # 57344 bytes and 1 KiB, four times, are 228 KiB to the byte; on sm_80 two fit.
    assert ATTENTION.shared_bytes(SM_90) == 57344
    assert (ATTENTION.blocks(SM_90), ATTENTION.blocks(SM_80)) == (4, 2)
    (complaint,) = complaints(replace(ATTENTION, registers=129), SM_90)
    assert complaint.startswith("3 blocks a multiprocessor, stated 4: 129 registers, 128 threads")
    unknown = replace(ATTENTION, name=ATTENTION.name.replace("Li64E", "Li72E"))
    assert "BLOCKS says nothing of ('attention', 72, 16)" in complaints(unknown, SM_90)


def test_every_source_is_compiled():
    assert {f.stem for f in (machine_code.PLUGINS / "cuda").glob("*.cu")} == set(SOURCES)


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_pass(source, arch):
    kernels = machine_code.kernels_of(machine_code.compiled(source, arch))
    others = {"attention": 0, "srh_score": 11, "select_tokens": 1, "kv_append": 1}
    assert len(kernels) == others.get(source, 8)
    wrong = {k.title: complaints(k, ARCHITECTURES[arch]) for k in kernels}
    assert not any(wrong.values()), wrong


class TestBrokenSources:
    """What the real compiler makes of sources that break a gate."""

    @pytest.fixture
    def mutated(self, tmp_path):
        def build(source, arch, *mutations):
            plugins = tmp_path / "plugins"
            shutil.copytree(machine_code.PLUGINS, plugins)
            for file, old, new in mutations:
                path = plugins / "cuda" / file
                text = path.read_text()
                assert old in text, f"{file} has no {old!r}"
                path.write_text(text.replace(old, new))
            cubin = machine_code.compiled(source, arch, plugins, tmp_path)
            kernels = machine_code.kernels_of(cubin)
            return {k.title: " | ".join(complaints(k, ARCHITECTURES[arch])) for k in kernels}

        return build

    @needs_nvcc
    def test_attention(self, mutated):
        wrong = mutated(
            "attention_64",
            "90a",
            ("device.cuh", "cp.async.cg.", "cp.async.ca."),
            ("device.cuh", "[%1], 16, %2;", "[%1], 8;"),
            ("device.cuh", ".x4.trans.", ".x4."),
            ("device.cuh", "f32.bf16.bf16.f32", "f32.f16.f16.f32"),
        )
        for shape in ("64,1,1,4,3", "64,2,2,4,4", "64,2,4,2,4"):
            for dtype in ("BFloat16", "Float16"):
                complaint = wrong[f"attention<{dtype}, {shape}>"]
                assert "asynchronous 128-bit copies" in complaint
                assert "0 of at least 4 transposed matrix loads" in complaint
                assert ("products of BFloat16" in complaint) == (dtype == "BFloat16")

    @needs_nvcc
    def test_srh_score(self, mutated):
        wrong = mutated(
            "srh_score",
            "90a",
            ("device.cuh", "ld.global.nc.L1::no_allocate", "ld.global.nc"),
            ("srh_score.cuh", "reciprocal(sum)", "1.f / sum"),
        )
        assert "key loads past L1" in wrong["srh_logits<BFloat16, 128>"]
        assert "calls of functions" in wrong["srh_add"]

    @needs_nvcc
    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ("volatile float x[8]; x[p.rows % 8] = 1;", "Local memory used"),
            ("int unused;", "never referenced"),
        ],
    )
    def test_warnings_are_errors(self, mutated, more, message):
        line = "const int b = blockIdx.y;"
        with pytest.raises(machine_code.CompileError, match=re.escape(message)):
            mutated("kv_append", "90a", ("kv_append.cuh", line, f"{line} {more}"))

import importlib.util
import json
import types
from pathlib import Path

import pytest
import torch

from dustin_trt import ops
from dustin_trt.cli import doctor, main, selfcheck
from dustin_trt.engines import plugin_library as plugin_library_module
from dustin_trt.engines import tensorrt_runtime
from dustin_trt.engines.plugin_library import plugin_library
from dustin_trt.engines.tensorrt_device import TensorRTError
from dustin_trt.ops import cuda, native


@pytest.fixture(scope="module")
def report():
    """Every check, run once."""
    return {finding.name: finding for finding in doctor.examine()}


def test_every_backend_is_reported_with_what_to_do(report):
    assert list(report) == [
        "transformers", "torch on CPU", "torch on CUDA", "native CPU kernels", "CUDA kernels",
        "TensorRT plugins", "TensorRT", "TensorRT-RTX", "TensorRT-LLM", "Triton",
    ]  # fmt: skip
    for finding in report.values():
        assert finding.works or (finding.why_not and finding.to_do)
        assert not (finding.works and finding.why_not)


def test_the_cpu_really_runs(report):
    finding = report["torch on CPU"]
    assert finding.works and finding.generates
    assert "five ops" in finding.detail and torch.__version__ in finding.detail


def test_cuda_kernels_say_why_they_are_not_used(report):
    finding = report["CUDA kernels"]
    assert finding.works == (cuda.problem() is None and torch.cuda.is_available())
    if cuda.library_path() is None:
        assert "make cuda" in finding.why_not
        assert "nvcc" in finding.to_do


def test_cuda_is_what_torch_says(report):
    finding = report["torch on CUDA"]
    assert finding.works == finding.generates == torch.cuda.is_available()


def test_what_does_not_exist_yet_is_not_claimed(report):
    for name in ("TensorRT-LLM", "Triton"):
        assert not report[name].works and not report[name].generates
        assert "version" in report[name].why_not


def test_the_plugin_library_is_named(report):
    finding, path = report["TensorRT plugins"], plugin_library()
    assert finding.works == (path is not None)
    if path is None:
        assert "make plugins" in finding.to_do
    else:
        assert str(path) in finding.detail


@pytest.mark.parametrize("name", ["TensorRT", "TensorRT-RTX"])
def test_a_compiler_that_is_not_installed(report, name):
    if importlib.util.find_spec(name.lower().replace("-", "_")) is None:
        assert report[name].detail == "not installed"
        assert "dustin-trt[tensorrt-rtx]" in report[name].to_do or "10.14" in report[name].to_do


def compiler(monkeypatch, module, plugins, *, gpu):
    """What is found of a module that can be imported."""
    fake = types.SimpleNamespace(__version__="10.14.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(tensorrt_runtime, "import_tensorrt", lambda _: fake)
    monkeypatch.setattr(plugin_library_module, "plugin_library", lambda: plugins)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    return doctor._compiler("TensorRT", module, "install it")


def test_a_compiler_without_plugins(monkeypatch):
    finding = compiler(monkeypatch, "tensorrt", None, gpu=True)
    assert not finding.works
    assert "make plugins" in finding.why_not


def test_only_rtx_works_without_a_gpu(monkeypatch):
    finding = compiler(monkeypatch, "tensorrt", LIBRARY, gpu=False)
    assert not finding.works and "NVIDIA GPU only" in finding.why_not
    finding = compiler(monkeypatch, "tensorrt_rtx", LIBRARY, gpu=False)
    assert finding.works and not finding.generates and "runs none" in finding.detail


@pytest.mark.parametrize("problem", [None, TensorRTError("no driver"), ValueError("no plugin")])
def test_a_compiler_is_tried_on_a_gpu(monkeypatch, problem):
    def start(module, plugins):
        assert (module, plugins) == ("tensorrt", LIBRARY)
        if problem:
            raise problem

    monkeypatch.setattr(tensorrt_runtime, "runtime", start)
    finding = compiler(monkeypatch, "tensorrt", LIBRARY, gpu=True)
    assert finding.works == (problem is None)
    assert finding.why_not == (str(problem) if problem else "")


def test_the_native_kernels_are_what_the_package_says(report):
    finding = report["native CPU kernels"]
    assert finding.works == (native.problem() is None)
    assert not finding.generates
    assert (native.isa() in finding.detail) == finding.works


def fake_native(monkeypatch, **answers):
    for name, answer in answers.items():
        monkeypatch.setattr(native, name, lambda answer=answer: answer)
    return doctor._native_cpu("native CPU kernels")


LIBRARY = Path("lib/libdustin_cpu.so")
THREADS = "2 threads of torch's OpenMP pool"


def test_native_kernels_in_use(monkeypatch):
    finding = fake_native(
        monkeypatch, problem=None, isas=("avx512", "avx2", "portable"), isa="avx2", pool=THREADS,
        library_path=LIBRARY,
    )  # fmt: skip
    assert finding.works
    assert finding.detail == (
        f"avx2 in use; library {LIBRARY}; {THREADS}; "
        "DUSTIN_CPU_ISA can choose avx512, portable or reference"
    )


@pytest.mark.parametrize(
    ("path", "isas", "to_do"),
    [
        (None, (), "install a C++ compiler"),
        (LIBRARY, (), "install dustin-trt anew, so that"),
        (LIBRARY, ("avx2", "sse"), "unset DUSTIN_CPU_ISA, or set it to one of: avx2, sse"),
    ],
)
def test_why_the_reference_runs(monkeypatch, path, isas, to_do):
    finding = fake_native(
        monkeypatch, problem="a reason", isas=isas, isa="reference", pool="", library_path=path
    )
    assert not finding.works
    assert finding.why_not == "a reason" and finding.to_do.startswith(to_do)


def fake_checks(monkeypatch, *findings):
    checks = {finding.name: lambda _, finding=finding: finding for finding in findings}
    monkeypatch.setattr(doctor, "CHECKS", checks)


WORKING = doctor.Finding("torch on CPU", True, "torch", generates=True)
MISSING = doctor.Finding("Triton", False, "nothing", "no [server]", "install it")


def test_json(monkeypatch, capsys):
    fake_checks(monkeypatch, WORKING, MISSING)
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["can_generate"] is True
    assert [backend["works"] for backend in shown["backends"]] == [True, False]
    assert shown["backends"][1]["why_not"] == "no [server]"


def test_table(monkeypatch, capsys):
    fake_checks(monkeypatch, WORKING, MISSING)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "no [server]; install it" in shown
    assert "dustin-trt generate runs on: torch on CPU" in shown


def test_exit_1_when_nothing_generates(monkeypatch, capsys):
    fake_checks(monkeypatch, MISSING)
    assert main(["doctor"]) == 1
    assert "cannot run here" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding(monkeypatch, capsys):
    def missing(_):
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(doctor, "CHECKS", {"torch on CPU": missing})
    assert main(["doctor", "--json"]) == 1
    (backend,) = json.loads(capsys.readouterr().out)["backends"]
    assert backend["why_not"] == "ImportError: No module named 'torch'"
    assert backend["to_do"] == "install what is missing"


def test_a_variable_that_is_wrong_is_to_be_corrected():
    def mistaken(_):
        raise ValueError("instruction set 'mmx' (DUSTIN_CPU_ISA) is not available")

    finding = doctor._guarded("native CPU kernels", mistaken)
    assert "DUSTIN_CPU_ISA" in finding.why_not and finding.to_do.startswith("correct")


@pytest.mark.parametrize("name", ops.__all__)
def test_a_wrong_op_is_noticed(monkeypatch, name):
    right = getattr(ops, name)

    def wrong(*inputs):
        result = right(*inputs)
        changed = inputs[2] if name == "kv_append" else inputs[-1] if result is None else result[0]
        changed += 1
        return result

    assert selfcheck.wrong_ops("cpu") == []
    monkeypatch.setattr(selfcheck.ops, name, wrong)
    assert name in selfcheck.wrong_ops("cpu")


def test_a_wrong_op_makes_the_backend_not_work(monkeypatch):
    monkeypatch.setattr(selfcheck, "wrong_ops", lambda _: ["srh_score"])
    finding = doctor._torch_cpu("torch on CPU")
    assert not finding.works and not finding.generates
    assert finding.why_not == "differs from the reference: srh_score"


def test_the_random_state_is_left_alone():
    before = torch.random.get_rng_state()
    selfcheck.generate("cpu")
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("version", "works", "says"),
    [("4.56.2", False, "older than 4.57"), ("4.57.0", True, ""), ("99.0.0", True, "newer than")],
)
def test_transformers_versions(monkeypatch, version, works, says):
    monkeypatch.setattr(doctor, "_version", lambda _: version)
    finding = doctor._transformers("transformers")
    assert finding.works == works
    assert says in finding.detail + finding.why_not


def test_no_transformers(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert doctor._transformers("transformers").to_do == "pip install 'transformers>=4.57'"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["avx2", "amx_bf16"], "bfloat16 instructions (amx_bf16): try --dtype bfloat16"),
        (["avx2"], "no bfloat16 instructions"),
    ],
)
def test_the_bfloat16_hint(monkeypatch, flags, says):
    monkeypatch.setattr("dustin_trt.evaluation.machine.instruction_sets", lambda: flags)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    assert says in doctor._bfloat16_hint()


def test_an_installed_server_is_named(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/opt/bin/tritonserver")
    assert "/opt/bin/tritonserver" in doctor._triton("Triton").detail

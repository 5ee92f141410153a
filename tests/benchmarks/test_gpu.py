"""`make gpu` where there is no GPU: its rehearsal, its record, and what it says of failures."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from benchmarks import gpu, model
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import building, decode, engine, machine, measure, phases, record, rows
from benchmarks.gpu.floors import add_floors, ceilings
from benchmarks.gpu.plan import GPU, REHEARSAL
from benchmarks.gpu.table import print_table, print_targets
from benchmarks.gpu.targets import Target, targets
from dustin_trt.evaluation.bench.shapes import SHAPES


@pytest.fixture
def in_process(monkeypatch):
    """Sections in this process, which has imported torch already; tests/gpu is not run again."""
    monkeypatch.setattr(building, "EMULATED_LIBRARY", machine.ROOT / "nowhere")
    monkeypatch.delenv("DUSTIN_REHEARSAL", raising=False)
    ran = []

    def run(name, command, budget, **options):
        ran.append(name)
        problem = None
        if command[2] == "benchmarks.gpu.measure":
            monkeypatch.setattr(sys, "argv", ["measure", *command[3:]])
            problem = "it failed" if measure.main() else None
        return phases.Phase(name, 1.0, problem)

    monkeypatch.setattr(command, "run", run)
    return ran


def test_a_rehearsal_runs_everything_and_times_nothing(in_process, tmp_path, capsys):
    assert command.main(["--rehearse", "--results", str(tmp_path)]) == 0
    sections = ("ceilings", "layer", "prefill", "decode", "engine")
    assert in_process == ["tests/gpu", *(f"measure {section}" for section in sections)]
    printed = capsys.readouterr().out
    assert "REHEARSAL" in printed and not {"met", "missed"} & {*printed.split()}
    assert "rows are missing" not in printed
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("rehearsal-")
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["rehearsal"] and kept["complete"]
    assert all(phase["problem"] is None for phase in kept["phases"])
    names = {row["name"] for row in kept["rows"] if row.get("seconds")}
    assert {
        "copy", "product", "launch", "kv_append", "sparse_attention", "dense_attention, w=5",
        "dense_attention, w=1", "srh_score, history", "srh_score, lookahead", "select_tokens",
        "sparse_attention, pages of 16", "dense_attention, prefill", "decode, vanilla",
        "decode, Dustin", "torch dense, w=5: FlashAttention, folded, history only",
        "torch dense, w=1: FlashAttention, folded", "torch dense, w=5: FlashAttention, enable_gqa",
        "torch dense, w=5: FlashAttention, repeated",
        "torch dense, prefill: FlashAttention, enable_gqa", "engine, context pass",
        "engine, generation pass",
    } <= names  # fmt: skip
    assert all(target["measured"] is not None for target in kept["targets"])


def test_results_folder_of_a_rehearsal_is_not_that_of_the_benchmarks(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_phases", lambda *_: iter(()))
    monkeypatch.setattr(command.tempfile, "gettempdir", lambda: str(tmp_path))
    before = set(record.RESULTS.iterdir())
    command.main(["--rehearse"])
    assert set(record.RESULTS.iterdir()) == before
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".json"]


@pytest.mark.parametrize(
    ("installed", "plugins", "backend", "why"),
    [
        ((), None, None, "onnx is not installed"),
        (("onnx", "onnx_ir", "ml_dtypes"), None, None, "plugins were not built"),
        (("onnx", "onnx_ir", "ml_dtypes"), "x.so", None, "TensorRT is not installed"),
        (("onnx", "onnx_ir", "ml_dtypes", "tensorrt_rtx"), "x.so", "tensorrt-rtx", ""),
        (("onnx", "onnx_ir", "ml_dtypes", "tensorrt_rtx", "tensorrt"), "x.so", "tensorrt", ""),
    ],
)
def test_why_there_are_no_engines(monkeypatch, installed, plugins, backend, why):
    from dustin_trt.engines import plugin_library

    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: name in installed)
    monkeypatch.setattr(plugin_library, "plugin_library", lambda: plugins)
    chosen, said = engine.choose(rehearsal=False)
    assert chosen == backend and why in said and bool(said) == (backend is None)


def test_engines_that_cannot_be_built_are_no_failure(tmp_path, monkeypatch, in_process, capsys):
    monkeypatch.setattr(engine, "choose", lambda _: (None, "TensorRT is not installed"))
    command.main(["--rehearse", "--only", "measure", "--results", str(tmp_path)])
    assert "engine: skipped: TensorRT is not installed" in capsys.readouterr().out


def test_a_wrong_engine_is_not_timed(tmp_path, monkeypatch, in_process, capsys):
    passes = engine._passes
    calls = []

    def wrong(*arguments):
        logits = passes(*arguments)
        calls.append(logits)
        if len(calls) == 1:  # of the engine
            logits["verification"][-1, -1, 0] += 1.0
        return logits

    monkeypatch.setattr(engine, "_passes", wrong)
    assert command.main(["--rehearse", "--only", "measure", "--results", str(tmp_path)]) == 1
    assert "verification of the engine is off by" in capsys.readouterr().out


def test_a_wrong_op_is_not_timed_and_fails_its_section(in_process, tmp_path, monkeypatch, capsys):
    right = measure.SECTIONS

    def broken(setting):
        from benchmarks.gpu import layer

        sparse = layer.ops.sparse_attention

        def wrong(*arguments):
            out, lse = sparse(*arguments)
            out[-1, -1, -1] *= 1.5
            return out, lse

        with monkeypatch.context() as patch:
            patch.setattr(layer.ops, "sparse_attention", wrong)
            right["layer"](setting)

    monkeypatch.setattr(measure, "SECTIONS", {**right, "layer": broken})
    assert command.main(["--rehearse", "--only", "measure", "--results", str(tmp_path)]) == 1
    assert "measure decode" in in_process  # later phases run all the same
    printed = capsys.readouterr().out
    assert "FAILED layer, 96 tokens × 2, sparse_attention: WrongResultError" in printed
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert not any(
        row["name"] == "sparse_attention" and row.get("seconds") for row in kept["rows"]
    )  # fmt: skip


# ---- what is missing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"absent": ["torch", "numpy"], "gpu": None, "cuda": None}, "has no torch, numpy: pip"),
        ({"absent": [], "broken": "ImportError: no x", "gpu": None}, "transformers: ImportError"),
        ({"absent": [], "gpu": None, "cuda": None}, "built without CUDA"),
        ({"absent": [], "gpu": None, "cuda": "13.0"}, "torch finds no NVIDIA GPU"),
    ],
)
def test_what_is_missing_is_said_in_one_line(monkeypatch, capsys, seen, message):
    monkeypatch.setattr(machine, "probe", lambda: seen)
    assert command.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_a_missing_compiler_is_said(monkeypatch, capsys):
    monkeypatch.setattr(machine, "probe", lambda: {"absent": [], "gpu": "NVIDIA H200"})
    monkeypatch.setattr(machine, "environment", lambda: {"PATH": "/nowhere"})
    assert command.main([]) == 2
    assert "there is no nvcc" in capsys.readouterr().err


def test_the_machine_is_described_without_saying_where_it_is():
    described = machine.describe(True)
    assert described["torch"] == torch.__version__ and described["gpu"] is None
    assert os.uname().nodename not in json.dumps(described)
    assert machine.slug("NVIDIA H200") == "nvidia-h200"


def test_a_copied_tree_names_its_commit(monkeypatch):
    monkeypatch.setenv("DUSTIN_COMMIT", "abc1234")
    assert machine.commit() == "abc1234"


# ---- phases ------------------------------------------------------------------------------------


def python(code, budget=30.0):
    return phases.run("it", [sys.executable, "-c", code], budget, echo=False)


def test_a_phase_that_fails_says_its_last_words():
    phase = python("print('so far so good'); print('then not'); raise SystemExit(3)")
    assert not phase.ok and phase.problem == "then not (exit status 3)"
    assert python("print('fine')").ok


def test_a_phase_is_stopped_with_its_children():
    code = (
        "import subprocess, sys, time; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print('started', flush=True); time.sleep(60)"
    )
    phase = python(code, budget=1.0)
    assert phase.problem == "stopped after its 1 s" and phase.seconds < 20


def test_a_command_that_is_not_there():
    assert "cannot run /nowhere/x" in phases.run("it", ["/nowhere/x"], 1.0).problem


@pytest.mark.parametrize(("capability", "flag"), [("9.0", "90a-real"), ("8.6", "86-real")])
def test_the_build_is_for_the_machines_own_chip(monkeypatch, capability, flag):
    commands = []
    monkeypatch.setattr(
        building, "run", lambda name, c, b, **_: commands.append(c) or phases.Phase(name, 1.0, None)
    )
    monkeypatch.setattr(building, "CUDA_LIBRARY", machine.ROOT / "nowhere" / "lib.so")
    phase = building.build_cuda(capability, 100)
    assert f"-DDUSTIN_CUDA_ARCHITECTURES={flag}" in commands[0] and commands[1][1] == "--build"
    assert phase.problem == "the build left no nowhere/lib.so"


# ---- rows, floors, targets ---------------------------------------------------------------------


def test_rows_survive_a_crash(tmp_path):
    path = tmp_path / "rows.jsonl"
    writer = rows.Rows(path, "layer")
    writer.timed("op", [3.0, 1.0, 2.0], model.Work(8.0), context=4)
    with path.open("a") as file:
        file.write('{"section": "layer", "na')
    (row,) = record.read_rows(path)
    assert row["seconds"] == 2.0 and row["work"]["memory"] == 8.0 and row["context"] == 4


def test_the_record_is_partial_until_complete_and_overwrites_nothing(tmp_path):
    described = {"gpu": "NVIDIA H200"}
    first = record.Record(tmp_path, described, rehearsal=False)
    rest = {"limits": model.H200_COPY, "assumed": ["rate"], "targets": []}
    first.write([phases.Phase("build", 1.0, "no")], [{"a": 1}], complete=False, **rest)
    kept = json.loads(first.path.read_text(encoding="utf-8"))
    assert not kept["complete"] and kept["rows"] == [{"a": 1}]
    assert kept["phases"] == [{"name": "build", "seconds": 1.0, "problem": "no"}]
    assert kept["ceilings"]["assumed"] == ["rate"]
    second = record.Record(tmp_path, described, rehearsal=False)
    assert first.path.stem.startswith("nvidia-h200-") and second.path.stem.endswith("-2")


def test_ceilings_are_the_measured_ones():
    measured = [
        {"section": "ceilings", "name": "copy", "bytes_per_second": 4e12},
        {"section": "ceilings", "name": "product", "problem": "it failed"},
        {"section": "ceilings", "name": "launch", "seconds": 2e-6},
    ]
    limits, assumed = ceilings(measured)
    assert limits == model.Ceilings(4e12, model.H200_COPY.rate, 2e-6) and assumed == ["rate"]


def layer_row(name, micros, size, work=None, **fields):
    context, batch = size
    seconds = 1e-6 * micros
    return {
        "section": fields.pop("section", "layer"), "name": name, "context": context,
        "batch": batch, "seconds": seconds, "quartiles": [seconds, seconds],
        "work": work and vars(work), **fields,
    }  # fmt: skip


def planned_rows():
    """Invented times, for the arithmetic only."""
    large = GPU.layers[1]
    scored = model.HISTORY.work(GPU.target, large[1], large[0])
    step = {
        "section": "decode", "round": 0, "target": "qwen2.5-7b", "draft": "qwen2.5-0.5b",
        "gamma": 4, "budget": 512, "draft_window": 512,
    }  # fmt: skip
    place = (GPU.decode.context, GPU.decode.batch)
    return [
        layer_row("sparse_attention", 10, large),
        layer_row("select_tokens", 16, large),
        layer_row("srh_score, history", 150, large, scored),
        layer_row("srh_score, lookahead", 90, large),
        layer_row("srh_score, history on one KV head", 40, large),
        layer_row("srh_score, lookahead on one KV head", 56, large),
        layer_row("dense_attention, w=5", 900, large),
        layer_row("torch dense, w=5: cuDNN, folded", 700, large),
        layer_row("torch dense, w=5: FlashAttention, folded", 600, large),
        layer_row("torch dense, w=1: FlashAttention, folded", 100, large),
        layer_row("decode, vanilla", 12_000, place, tau=1.0, **step),
        layer_row("decode, Dustin", 6_000, place, tau=2.6, **step),
    ]


def by_name(lines):
    return {line.what: line for line in lines}


def test_targets_are_worked_out_from_the_rows():
    made = planned_rows()
    add_floors(made, model.H200_COPY, SHAPES)
    lines = by_name(targets(made, GPU, model.H200_COPY))
    at = "32768 tokens × 16"
    sparse = lines[f"sparse_attention, {at}, k=512"]
    assert (sparse.measured, sparse.verdict) == (pytest.approx(10), "met")
    assert sparse.floor == pytest.approx(7.8, abs=0.01)
    assert lines["sparse_attention, 16384 tokens × 8, k=512"].verdict == "not measured"
    # 539 MB in 150 µs over 4.3 TB/s
    share = lines[f"srh_score, {at}, of copy bandwidth"]
    assert share.measured == pytest.approx(83.6, abs=0.1) and share.verdict == "missed"
    assert lines[f"select_tokens, {at}"].verdict == "missed"
    # 600 / (10 + (150 + 90 + 16) / 80)
    speedup = lines[f"verification attention, {at}, over torch's fastest"]
    assert speedup.measured == pytest.approx(600 / 13.2) and speedup.verdict == "met"
    # 240 / (80 * 600)
    part = lines[f"estimation of full attention, all layers, {at}"]
    assert part.measured == pytest.approx(0.5) and part.verdict == "met"
    assert part.note.endswith("all on one of a layer: 0.20%")
    dense = lines[f"dense_attention, w=5, {at}, of torch's fastest"]
    assert dense.measured == pytest.approx(100 * 600 / 900) and dense.verdict == "missed"
    assert lines[f"dense_attention, w=1, {at}, of torch's fastest"].verdict == "not measured"
    # At τ = 2.5 whatever the coins gave: 2.5 * 12 / 6
    decoding = lines["decoding qwen2.5-7b + qwen2.5-0.5b, 32768 tokens × 16, τ=2.5, over vanilla"]
    assert decoding.measured == pytest.approx(5) and decoding.verdict == "met"
    assert "SIMULATED" in decoding.note


def test_without_a_row_everything_is_not_measured():
    lines = targets([], GPU, model.H200_COPY)
    assert len(lines) == 12 and {line.verdict for line in lines} == {"not measured"}


def test_the_table(capsys):
    made = [*planned_rows(), {"section": "ceilings", "name": "copy", "seconds": 1e-3}]
    made += [
        {"section": "layer", "name": "odd", "context": 1, "batch": 1, "problem": "it broke"},
        {"section": "layer", "name": "cuDNN", "context": 1, "batch": 1, "problem": "not taken",
         "expected": True},
    ]  # fmt: skip
    add_floors(made, model.H200_COPY, SHAPES)
    print_table(made, model.H200_COPY, ["rate"], rehearsal=False)
    print_targets(targets(made, GPU, model.H200_COPY), rehearsal=False)
    printed = capsys.readouterr().out
    assert "not measured but assumed: rate" in printed
    assert "FAILED layer, 1 tokens × 1, odd: it broke" in printed and "cuDNN: not taken" in printed
    (line,) = [x for x in printed.splitlines() if x.startswith("  srh_score, history  ")]
    assert line.split()[-3:] == ["125.3", "1.20", "bytes"]
    (line,) = [x for x in printed.splitlines() if "sparse_attention, 32768" in x and "≤" in x]
    assert line.split()[-5:] == ["10", "µs", "7.8", "1.28×", "met"]


def test_verdicts():
    assert Target("", 10, "µs", True, 10.0, None).verdict == "met"
    assert Target("", 10, "µs", True, 10.1, None).verdict == "missed"
    assert Target("", 10, "×", False, 9.9, None).verdict == "missed"


# ---- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 2.5, 4.9, 5.0])
def test_the_coins_rate_gives_tau(tau):
    rate = decode.rate_for(tau, 4)
    assert sum(rate**i for i in range(5)) == pytest.approx(tau, abs=1e-6)


def test_a_tau_that_no_coin_gives():
    with pytest.raises(ValueError, match="not in 1–5"):
        decode.rate_for(5.5, 4)


def test_plans_are_what_the_issue_asks_for():
    assert GPU.layers == ((16384, 8), (32768, 16)) and GPU.w == 5 and GPU.budget == 512
    assert (GPU.target.num_layers, GPU.target.num_heads, GPU.target.num_kv_heads) == (80, 64, 8)
    assert (GPU.decode.target.hidden_size, GPU.decode.target.vocab_size) == (3584, 152064)
    assert REHEARSAL.decode.target.num_layers < 5
    others = {"build", "engine"}  # engines take theirs only where TensorRT is
    assert sum(s for name, s in command.SECONDS.items() if name not in others) <= 480
    assert gpu.__doc__ and "make gpu" in gpu.__doc__

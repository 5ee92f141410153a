"""The command line of `dustin-trt bench`."""

from __future__ import annotations

import importlib.util
import json

import pytest

from dustin_trt.cli import bench_options, main, parser
from dustin_trt.evaluation import machine
from dustin_trt.evaluation.bench import shapes
from tests.evaluation.test_bench_layer import TINY

EXAMPLES = (
    bench_options._ATTENTION_EXAMPLES,
    bench_options._OVERHEAD_EXAMPLES,
    bench_options._DECODE_EXAMPLES,
)


def only_error(capsys):
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("dustin-trt: error: ")
    return err


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_examples_of_the_help_are_understood(text):
    commands = [
        line.split()
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip().startswith("dustin-trt bench")
    ]
    assert commands
    for command in commands:
        assert parser.build_parser().parse_args(command[1:]).command == "bench"


def test_help_teaches(capsys):
    assert main(["bench", "--help"]) == 0
    overview = capsys.readouterr().out
    for name in ("attention", "overhead", "decode"):
        assert f"  {name} " in overview
        assert main(["bench", name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"dustin-trt bench {name}" in text and "--json FILE" in text
    assert "SIMULATED" in text


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["attention", "--context", "0"], "--context"),
        (["attention", "--context", "4k"], "--context"),
        (["attention", "--shape", "gpt"], "--shape"),
        (["attention", "--dtype", "int8"], "--dtype"),
        (["attention", "--rounds", "2"], "--rounds"),
        (["attention", "--budget", "10"], "--budget 10"),
        (["attention", "--context", "256"], "--budget 512 reads all of --context 256"),
        (["attention", "--heads", "65"], "--heads 65"),
        (["overhead", "--draft-shape", "none"], "--draft-shape"),
        (["overhead", "--batch", "-1"], "--batch"),
        (["decode", "--acceptance", "1.5"], "--acceptance"),
        (["decode", "--acceptance", "0.5"], "--acceptance"),
        (["decode", "--new-tokens", "1"], "--new-tokens"),
        (["decode", "--model", "DIR"], "--draft"),
        (["decode", "--json", "nowhere/f.json"], "--json"),
        (["decode", "--plot", "nowhere/f.png"], "--plot"),
        (["decode", "--config", "nowhere.json"], "nowhere.json"),
        ([], "BENCHMARK"),
    ],
    ids=" ".join,
)
def test_a_wrong_flag_is_named_in_one_line(argv, named, capsys):
    assert main(["bench", *argv]) == 2
    assert named in only_error(capsys)


def test_a_missing_matplotlib_is_said_before_the_work(monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert main(["bench", "attention", "--plot", str(tmp_path)]) == 2
    assert "--plot needs matplotlib: pip install 'dustin-trt[demo]'" in only_error(capsys)


def test_it_runs_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(shapes.SHAPES, "smollm2-135m", TINY)
    monkeypatch.setattr(machine, "last_level_cache", lambda: 2**16)
    figures = ["--json", str(tmp_path / "f.json"), "--plot", str(tmp_path / "f.png")]
    small = ["--shape", "smollm2-135m", "--context", "96", "--batch", "1", "--rounds", "3"]
    assert main(["bench", "attention", *small, "--budget", "32", *figures]) == 0
    printed = capsys.readouterr().out
    assert "speedup" in printed and "Written:" in printed
    (row,) = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))["rows"]
    assert {"context", "batch", "speedup", "median_ms"} <= row.keys()
    assert (tmp_path / "f.png").is_file()

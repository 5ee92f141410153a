import json
import signal
import subprocess
import sys

import pytest
import torch

from dustin_trt import __version__
from dustin_trt.cli import main, parser
from dustin_trt.cli.progress import Progress, describe
from dustin_trt.config import DustinConfig
from dustin_trt.policies import POLICIES
from dustin_trt.runtime import batch
from dustin_trt.runtime.batch import BatchSummary
from dustin_trt.runtime.llm import LLM
from dustin_trt.runtime.sampling_params import SamplingParams
from dustin_trt.runtime.stats import RunStats
from tests import tokenizer as tiny_tokenizer

TEXT = "the thing and the other of an end"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_tokenizer.save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return tiny_tokenizer.save(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=2)


class Job:
    """A folder with an input file, and `dustin-trt generate` on it."""

    def __init__(self, folder, target):
        self.target = target
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.write({"id": "a", "prompt": TEXT}, {"id": "b", "prompt": "日本"})

    def write(self, *lines):
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("\n".join(text) + "\n", encoding="utf-8")

    def run(self, *flags, **options):
        given = {"target": self.target, "input": self.input, "output": self.output, **options}
        files = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
        return main(["generate", *files, *map(str, flags)])

    def lines(self):
        lines = self.output.read_text(encoding="utf-8").splitlines()
        return {line["id"]: line for line in map(json.loads, lines)}


@pytest.fixture
def job(tmp_path, target):
    return Job(tmp_path, target)


def only_error(capsys):
    """The one line a refused command prints."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dustin-trt: error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("dustin-trt: error: ").strip()


def test_generate_writes_what_the_library_returns(job, draft, capsys):
    assert job.run("--draft", draft, "--budget", 24, "--gamma", 3, "--max-new-tokens", 10) == 0
    llm = LLM(job.target, draft=draft, budget=24, gamma=3)
    outputs = llm.generate([TEXT, "日本"], SamplingParams(max_tokens=10))
    lines = job.lines()
    for id, output in zip("ab", outputs, strict=True):
        assert lines[id]["token_ids"] == output.token_ids
        assert lines[id]["text"] == output.text
    assert lines["a"]["stats"]["gamma"] == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    notes = captured.err.splitlines()
    assert len(notes) == 2  # and nothing of transformers
    assert "uncalibrated default heads" in notes[0] and "--heads all" in notes[0]
    assert notes[1].startswith("dustin-trt: 2 done, 20 tokens in")


FLAGS = [
    ("--draft", "none"),
    ("--draft", "lookup", "--policy", "dense"),
    ("--draft", "lookup:2", "--policy", "dustin", "--heads", "all"),
    ("--draft", "skip:1", "--signal", "lookahead", "--gamma", "1"),
    ("--draft", "skip:0", "--join", "sum"),
    ("--draft", "skip:0", "--policy", "streaming"),
    ("--draft", "skip:0", "--policy", "oracle"),
    ("--draft", "DRAFT", "--draft-window", "full"),
    ("--draft", "DRAFT", "--draft-window", "8", "--dtype", "bfloat16"),
    ("--draft", "DRAFT", "--budget", "21", "--guard", "0.9"),
    ("--draft", "none", "--device", "cpu", "--max-model-len", "64", "--batch-size", "1"),
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_every_way_to_decode_runs(job, draft, flags):
    flags = [str(draft) if flag == "DRAFT" else flag for flag in flags]
    assert job.run(*flags, "--max-new-tokens", 4, "--quiet") == 0
    assert all(len(line["token_ids"]) == 4 for line in job.lines().values())


def test_every_policy_has_a_run_above():
    words = {word for flags in FLAGS for word in flags}
    assert POLICIES.keys() <= words


def test_sampling_flags_reach_the_requests(job):
    sampling = ("--temperature", 0.9, "--top-p", 0.8, "--top-k", 40, "--seed", 3)
    assert job.run("--max-new-tokens", 12, "--quiet", *sampling) == 0
    first = job.lines()
    again = job.run(
        "--max-new-tokens", 12, "--quiet", *sampling, output=job.output.with_suffix(".2")
    )
    second = [json.loads(x) for x in job.output.with_suffix(".2").read_text().splitlines()]
    assert again == 0 and {x["id"]: x["token_ids"] for x in second} == {
        id: line["token_ids"] for id, line in first.items()
    }
    job.output.unlink()
    text = first["a"]["text"]
    stops = ("--stop", "never comes", "--stop", text[2:5])
    assert job.run("--max-new-tokens", 12, "--quiet", *sampling, *stops) == 0
    assert job.lines()["a"]["text"] == text[: text.index(text[2:5])]
    assert job.lines()["a"]["finish_reason"] == "stop"


def test_error_lines_exit_1_with_a_summary_also_when_resumed(job, capsys):
    job.write({"id": "a", "prompt": TEXT}, "malformed", {"id": "c", "prompt": ""})
    assert job.run("--max-new-tokens", 2, "--quiet") == 1
    assert "1 done, 2 became error lines" in capsys.readouterr().err
    assert job.run("--max-new-tokens", 2) == 1
    assert "3 were in" in (said := capsys.readouterr().err) and "2 as error lines" in said
    assert job.lines().keys() == {"a", "line 2", "c"}


def test_quiet_says_nothing(job, capsys):
    assert job.run("--draft", "skip:0", "--max-new-tokens", 2, "--quiet") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--draft", "skip:0", "--budget", "20"),
            "budget 20 leaves nothing to choose beside sink 4",
        ),
        (
            ("--draft", "skip:0", "--gamma", "0"),
            "gamma: Input should be greater than or equal to 1",
        ),
        (("--draft", "skip:0", "--gamma", "99"), "gamma 99 is more than 16: lower it"),
        (("--draft", "skip:a"), "write layer numbers with commas"),
        (("--draft", "skip:9"), "cannot skip layers [9]: the model has layers 0–2"),
        (("--draft", "nowhere"), "neither a folder nor one of skip:LAYERS, lookup, none"),
        (("--draft", "lookup:x"), "write lookup or lookup:N"),
        (("--draft-window", "some"), "'some' is neither a number nor 'full'"),
        (("--draft-window", "-1"), "draft_window: Input should be greater than or equal to 0"),
        (("--guard", "1.5"), "guard: Input should be less than or equal to 1"),
        (("--guard", "low"), "argument --guard: invalid float value: 'low'"),
        (("--policy", "best"), "unknown policy 'best'; there are dense, dustin, streaming, oracle"),
        (("--draft", "skip:0", "--signal", "x"), "unknown signal 'x'"),
        (("--draft", "lookup", "--signal", "hybrid"), "use signal 'history'"),
        (("--draft", "skip:0", "--join", "x"), "join: Input should be 'split' or 'sum'"),
        (("--dtype", "int8"), "unknown dtype 'int8'; there are auto, float32"),
        (("--device", "abacus"), "unknown device 'abacus'; there are cpu, cuda"),
        (("--device", "cuda:99"), "device 'cuda:99' is not there"),
        (("--max-model-len", "9999"), "max_model_len 9999 is not in 1–512"),
        (("--batch-size", "0"), "max_batch_size"),
        (("--batch-size", "99999999"), "this machine has no memory for a KV cache of"),
        (("--temperature", "-1"), "temperature: Input should be greater"),
        (("--top-p", "0"), "top_p: Input should be greater"),
        (("--max-new-tokens", "0"), "max_tokens: Input should be greater"),
        (("--stop", ""), "a stop string must not be empty"),
        (("--config", "nowhere.json"), "cannot read configuration nowhere.json: No such file"),
        (("--target", "nowhere"), "there is no model folder nowhere"),
        (("--input", "nowhere"), "there is no input file nowhere"),
        (("--output", "nowhere/out"), "for the output: create it"),
        (("--output", "/dev/full"), "not a regular file"),
        (("--budget", "many"), "argument --budget: invalid int value: 'many'"),
        (("--budgets", "1"), "unrecognized arguments: --budgets 1 (see dustin-trt --help)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_that_says_what_to_change(job, capsys, flags, says):
    assert job.run(*flags) == 2
    assert says in only_error(capsys)
    assert not job.output.exists()


def test_a_draft_with_another_tokenizer_is_refused(job, tmp_path, capsys):
    other = tiny_tokenizer.make(merges=("x a", "x b"))
    draft = tiny_tokenizer.save(tmp_path / "draft", tokenizer=other)
    assert job.run("--draft", draft) == 2
    assert "tokenizer differs from the target's" in only_error(capsys)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_heads": [(9, 0)]}, "target_heads: the model has no head (9, 0)"),
        ({"draft_heads": [(0, 6)]}, "draft_heads: the model has no head (0, 6)"),
        ({"target": {"num_layers": 30}}, "made for another target: architecture is"),
        ({"tokenizer": "0" * 64}, "made with another tokenizer"),
        ({"target_weights": {"norm": "0" * 12}}, "made for other target weights: all 6 parts"),
        ({"heads": 3}, "heads: Extra inputs are not permitted"),
        ({"budget": 10}, "budget 10 leaves nothing to choose"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_configuration_that_does_not_fit_is_refused(job, tmp_path, capsys, change, says):
    config = tmp_path / "dustin.json"
    config.write_text(json.dumps(DustinConfig(target_heads=((1, 0),)).model_dump() | change))
    assert job.run("--draft", "skip:0", "--config", config) == 2
    assert says in only_error(capsys)


def test_a_calibrated_configuration_is_used_and_not_remarked_on(job, tmp_path, capsys):
    config = tmp_path / "dustin.json"
    heads = {"target_heads": ((1, 0),), "draft_heads": ((2, 1),)}
    DustinConfig(budget=30, gamma=2, **heads).save(config)
    assert job.run("--draft", "skip:0", "--config", config, "--max-new-tokens", 4) == 0
    assert "uncalibrated" not in capsys.readouterr().err
    assert job.lines()["a"]["stats"]["budget"] == 30


def test_guard_and_draft_window_are_the_configurations_or_the_commands(job, draft, tmp_path):
    config = tmp_path / "dustin.json"
    heads = {"target_heads": ((1, 0),), "draft_heads": ((0, 1),)}
    # With one token to choose beside sink and window, which cover nearly nothing of this prompt.
    DustinConfig(budget=3, sink=1, window=1, guard=1.0, draft_window=4, **heads).save(config)
    flags = ("--draft", draft, "--config", config, "--max-new-tokens", 6, "--quiet")
    assert job.run(*flags) == 2  # a window of 4 is no more than the draft's sink
    assert job.run(*flags, "--draft-window", "full") == 0
    stats = job.lines()["a"]["stats"]
    assert stats["guarded_steps"] == stats["steps"] > 0
    job.output.unlink()
    assert job.run(*flags, "--draft-window", 8, "--guard", 0) == 0
    assert job.lines()["a"]["stats"]["guarded_steps"] == 0


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}']
)
def test_a_broken_or_unsupported_checkpoint_is_one_line(job, tmp_path, capsys, content):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(content)
    assert job.run(target=broken) == 2
    assert only_error(capsys)


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_damaged_weights_are_one_line(job, tmp_path, capsys, damage):
    folder = tiny_tokenizer.save(tmp_path / "model")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    if damage == "torn":
        weights.write_bytes(data[:1000])
    assert job.run(target=folder) == 2
    assert "not foreseen" not in only_error(capsys)


def test_files_are_checked_before_anything_is_loaded(job, monkeypatch, capsys):
    monkeypatch.setattr("dustin_trt.LLM", None, raising=False)
    assert job.run(output=job.input) == 2
    assert "the same file" in only_error(capsys)


def test_nan_logits_are_an_error_line_and_harm_nobody(job, tmp_path):
    model = tiny_tokenizer.model()
    with torch.no_grad():
        model.get_input_embeddings().weight[299] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    tiny_tokenizer.make().save_pretrained(tmp_path / "nan")
    job.write({"id": "a", "prompt": TEXT}, {"id": "nan", "prompt_token_ids": [5, 299]},
              {"id": "b", "prompt": TEXT})  # fmt: skip
    assert job.run("--max-new-tokens", 6, "--quiet", target=tmp_path / "nan") == 1
    lines = job.lines()
    assert "non-finite logits, first in embedding" in lines["nan"]["error"]
    assert lines["a"]["token_ids"] == lines["b"]["token_ids"] and len(lines["a"]["token_ids"]) == 6


def test_debug_shows_where(job):
    with pytest.raises(ValueError, match="unknown policy"):
        job.run("--policy", "best", "--debug")


def test_a_bug_is_called_one(job, monkeypatch, capsys):
    def broken(*_, **__):
        raise KeyError("lost")

    monkeypatch.setattr(batch, "run_batch", broken)
    assert job.run("--quiet") == 2
    assert only_error(capsys) == "KeyError('lost') was not foreseen: --debug shows where"


def test_ctrl_c_says_how_to_go_on(job, monkeypatch, capsys):
    job.write(*({"id": i, "prompt": TEXT} for i in range(6)))

    def press(_, summary):
        if summary.done == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "update", press)
    assert job.run("--max-new-tokens", 3, "--batch-size", 1) == 130
    said = capsys.readouterr().err
    assert f"stopped: 2 of 6 lines are saved in {job.output}; run the same command again" in said
    monkeypatch.undo()
    assert job.run("--max-new-tokens", 3, "--batch-size", 1) == 0
    assert job.lines().keys() == set(range(6))


def test_ctrl_c_while_loading_is_one_line(job, monkeypatch, capsys):
    def slow(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("dustin_trt.runtime.llm.LLM.__init__", slow)
    assert job.run() == 130
    assert only_error(capsys) == "stopped"


def test_plain_progress_is_a_line_now_and_then(monkeypatch, capsys):
    clock = iter([0.0, 10.0, 31.0, 31.0, 40.0])
    monkeypatch.setattr("dustin_trt.cli.progress.time.monotonic", lambda: next(clock))
    run = RunStats()
    run.add_step(3, 50, {"verify": 2.0})
    summary = BatchSummary(
        total=8,
        done=2,
        skipped=2,
        steps=10,
        step_tokens=25,
        seconds=90,
        prefill=(512, 4000),
        run=run,
    )
    with Progress() as progress:
        for _ in range(3):
            progress.update(summary)
    assert capsys.readouterr().err == (
        "dustin-trt: 4 of 8 finished, reading a prompt, 512 of 4000 tokens, "
        "25.0 tokens/s in decoding, τ 2.50, 3 min 00 s left\n"
    )


def test_a_terminal_gets_a_bar():
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(console=console) as progress:
        progress.update(BatchSummary(total=5, done=3, steps=2, step_tokens=5))
    shown = console.file.getvalue()
    assert "3/5" in shown and "τ 2.50" in shown


def test_an_unknown_total_is_left_out():
    assert describe(BatchSummary(done=1, tokens=9, seconds=2), "out") == "1 done, 9 tokens in 2.0 s"


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_help_imports_nothing_slow():
    heavy = python(
        "import sys, dustin_trt.cli as c\n"
        "for argv in ('--help', 'generate --help', '--version'): assert c.main(argv.split()) == 0\n"
        "slow = {'torch', 'transformers', 'rich', 'pydantic'}\n"
        "print('HEAVY', sorted(slow & sys.modules.keys()))"
    )
    assert heavy.splitlines()[-1] == "HEAVY []"


def test_help_teaches(capsys):
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {word} " in text for word in ("draft", "policy", "budget"))
    assert text.count("dustin-trt generate --target") >= 3
    for name in (*POLICIES, *SamplingParams.model_fields, "lookup", "skip:", "finish_reason"):
        assert name in text
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"dustin-trt {name}" in overview for name in ("generate", "doctor", "demo"))


def test_the_examples_of_the_help_are_understood():
    joined = parser._EXAMPLES.replace("\\\n", " ")
    commands = [line.split() for line in joined.splitlines() if "dustin-trt generate" in line]
    assert len(commands) == 5
    for command in commands:
        assert parser.build_parser().parse_args(command[1:]).command == "generate"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"dustin-trt {__version__}"


@pytest.mark.parametrize("argv", [[], ["deploy"], ["generate"], ["doctor", "--yaml"]])
def test_a_wrong_command_is_one_line(argv, capsys):
    assert main(argv) == 2
    assert "--help)" in only_error(capsys)


def test_demo_gets_the_options_that_were_given(monkeypatch, tmp_path):
    import types

    calls = []
    module = types.ModuleType("dustin_trt.evaluation.demo")
    module.run_demo = lambda output, **options: calls.append((output, options))
    monkeypatch.setitem(sys.modules, "dustin_trt.evaluation.demo", module)
    assert main(["demo", "--output", str(tmp_path)]) == 0
    assert main(["demo", "--output", str(tmp_path), "--budget", "256", "--dtype", "float32"]) == 0
    assert calls == [(tmp_path, {}), (tmp_path, {"budget": 256, "dtype": "float32"})]

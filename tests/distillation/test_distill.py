"""`dustin-trt distill` on a tiny target: whole, stopped, and with bad input."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file

from dustin_trt import LLM, SamplingParams
from dustin_trt.cli import distill as command
from dustin_trt.cli import main
from dustin_trt.distillation import run
from dustin_trt.distillation.output import licence_of
from dustin_trt.distillation.train import Training
from dustin_trt.models import shared_draft
from tests import tokenizer
from tests.distillation.test_training import TEMPLATE


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    speaks = tokenizer.make()
    speaks.chat_template = TEMPLATE
    tokenizer.save(folder / "target", tokenizer=speaks, num_hidden_layers=4)
    (folder / "texts").mkdir()
    for number in range(3):
        chance = random.Random(number)
        words = " ".join(chance.choice(["the", "of", "and", "to", "in"]) for _ in range(1500))
        (folder / "texts" / f"{number}.txt").write_text(words, encoding="utf-8")
    (folder / "copy.txt").write_text(words[:4000], encoding="utf-8")
    (folder / "short.txt").write_text("of the", encoding="utf-8")
    return folder


def _arguments(place: Path, output: Path, *more: str) -> list[str]:
    return [
        "distill", "--target", str(place / "target"), "--output", str(output),
        "--text", str(place / "texts"), "--held-out", str(place / "texts" / "2.txt"),
        "--num-layers", "2", "--vocabulary", "200", "--context", "128", "--batch", "2",
        "--steps", "4", "--warmup", "1", "--evaluate-every", "2", "--checkpoint-every", "2",
        "--held-out-sequences", "2", "--retrieval-share", "0", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def draft(place, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("output") / "draft"
    assert main(_arguments(place, output, "--licence", "CC0")) == 0
    return output


def test_the_draft_drafts(place, draft):
    llm = LLM(place / "target", draft, policy="dense", gamma=2, dtype="float32")
    (output,) = llm.generate("the of and " * 20, SamplingParams(max_tokens=12, ignore_eos=True))
    plain = llm.variant(draft="none").generate(
        "the of and " * 20, SamplingParams(max_tokens=12, ignore_eos=True)
    )
    assert output.token_ids == plain[0].token_ids
    assert output.stats.drafted > 0


def test_what_is_written_says_how_it_was_made(draft):
    record = json.loads((draft / "distill.json").read_text(encoding="utf-8"))
    assert record["settings"]["layers"] == [0, 3]
    assert record["licence"] == "CC0"
    assert record["steps"] == 4
    assert record["output_tokens"] == 200
    assert [point["step"] for point in record["curve"]] == [0, 2, 4]
    # What is held out was not trained on, though the folder holds it.
    assert [Path(name).name for name in record["texts"]["train"]] == ["0.txt", "1.txt"]
    assert (draft / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    assert not list(draft.glob("*.partial"))


def test_nothing_that_is_there_is_overwritten(place, draft, tmp_path, capsys):
    assert main(_arguments(place, draft)) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(_arguments(place, draft, "--resume")) == 0  # nothing left to do
    finished = shutil.copytree(draft, tmp_path / "finished", ignore=lambda *_: ["work"])
    for more in ((), ("--resume",)):
        assert main(_arguments(place, finished, *more)) == 2
        assert "holds a finished draft" in capsys.readouterr().err
    (tmp_path / "foreign" / "work").mkdir(parents=True)
    (tmp_path / "foreign" / "work" / "precious").write_text("mine")
    for folder, message in ((tmp_path, "no draft of ours"), (tmp_path / "foreign", "none of ours")):
        assert main(_arguments(place, folder)) == 2
        assert message in capsys.readouterr().err
    with FileLock(draft / "work" / "lock"):
        assert main(_arguments(place, draft, "--resume")) == 2
    assert "another run is writing" in capsys.readouterr().err


def test_a_draft_is_no_target(place, draft, tmp_path, capsys):
    alone = shutil.copytree(draft, tmp_path / "alone")
    tokenizer.make().save_pretrained(alone)
    assert main(_arguments(place, tmp_path / "out", "--target", str(alone))) == 2
    assert "cannot run alone: give it as draft" in capsys.readouterr().err


def test_what_is_stored_is_what_was_trained_rounded(place, tmp_path):
    texts = run.Texts((str(place / "texts" / "0.txt"),), (str(place / "texts" / "2.txt"),),
                      context=128, held_out_sequences=1, retrieval_share=0)  # fmt: skip
    settings = run.Settings(layers=(0, 3), vocabulary=200, steps=2, batch=1, warmup=1)
    for save_dtype in ("bfloat16", "float32"):
        output = tmp_path / save_dtype
        student = run.distill(
            place / "target", output, texts, settings, save_dtype=save_dtype
        ).student
        with torch.no_grad():
            for name, tensor in student.inner.named_parameters():
                if not name.startswith("embed_tokens"):
                    tensor.copy_(tensor.to(getattr(torch, save_dtype)))
            tokens = torch.randint(1, tokenizer.VOCAB, (1, 20))
            expected = student(tokens)[0] @ student.head.T
        llm = LLM(place / "target", output, policy="dense", dtype="float32", max_batch_size=1)
        engine = llm.decoder.drafter.engine
        engine.cache.reserve(0, 40)
        logits = engine.prefill(0, tokens[0].tolist(), chunk=64).logits
        torch.testing.assert_close(
            logits[student.output_tokens], expected[-1], rtol=1e-4, atol=1e-4
        )


def _same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_ctrl_c_ends_after_the_step_and_resume_goes_on(place, draft, tmp_path, capsys, monkeypatch):
    step = Training._train

    def interrupted(training, numbers):
        if training.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(training, numbers)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Training, "_train", interrupted)
    assert main(_arguments(place, tmp_path / "out")) == 130
    said = capsys.readouterr().err
    assert "stopping after this step" in said and "stopped after step 3 of 4" in said
    assert "--resume" in said and signal.getsignal(signal.SIGINT) is before
    record = json.loads((tmp_path / "out" / "distill.json").read_text(encoding="utf-8"))
    assert record["steps"] == 3
    assert (tmp_path / "out" / "acceptance.png").exists()
    monkeypatch.setattr(Training, "_train", step)
    assert main(_arguments(place, tmp_path / "out", "--resume")) == 0
    _same_weights(draft, tmp_path / "out")


def test_the_second_ctrl_c_stops_at_once():
    watch = command.Watch(Console(file=io.StringIO()))
    watch._interrupt(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        watch._interrupt(signal.SIGINT, None)


@pytest.mark.parametrize("at", [2, 4])
def test_killed_between_checkpoint_and_draft(place, draft, tmp_path, monkeypatch, at):
    write = run.write_draft

    class Killed(BaseException):
        pass

    def killed(training, *rest):
        if training.step == at:
            raise Killed
        write(training, *rest)

    monkeypatch.setattr(run, "write_draft", killed)
    with pytest.raises(Killed):
        main(_arguments(place, tmp_path / "out"))
    monkeypatch.setattr(run, "write_draft", write)
    assert main(_arguments(place, tmp_path / "out", "--resume")) == 0
    _same_weights(draft, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "distill.json").read_text(encoding="utf-8"))
    assert record["steps"] == 4 and [point["step"] for point in record["curve"]] == [0, 2, 4]


def test_a_full_disk_leaves_the_last_draft(place, draft, tmp_path, capsys, monkeypatch):
    out, save = tmp_path / "out", shared_draft.save_file

    def full(tensors, file, metadata):
        if (out / "model.safetensors").exists():
            file.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, file, metadata)

    monkeypatch.setattr(shared_draft, "save_file", full)
    assert main(_arguments(place, out)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the draft of step 4 is not written" in error and "No space left" in error
    assert "make room" in error and "--resume" in error
    assert json.loads((out / "distill.json").read_text(encoding="utf-8"))["steps"] == 2
    assert not list(out.glob("*.partial"))
    monkeypatch.setattr(shared_draft, "save_file", save)
    assert main(_arguments(place, out, "--resume")) == 0
    _same_weights(draft, out)


def test_a_curve_that_cannot_be_drawn_is_no_failure(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(_arguments(place, tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert "distill.json has the curve" in said and "pip install 'dustin-trt[calibration]'" in said


def test_progress_on_a_terminal_and_elsewhere(monkeypatch):
    training = SimpleNamespace(
        step=0, stopping=False, settings=SimpleNamespace(steps=9, batch=2),
        corpus=SimpleNamespace(sequences=torch.zeros(3, 100)),
        curve=[SimpleNamespace(agreement=0.25, overlap=0.5)],
    )  # fmt: skip
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(command.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(command, "PLAIN_EVERY", 0)
    plain = io.StringIO()
    with command.Watch(Console(file=plain)) as watch:
        for training.step in (1, 2, 3):
            watch.step(training, 1.5)
    assert plain.getvalue().splitlines() == [
        "dustin-trt: step 1 of 9, loss 1.500, held out: greedy 25.0%, sampling 50.0%",
        *(f"dustin-trt: step {step} of 9, loss 1.500, held out: greedy 25.0%, sampling 50.0%, "
          f"100 tokens/s, {2 * (9 - step)} s left" for step in (2, 3)),
    ]  # fmt: skip
    monkeypatch.undo()
    bar = io.StringIO()
    with command.Watch(Console(file=bar, force_terminal=True, width=120)) as watch:
        for training.step in (1, 2):
            watch.step(training, 1.5)
    assert "2/9" in bar.getvalue() and "tokens/s" in bar.getvalue()
    quiet = io.StringIO()
    with command.Watch(Console(file=quiet, quiet=True), quiet=True) as watch:
        watch.step(training, 1.5)
    assert quiet.getvalue() == ""


def test_the_licence_is_that_of_the_target(tmp_path):
    assert licence_of(tmp_path) == "that of the target, whose layers it was made from"
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\ntags: x\n---\nlicense: no\n")
    assert licence_of(tmp_path).endswith("(its model card: apache-2.0)")
    (tmp_path / "LICENSE.txt").write_text("\n  Llama 3.2 Community License\nmore")
    assert licence_of(tmp_path).endswith("(LICENSE.txt: Llama 3.2 Community License)")


def test_a_text_is_the_same_however_it_is_spelled(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    texts = run.Texts(("texts",), (str(place / "texts" / "2.txt"),))
    train, held_out = texts.read()
    assert [Path(name).name for name in train] == ["0.txt", "1.txt"]
    assert [Path(name).name for name in held_out] == ["2.txt"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers", "0,9"], "no layers [9]"),
        (["--layers", "first"], "write layers like 0,15,29"),
        (["--num-layers", "5"], "5 layers: the target has 4"),
        (["--context", "513"], "more than the target's 512 positions"),
        (["--context", "1"], "--context 1 is less than 2"),
        (["--text", "{texts}/../short.txt"], "do not fill one sequence"),
        (["--held-out", "{texts}/../short.txt"], "--held-out: the texts do not fill one sequence"),
        (["--text", "{texts}/../copy.txt"], "share most of their text"),
        (["--text", "{texts}/../texts/2.txt"], "given to train on and held out"),
        (["--retrieval-share", "1"], "--retrieval-share 1.0 is not in 0–1"),
        (["--retrieval-share", "0.5"], "does not fit into 128 tokens"),
        (["--held-out-sequences", "0"], "--held-out-sequences 0 is less than 1"),
        (["--steps", "0"], "--steps 0 is less than 1"),
        (["--save-dtype", "auto"], "--save-dtype auto"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--dtype", "float16"], "too narrow to train in"),
        (["--exclude", "{texts}"], "no text is left"),
        (["--held-out", "{texts}/0.txt", "--text", "{texts}/0.txt"], "given to train on and held"),
        (["--text", "{texts}/none.txt"], "cannot read text"),
        (["--text", "books:the_tempest_2"], "there is no text"),
        (["--dtype", "float8"], "unknown dtype"),
        (["--target", "{texts}"], "no model folder"),
    ],
)
def test_bad_input_is_one_line(place, tmp_path, capsys, monkeypatch, more, message):
    from dustin_trt.evaluation import assets

    monkeypatch.setattr(assets, "books", lambda: {"hamlet": Path("hamlet.txt")})
    more = [part.replace("{texts}", str(place / "texts")) for part in more]
    assert main(_arguments(place, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_a_target_without_a_tokenizer_is_refused(place, tmp_path, capsys):
    mute = shutil.copytree(
        place / "target", tmp_path / "mute", ignore=shutil.ignore_patterns("*token*", "chat*")
    )
    assert main(_arguments(place, tmp_path / "out", "--target", str(mute))) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_rate_that_is_too_high_is_told(place, tmp_path, capsys):
    assert main(_arguments(place, tmp_path / "out", "--learning-rate", "1e30")) == 2
    assert "start again with a lower --learning-rate" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert main(_arguments(place, tmp_path / "out")) == 0  # there is nothing to go on with

"""`dustin-trt distill` on a tiny target: whole, stopped, and with bad input."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dustin_trt import LLM, SamplingParams
from dustin_trt.cli import main
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
    (tmp_path / "precious").write_text("mine")
    assert main(_arguments(place, tmp_path)) == 2
    assert "no draft of ours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers", "0,9"], "no layers [9]"),
        (["--layers", "first"], "write layers like 0,15,29"),
        (["--num-layers", "5"], "5 layers: the target has 4"),
        (["--context", "90000"], "do not fill one sequence"),
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
    assert not (tmp_path / "out" / "model.safetensors").exists()

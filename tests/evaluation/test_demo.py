import json

import pytest
import torch
from rich.console import Console

from dustin_trt.config import default_config
from dustin_trt.evaluation import assets, demo
from dustin_trt.models.causal_lm import CausalLM
from tests import tokenizer as tiny_tokenizer
from tests.evaluation.test_passkey import TEMPLATE, TEXT


def use_tiny_pair(folder, monkeypatch):
    """A self-draft and a configuration for it in the place of those that are shipped."""
    pair = ("skip:1", folder / "dustin.json")
    default_config(CausalLM(tiny_tokenizer.model(num_hidden_layers=4)).spec, None).replace(
        draft_heads=((0, 0), (2, 1)), gamma=2
    ).save(pair[1])
    monkeypatch.setattr(assets, "smollm2_pair", lambda: pair)
    monkeypatch.setattr(demo, "WINDOW", 64)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The demo on a tiny random model; what it printed, and its folder."""
    tokenizer = tiny_tokenizer.make()
    tokenizer.chat_template = TEMPLATE
    model = tiny_tokenizer.save(tmp_path / "model", tokenizer=tokenizer, num_hidden_layers=4)
    book = tmp_path / "book.txt"
    book.write_text(TEXT * 3, encoding="utf-8")
    monkeypatch.setattr(assets, "smollm2", lambda: model)
    monkeypatch.setattr(assets, "books", lambda: {"play": book})
    monkeypatch.setattr(demo, "TALES", (("play", 120), ("play", 200)))
    monkeypatch.setattr(demo, "PASS_KEYS", (("play", 420),))
    use_tiny_pair(tmp_path, monkeypatch)
    with (tmp_path / "printed.txt").open("w", encoding="utf-8") as printed:
        demo.run_demo(
            tmp_path / "out",
            dtype="float32",
            budget=64,
            max_new_tokens=12,
            rounds=2,
            console=Console(file=printed, width=100),
        )
    return (tmp_path / "printed.txt").read_text(encoding="utf-8"), tmp_path / "out"


def test_the_table_holds_what_was_measured(run):
    printed, folder = run
    record = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    plain, classic, magicdec, dustin = record["methods"]
    assert record["machine"]["torch"] == torch.__version__
    assert record["dtype"] == "torch.float32"
    # In fp32 full verification changes nothing; three prompts, none differs.
    for lossless in (plain, classic, magicdec):
        assert lossless["first_difference"] == [None] * 3
        assert (lossless["kv_read_share"], lossless["scoring_share"]) == (1, 0)
    assert (plain["tau"], plain["acceptance_rate"], plain["kv_read_share"]) == (1, None, 1)
    assert plain["speedup_over_plain"] == 1
    assert 1 <= classic["tau"] <= 3
    assert dustin["kv_read_share"] < 0.4
    assert dustin["scoring_share"] > 0
    assert 0 < dustin["coverage"] < 1
    assert len(dustin["tokens_per_second_by_round"]) == 2
    table = (folder / "demo.txt").read_text(encoding="utf-8")
    assert f"{dustin['kv_read_share']:.1%}" in table and f"{dustin['kv_read_share']:.1%}" in printed


def test_it_shows_progress_text_and_where_the_files_are(run):
    printed, folder = run
    assert "740/740 tokens" in printed
    for method in ("plain", "classic", "MagicDec 64", "Dustin 64"):
        assert method in printed
    assert str(folder / "tokens_read.png") in printed.replace("\n", "")
    assert (folder / "tokens_read.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("bad", ({"budget": 16}, {"max_new_tokens": 1}), ids=str)
def test_what_cannot_run_is_refused_before_the_work(tmp_path, monkeypatch, bad):
    model = tiny_tokenizer.save(tmp_path / "model", num_hidden_layers=4)
    monkeypatch.setattr(assets, "smollm2", lambda: model)
    monkeypatch.setattr(assets, "books", dict)  # no book: any work would fail otherwise
    use_tiny_pair(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=next(iter(bad))):
        demo.run_demo(tmp_path / "out", **bad)

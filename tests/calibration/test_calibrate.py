"""`dustin-trt calibrate` on a tiny pair: whole, interrupted, repeated, and with bad input."""

from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file

from dustin_trt import LLM
from dustin_trt.calibration.recipe import Recipe
from dustin_trt.calibration.run import calibrate
from dustin_trt.calibration.work import CalibrationError, Quiet
from dustin_trt.cli import main
from dustin_trt.config import ConfigError, DustinConfig
from dustin_trt.drafting.tokenizers import TokenizerMismatchError
from tests import tokenizer

_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
_WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "it",
    "he",
    "that",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
]


def _text(seed: int, words: int = 1200) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(_WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a pair, texts and a recipe."""
    folder = tmp_path_factory.mktemp("pair")
    speaks = tokenizer.make()
    speaks.chat_template = _TEMPLATE
    for name, layers, seed in (("target", 3, 0), ("draft", 2, 1)):
        tokenizer.save(
            folder / name, seed=seed, tokenizer=speaks, num_hidden_layers=layers,
            max_position_embeddings=1024,
        )  # fmt: skip
    other = tokenizer.make(merges=("h e", "Ġ t"))
    tokenizer.save(folder / "stranger", tokenizer=other, num_hidden_layers=2)
    for number, name in enumerate(("searched", "asked", "judged", "hidden")):
        (folder / f"{name}.txt").write_text(_text(number), encoding="utf-8")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(_recipe()), encoding="utf-8")
    return folder


def _recipe(**changes: object) -> dict:
    recipe = {
        "name": "tiny",
        "target": "target",
        "draft": "draft",
        "budget": 48,
        "draft_window": 0,
        "head_scores": {"texts": ["asked.txt"], "length": 256, "count": 2},
        "texts": {"texts": ["searched.txt"], "context": [200], "windows": 2, "stride": 64},
        "prompts": {"texts": ["asked.txt"], "length": 256, "count": 2},
        "search": {
            "budgets": [48, 32], "candidates": 3, "max_target_kv_heads": 2,
            "max_draft_kv_heads": 1, "min_gain": 1e-6, "trials": 5, "max_gamma": 2,
            "sinks": [1, 4], "windows": [4, 8],
        },
        "check": {
            "texts": {"texts": ["judged.txt"], "context": [200], "windows": 2},
            "pass_keys": {"texts": ["hidden.txt"], "length": 256, "count": 2},
            "budgets": [32, 48, 64], "fidelity_budgets": [32], "answer_budgets": [48],
        },
    }  # fmt: skip
    return {**recipe, **changes}


def _load(place: Path, **changes: object) -> Recipe:
    file = place / f"recipe-{abs(hash(str(changes)))}.yaml"
    file.write_text(yaml.safe_dump(_recipe(**changes)), encoding="utf-8")
    return Recipe.load(file)


@pytest.fixture(scope="module")
def calibrated(place, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("calibrated")
    assert main(["calibrate", "--recipe", str(place / "recipe.yaml"), "--output", str(output),
                 "--quiet"]) == 0  # fmt: skip
    return output


def test_what_is_written_serves(place, calibrated):
    config = DustinConfig.load(calibrated / "dustin.json")
    assert config.calibrated
    assert config.target_heads
    assert config.budget == 48
    assert config.guard is not None
    assert not list(calibrated.glob("*.partial"))
    assert (calibrated / "report.html").stat().st_size > 100_000
    llm = LLM(place / "target", place / "draft", config=calibrated / "dustin.json")
    output = llm.generate("the of and a to " * 40)[0]
    assert output.finish_reason in ("stop", "length")
    assert output.stats.coverage is not None


def test_results_are_consistent(calibrated):
    results = json.loads((calibrated / "results.json").read_text())
    check = results["check"]
    curves = check["arr"]["200"]
    for name, curve in curves.items():
        assert curve == sorted(curve), name  # a larger budget never recovers less
        assert all(0 < rate <= 1 for rate in curve)
        assert all(rate <= best + 1e-4 for rate, best in zip(curve, curves["oracle"], strict=True))
    assert curves["all heads, history"] == check["age"]["200"]["1"]
    config = json.loads((calibrated / "dustin.json").read_text())
    assert config["arr"] == pytest.approx(curves["chosen"][1], abs=1e-4)
    assert len(check["by_layer"]["chosen"]) == 3
    mean = sum(check["by_layer"]["chosen"]) / 3
    assert mean == pytest.approx(curves["chosen"][1], abs=1e-3)
    rows = {(row["policy"], row["budget"]): row for row in check["fidelity"]}
    assert rows["oracle", 48]["kl"] >= 0
    found = check["pass_keys"]["found"]
    assert set(found) == {"chosen", "history", "lookahead", "all heads", "sink + window"}
    assert len(results["trials"]) == 5
    assert sum(trial["chosen"] for trial in results["trials"]) == 1


class _Killed(BaseException):
    """Stands for a signal: nothing in between may catch it."""


class _KilledAt(Quiet):
    """Kills the run at its nth sign of life."""

    def __init__(self, count: int) -> None:
        self.left = count

    def advance(self, units: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise _Killed


def test_a_killed_run_goes_on_to_the_same_file(place, calibrated, tmp_path):
    recipe = Recipe.load(place / "recipe.yaml")
    for count in (3, 6, 7, 9, 12, 15):
        with pytest.raises(_Killed):
            calibrate(recipe, tmp_path, resume=True, progress=_KilledAt(count))
    calibrate(recipe, tmp_path, resume=True)
    whole = (calibrated / "dustin.json").read_bytes()
    assert (tmp_path / "dustin.json").read_bytes() == whole


def test_work_that_is_there_is_not_overwritten(place, calibrated):
    with pytest.raises(CalibrationError, match="--resume"):
        calibrate(Recipe.load(place / "recipe.yaml"), calibrated)
    with pytest.raises(ConfigError, match="another recipe"):
        calibrate(_load(place, seed=1), calibrated, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": {"texts": ["searched.txt"], "context": [5000]}}, "5162 tokens|positions"),
        ({"prompts": {"texts": ["asked.txt"], "length": 256, "count": 2, "kinds": ["riddle"]}},
         "riddle"),
        ({"check": {"texts": {"texts": ["searched.txt"], "context": [200]}}},
         "both searched and checked"),
        ({"seed": "one"}, "seed"),
        ({"buget": 3}, "buget"),
        ({"texts": {"texts": ["missing.txt"], "context": [200]}}, "missing.txt"),
        ({"draft": "lookup"}, "neither a folder"),
        ({"draft": "stranger"}, "tokenizer differs from the target's"),
        ({"limits": {"memory_gib": 0.0001}}, "limit of 0.0001"),
        ({"texts": {"texts": ["searched.txt"], "context": [40]}}, "texts.context.0"),
        ({"head_scores": {"texts": ["asked.txt"], "length": 256, "count": 0}}, "head_scores.count"),
        ({"prompts": {"texts": ["asked.txt"], "length": 256, "count": 2, "kinds": []}}, "kinds"),
        ({"search": {"sinks": [16], "windows": [32], "max_gamma": 2}}, "can take 48 tokens"),
        ({"check": {"texts": {"texts": ["judged.txt"], "context": [200]},
                    "pass_keys": {"texts": ["hidden.txt"], "length": 1000, "count": 1},
                    "budgets": [48], "fidelity_budgets": [48], "answer_budgets": [48]}},
         "positions|fewer than a prompt"),
    ],
)  # fmt: skip
def test_bad_recipes_are_refused_in_one_line(place, tmp_path, changes, message):
    refusals = (ConfigError, FileNotFoundError, TokenizerMismatchError)
    with pytest.raises(refusals, match=message) as caught:
        calibrate(_load(place, **changes), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()  # a corrected recipe can take the same folder


def test_the_time_limit_stops_with_everything_saved(place, calibrated, tmp_path):
    with pytest.raises(CalibrationError, match="--resume"):
        calibrate(_load(place, limits={"minutes": 1e-9}), tmp_path)
    calibrate(_load(place), tmp_path, resume=True)  # limits do not decide results
    assert (tmp_path / "dustin.json").read_bytes() == (calibrated / "dustin.json").read_bytes()


def test_a_full_disk_is_said_and_nothing_half_written(place, calibrated, tmp_path, monkeypatch):
    recipe, write, left = _load(place), np.savez, 2

    def full(stream, **arrays):
        nonlocal left
        left -= 1
        if left < 0:
            stream.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(stream, **arrays)

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(CalibrationError, match=r"No space left on device.*make room.*--resume"):
        calibrate(recipe, tmp_path)
    assert not list(tmp_path.rglob("*.partial"))
    assert len(list((tmp_path / "work" / "profile").iterdir())) == 2
    monkeypatch.undo()
    calibrate(recipe, tmp_path, resume=True)
    assert (tmp_path / "dustin.json").read_bytes() == (calibrated / "dustin.json").read_bytes()


def test_a_config_is_refused_beside_weights_that_changed(place, calibrated, tmp_path):
    changed = tmp_path / "draft"
    shutil.copytree(place / "draft", changed)
    file = changed / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="other draft weights: layer 1 changed"):
        LLM(place / "target", changed, config=calibrated / "dustin.json")

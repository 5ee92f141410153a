from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dustin_trt.config import (
    ConfigError,
    DustinConfig,
    Head,
    ModelSpec,
    default_config,
    tokenizer_fingerprint,
)

TARGET = ModelSpec("Qwen2ForCausalLM", 28, 28, 4, 128, 3584, 152064, 32768)
DRAFT = ModelSpec("Qwen2ForCausalLM", 24, 14, 2, 64, 896, 151936, 32768)

PARTS = ("embeddings", *(f"layer {layer}" for layer in range(28)), "norm", "head")
WEIGHTS = {part: f"{number:012x}" for number, part in enumerate(PARTS)}

FULL = DustinConfig(
    target_heads=(Head(20, 3), Head(20, 27)),
    draft_heads=(Head(7, 0), Head(23, 13)),
    budget=256,
    lookahead=100,
    sink=8,
    window=32,
    gamma=3,
    join="sum",
    lookahead_weight=0.25,
    guard=0.8,
    draft_window=256,
    arr=0.93,
    target=asdict(TARGET),
    draft=asdict(DRAFT),
    target_weights=WEIGHTS,
    draft_weights={"norm": "0" * 12},
    tokenizer="f" * 64,
    provenance={"texts": ["Persuasion – Jane Austen"], "seed": 7},
)


def _write(path: Path, fields: object) -> Path:
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def _message(error: pytest.ExceptionInfo[ConfigError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("config", [DustinConfig(), FULL], ids=["defaults", "full"])
def test_round_trip(tmp_path, config):
    config.save(tmp_path / "dustin.json")
    assert DustinConfig.load(tmp_path / "dustin.json") == config
    assert DustinConfig.load(str(tmp_path / "dustin.json")).target_heads == config.target_heads


def test_loaded_heads_have_names(tmp_path):
    FULL.save(tmp_path / "dustin.json")
    head = DustinConfig.load(tmp_path / "dustin.json").target_heads[1]
    assert (head.layer, head.head) == (20, 27)


def test_the_file_is_plain_json(tmp_path):
    FULL.save(tmp_path / "dustin.json")
    fields = json.loads((tmp_path / "dustin.json").read_text(encoding="utf-8"))
    assert fields["schema_version"] == 1
    assert fields["target_heads"] == [[20, 3], [20, 27]]
    assert fields["provenance"]["texts"] == ["Persuasion – Jane Austen"]


def test_save_leaves_no_partial_file(tmp_path):
    for config in (DustinConfig(), FULL):  # the second replaces the first
        config.save(tmp_path / "dustin.json")
        assert [p.name for p in tmp_path.iterdir()] == ["dustin.json"]
    assert DustinConfig.load(tmp_path / "dustin.json") == FULL


def test_a_save_that_breaks_off_spares_the_old_file(tmp_path, monkeypatch):
    FULL.save(tmp_path / "dustin.json")
    write = Path.write_text

    def half(self, text, **options):
        write(self, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space"):
        DustinConfig().save(tmp_path / "dustin.json")
    assert DustinConfig.load(tmp_path / "dustin.json") == FULL


BAD_FIELDS = {
    "budget is sink + window": ({"budget": 20}, "budget 20", "larger than 20"),
    "budget below sink + window": ({"budget": 30, "sink": 20, "window": 16}, "budget 30", "36"),
    "budget 0": ({"budget": 0}, "budget:"),
    "budget a word": ({"budget": "many"}, "budget:"),
    "budget a fraction": ({"budget": 64.5}, "budget:"),
    "budget null": ({"budget": None}, "budget:"),
    "gamma 0": ({"gamma": 0}, "gamma:"),
    "gamma negative": ({"gamma": -1}, "gamma:"),
    "a head twice": ({"target_heads": [[0, 1], [0, 1]]}, "target_heads lists a head twice"),
    "lookahead too large": ({"budget": 64, "lookahead": 45}, "lookahead 45", "44"),
    "lookahead negative": ({"lookahead": -1}, "lookahead:"),
    "sink negative": ({"sink": -1}, "sink:"),
    "window negative": ({"window": -1}, "window:"),
    "unknown join": ({"join": "max"}, "join:", "'split' or 'sum'"),
    "weight above 1": ({"lookahead_weight": 1.5}, "lookahead_weight:"),
    "weight NaN": ({"lookahead_weight": float("nan")}, "lookahead_weight:"),
    "guard above 1": ({"guard": 1.01}, "guard:"),
    "guard negative": ({"guard": -0.1}, "guard:"),
    "guard NaN": ({"guard": float("nan")}, "guard:"),
    "draft window negative": ({"draft_window": -1}, "draft_window:"),
    "draft window null": ({"draft_window": None}, "draft_window:"),
    "weights no object": ({"target_weights": "f00"}, "target_weights:"),
    "arr above 1": ({"arr": 1.2}, "arr:"),
    "unknown field": ({"gama": 4}, "gama:"),
    "field named like a parameter": ({"cls": 1}, "cls:"),
    "schema of the future": ({"schema_version": 2}, "schema_version:"),
    "head without a number": ({"target_heads": [[1, 2], [3]]}, "target_heads.1"),
    "heads no list": ({"draft_heads": "all"}, "draft_heads:"),
    "target no object": ({"target": [1]}, "target:"),
}
bad_fields = pytest.mark.parametrize("case", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())


@bad_fields
def test_a_bad_field_is_named(case):
    fields, *words = case
    with pytest.raises(ConfigError) as error:
        DustinConfig.make(**fields)
    assert all(word in _message(error) for word in words)


@bad_fields
def test_a_bad_field_in_a_file_is_named_with_the_file(tmp_path, case):
    fields, *words = case
    path = _write(tmp_path / "dustin.json", fields)
    with pytest.raises(ConfigError) as error:
        DustinConfig.load(path)
    assert all(word in _message(error) for word in (*words, str(path)))


def test_every_bad_field_is_named_at_once():
    with pytest.raises(ConfigError, match=r"budget: .*; gamma: "):
        DustinConfig.make(budget=0, gamma=0)


@pytest.mark.parametrize(
    "edge",
    [
        {"budget": 21},
        {"budget": 1, "sink": 0, "window": 0},
        {"budget": 64, "lookahead": 44},
        {"lookahead": 0},
        {"guard": 0},
        {"guard": 1},
        {"draft_window": 0},
    ],
    ids=str,
)
def test_the_last_good_value_is_taken(edge):
    config = DustinConfig.make(**edge)
    assert 0 <= config.lookahead_tokens <= config.free


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
    ],
)
def test_an_unreadable_file_is_a_config_error(tmp_path, content, words):
    path = tmp_path / "dustin.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        DustinConfig.load(path)
    assert str(path) in _message(error)


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read") as error:
        DustinConfig.load(tmp_path / "none.json")
    assert str(tmp_path / "none.json") in _message(error)


def test_a_directory_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        DustinConfig.load(tmp_path)


def test_replace_checks_again():
    assert FULL.replace(budget=512).budget == 512
    with pytest.raises(ConfigError, match="lookahead 100"):
        FULL.replace(budget=64)


@pytest.mark.parametrize(
    ("lookahead", "tokens"), [(None, 246), (0, 0), (17, 17)], ids=["default", "none", "given"]
)
def test_lookahead_tokens(lookahead, tokens):
    assert DustinConfig(lookahead=lookahead).free == 492
    assert DustinConfig(lookahead=lookahead).lookahead_tokens == tokens


class TestCheck:
    def test_accepts_what_it_was_made_for(self):
        FULL.check(TARGET, DRAFT, "f" * 64)

    def test_accepts_a_file_read_back(self, tmp_path):
        FULL.save(tmp_path / "dustin.json")
        DustinConfig.load(tmp_path / "dustin.json").check(TARGET, DRAFT, "f" * 64)

    @pytest.mark.parametrize("name", asdict(TARGET))
    def test_refuses_another_target(self, name):
        other = replace(TARGET, **{name: "Other" if name == "architecture" else 56})
        with pytest.raises(ConfigError, match=f"another target: {name} is") as error:
            FULL.check(other, DRAFT, "f" * 64)
        assert str(getattr(TARGET, name)) in _message(error)

    def test_refuses_another_draft(self):
        with pytest.raises(ConfigError, match="another draft: num_layers is 12 here and 24 there"):
            FULL.check(TARGET, replace(DRAFT, num_layers=12), "f" * 64)

    def test_a_draft_is_not_needed(self):
        FULL.check(TARGET, None, "f" * 64)

    @pytest.mark.parametrize("head", [(28, 0), (0, 28), (-1, 0), (0, -1)])
    def test_refuses_an_unknown_target_head(self, head):
        config = DustinConfig(target_heads=(Head(27, 27), Head(*head)))
        with pytest.raises(ConfigError, match=r"target_heads.*layers 0–27 of heads 0–27") as error:
            config.check(TARGET, None, None)
        assert f"({head[0]}, {head[1]})" in _message(error)

    def test_refuses_an_unknown_draft_head(self):
        """A head the target has and the draft has not."""
        config = DustinConfig(draft_heads=(Head(23, 14),))
        with pytest.raises(ConfigError, match=r"draft_heads.*\(23, 14\)"):
            config.check(TARGET, DRAFT, None)

    def test_refuses_another_tokenizer(self):
        with pytest.raises(ConfigError, match="another tokenizer"):
            FULL.check(TARGET, DRAFT, "0" * 64)

    @pytest.mark.parametrize(("made_for", "beside"), [(None, "0" * 64), ("f" * 64, None)])
    def test_an_unknown_tokenizer_is_not_compared(self, made_for, beside):
        FULL.replace(tokenizer=made_for).check(TARGET, DRAFT, beside)


def _with(weights: dict[str, str], *parts: str) -> dict[str, str]:
    return weights | dict.fromkeys(parts, "f" * 12)


class TestCheckWeights:
    def refused(self, target_weights, draft_weights=None) -> str:
        with pytest.raises(ConfigError) as error:
            FULL.check(TARGET, DRAFT, None, target_weights, draft_weights)
        return _message(error)

    def test_accepts_what_it_was_made_for(self):
        FULL.check(TARGET, DRAFT, None, dict(reversed(WEIGHTS.items())), {"norm": "0" * 12})

    @pytest.mark.parametrize(
        ("parts", "named"),
        [
            (["layer 3"], "layer 3 changed;"),
            (["layer 3", "head"], "layer 3 and head changed;"),
            (["layer 7", "layer 3", "norm"], "layer 3, layer 7 and norm changed;"),
            (
                ["layer 3", "layer 7", "layer 8", "head"],
                "layer 3, layer 7 and 2 more parts changed",
            ),
            (PARTS[:-1], "embeddings, layer 0 and 28 more parts changed;"),
            (PARTS, "all 31 parts changed;"),
        ],
    )
    def test_names_what_changed(self, parts, named):
        message = self.refused(_with(WEIGHTS, *parts))
        assert message.startswith(f"the configuration was made for other target weights: {named}")
        assert message.endswith("calibrate this pair again, or use the checkpoint it was made for")

    def test_a_part_that_is_lost_or_new_changed(self):
        head = {part: digits for part, digits in WEIGHTS.items() if part != "head"}
        assert "target weights: head changed" in self.refused(head)
        assert "target weights: layer 28 changed" in self.refused(_with(WEIGHTS, "layer 28"))
        assert "target weights: all 31 parts changed" in self.refused({})

    def test_names_the_draft(self):
        message = self.refused(WEIGHTS, {"norm": "1" * 12})
        assert "other draft weights: norm changed" in message

    def test_shapes_come_first(self):
        with pytest.raises(ConfigError, match="num_layers is 12 here"):
            FULL.check(replace(TARGET, num_layers=12), DRAFT, None, _with(WEIGHTS, *PARTS))

    @pytest.mark.parametrize("made_for", [None, {}])
    def test_unknown_weights_are_not_compared(self, made_for):
        FULL.check(TARGET, DRAFT, None, None, None)
        FULL.replace(target_weights=made_for).check(TARGET, None, None, WEIGHTS)


def test_default_config_is_marked_uncalibrated():
    config = default_config(TARGET, DRAFT)
    assert not config.calibrated
    config.check(TARGET, DRAFT, None)
    assert {head.layer for head in config.target_heads} == {8, 14, 20}
    assert len(config.target_heads) == 3 * 28
    assert len(config.draft_heads) == 3 * 14
    assert not default_config(TARGET, None).draft_heads
    skipping = default_config(TARGET, TARGET, [*range(8), *range(20, 28)])  # 16 layers are left
    assert {head.layer for head in skipping.draft_heads} == {5, 20, 23}
    assert DustinConfig().calibrated


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_default_config_suits_shallow_models(layers):
    spec = replace(TARGET, num_layers=layers)
    config = default_config(spec, None)
    assert config.target_heads
    config.check(spec, None, None)


def test_kv_head_of_28_over_4():
    """Seven query heads share a KV head; a divisor of 4 or 8 would be wrong from head 4 on."""
    assert [TARGET.kv_head(h) for h in range(28)] == [0] * 7 + [1] * 7 + [2] * 7 + [3] * 7


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (9, 3), (8, 1), (14, 2)])
def test_kv_heads_are_shared_evenly(heads, kv_heads):
    spec = replace(TARGET, num_heads=heads, num_kv_heads=kv_heads)
    read = [spec.kv_head(h) for h in range(heads)]
    assert read == sorted(read)
    assert [read.count(kv) for kv in range(kv_heads)] == [heads // kv_heads] * kv_heads


def test_all_heads():
    spec = replace(TARGET, num_layers=2, num_heads=2)
    assert spec.all_heads() == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert spec.all_heads([1]) == ((1, 0), (1, 1))
    assert spec.all_heads([]) == ()


class _Vocabulary:
    def __init__(self, **ids: int) -> None:
        self._ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def test_tokenizer_fingerprint():
    made = tokenizer_fingerprint(_Vocabulary(a=0, ñ=1))
    assert made == tokenizer_fingerprint(_Vocabulary(ñ=1, a=0))
    assert made != tokenizer_fingerprint(_Vocabulary(a=1, ñ=0))
    assert made != tokenizer_fingerprint(_Vocabulary(a=0, n=1))
    assert made != tokenizer_fingerprint(_Vocabulary(a=0, ñ=1, b=2))

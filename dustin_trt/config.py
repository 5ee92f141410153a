"""The calibrated configuration `dustin.json`, and what identifies the models it was made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dustin_trt.files import write_whole


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says what to change."""


class Head(NamedTuple):
    """A query head: `layer` and `head`, both counted from 0."""

    layer: int
    head: int


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder: all that the layers above a model need to know of it.

    `vocab_size` is the width of the logits, padding included; `max_positions` the number of
    positions the rotary embedding was made for.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int

    def kv_head(self, head: int) -> int:
        """The KV head that query head `head` reads (grouped-query attention)."""
        return head // (self.num_heads // self.num_kv_heads)

    def num_kv_heads_of(self, heads: Iterable[Head]) -> int:
        """How many KV heads `heads` read: what scoring them costs, whatever their own number."""
        return len({(layer, self.kv_head(head)) for layer, head in heads})

    def all_heads(self, layers: Iterable[int] | None = None) -> tuple[Head, ...]:
        """Every query head of `layers` (of all layers when None)."""
        layers = range(self.num_layers) if layers is None else layers
        return tuple(Head(layer, head) for layer in layers for head in range(self.num_heads))

    def check_heads(self, heads: tuple[Head, ...], what: str) -> None:
        """Raise ConfigError for a head this model does not have."""
        for layer, head in heads:
            if not (0 <= layer < self.num_layers and 0 <= head < self.num_heads):
                raise ConfigError(
                    f"{what}: the model has no head ({layer}, {head}); it has layers "
                    f"0–{self.num_layers - 1} of heads 0–{self.num_heads - 1}"
                )


class DustinConfig(BaseModel):
    """What one verification pass reads, for one (target, draft) pair.

    Attributes
    ----------
    target_heads, draft_heads : semantic retrieval heads whose attention scores the history, as
        (layer, query head)
    budget : k, history tokens read in one verification pass, sink and window included
    lookahead : m, the part of the budget the draft's scores choose; None means half of what
        sink and window leave
    sink, window : first and last history tokens that are always read
    gamma : draft tokens a step
    join : how the two signals meet: "split" (top-m of the lookahead, then fill: the paper) or
        "sum" (a weighted sum of the normalised scores)
    lookahead_weight : weight of the lookahead in the sum
    guard : coverage below which a row is verified densely for that step, calibrated for these heads
        and this budget; None or 0 never, 1 whenever a row is not read whole
    draft_window : history tokens that a draft model itself reads, on which acceptance and lookahead
        depend; 0 means all
    calibrated : False for a default that nobody searched for
    arr : windowed attention recovery rate reached in calibration
    target, draft : shapes of the models it was made for, checked at load
    target_weights, draft_weights : fingerprints of their weights by part (`fingerprint`), checked
        at load where the model comes from a folder
    tokenizer : fingerprint of their tokenizer, checked at load
    provenance : how it was made (texts, lengths, seed, versions)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    target_heads: tuple[Head, ...] = ()
    draft_heads: tuple[Head, ...] = ()
    budget: int = Field(default=512, ge=1)
    lookahead: int | None = Field(default=None, ge=0)
    sink: int = Field(default=4, ge=0)
    window: int = Field(default=16, ge=0)
    gamma: int = Field(default=4, ge=1)
    join: Literal["split", "sum"] = "split"
    lookahead_weight: float = Field(default=0.5, ge=0, le=1)
    guard: float | None = Field(default=None, ge=0, le=1)
    draft_window: int = Field(default=512, ge=0)
    calibrated: bool = True
    arr: float | None = Field(default=None, ge=0, le=1)
    target: dict[str, Any] | None = None
    draft: dict[str, Any] | None = None
    target_weights: dict[str, str] | None = None
    draft_weights: dict[str, str] | None = None
    tokenizer: str | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_consistent(self) -> DustinConfig:
        if self.budget <= self.sink + self.window:
            raise ValueError(
                f"budget {self.budget} leaves nothing to choose beside sink {self.sink} and "
                f"window {self.window}: make it larger than {self.sink + self.window}"
            )
        if self.lookahead is not None and self.lookahead > self.free:
            raise ValueError(
                f"lookahead {self.lookahead} is more than the {self.free} tokens that sink and "
                f"window leave of budget {self.budget}"
            )
        for name, heads in (("target", self.target_heads), ("draft", self.draft_heads)):
            if len(set(heads)) < len(heads):
                raise ValueError(f"{name}_heads lists a head twice")
        return self

    @property
    def free(self) -> int:
        """Tokens of the budget that are chosen by score."""
        return self.budget - self.sink - self.window

    @property
    def lookahead_tokens(self) -> int:
        """m, with the default resolved."""
        return self.free // 2 if self.lookahead is None else self.lookahead

    @classmethod
    def make(cls, /, **fields: Any) -> DustinConfig:
        """Build from keyword arguments; ConfigError names the wrong field in one line."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ConfigError(one_line(error)) from error

    def replace(self, **fields: Any) -> DustinConfig:
        """A checked copy with other values."""
        return self.make(**{**self.model_dump(), **fields})

    @classmethod
    def load(cls, path: str | Path) -> DustinConfig:
        """Read `dustin.json`.

        Raises
        ------
        ConfigError
            Missing file, malformed JSON, unknown field, wrong value.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"configuration {path} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"configuration {path} is not a JSON object")
        try:
            return cls.make(**fields)
        except ConfigError as error:
            raise ConfigError(f"configuration {path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write `dustin.json`, whole or not at all."""
        write_whole(Path(path), self.model_dump_json(indent=2) + "\n")

    def check(
        self,
        target: ModelSpec,
        draft: ModelSpec | None,
        tokenizer: str | None,
        target_weights: dict[str, str] | None = None,
        draft_weights: dict[str, str] | None = None,
    ) -> None:
        """Refuse models other than those the configuration was made for.

        Parameters
        ----------
        target, draft : shapes of the models
        tokenizer : `tokenizer_fingerprint`; None where there is no tokenizer
        target_weights, draft_weights : `fingerprint.weights_fingerprint`; None where there is no
            folder to take it of

        Raises
        ------
        ConfigError
            Names the model and the first field that differs, the parts whose weights do, or the
            unknown head.
        """
        _check_spec("target", self.target, target)
        if draft is not None:
            _check_spec("draft", self.draft, draft)
            draft.check_heads(self.draft_heads, "draft_heads")
        target.check_heads(self.target_heads, "target_heads")
        if self.tokenizer and tokenizer and self.tokenizer != tokenizer:
            raise ConfigError(
                "the configuration was made with another tokenizer: calibrate this pair, or use "
                "the checkpoint it was made for"
            )
        _check_weights("target", self.target_weights, target_weights)
        _check_weights("draft", self.draft_weights, draft_weights)


def _check_spec(role: str, made_for: dict[str, Any] | None, model: ModelSpec) -> None:
    for name, value in asdict(model).items():
        if made_for is not None and made_for.get(name) != value:
            raise ConfigError(
                f"the configuration was made for another {role}: {name} is {value} here and "
                f"{made_for.get(name)} there; calibrate this pair, or use the right checkpoint"
            )


def _check_weights(
    role: str, made_for: dict[str, str] | None, weights: dict[str, str] | None
) -> None:
    if not made_for or weights is None or made_for == weights:
        return
    parts = made_for | weights
    changed = [part for part in parts if made_for.get(part) != weights.get(part)]
    raise ConfigError(
        f"the configuration was made for other {role} weights: {_few(changed, len(parts))} "
        "changed; calibrate this pair again, or use the checkpoint it was made for"
    )


def _few(parts: list[str], total: int) -> str:
    """As "a", "a and b", "a, b and c", "a, b and 5 more parts" or "all 7 parts"."""
    if len(parts) > 3:
        if len(parts) == total:
            return f"all {total} parts"
        parts = [*parts[:2], f"{len(parts) - 2} more parts"]
    *before, last = parts
    return f"{', '.join(before)} and {last}" if before else last


def default_config(
    target: ModelSpec, draft: ModelSpec | None, draft_layers: Sequence[int] = ()
) -> DustinConfig:
    """What is used before a calibration exists: every head of three layers in mid-depth.

    Nobody searched for these heads. Scoring every head finds more; a calibrated handful costs less.

    Parameters
    ----------
    target, draft : shapes of the models
    draft_layers : the layers the draft has, where it is the target without some
    """
    layers = draft_layers or range(draft.num_layers if draft else 0)
    return DustinConfig.make(
        target_heads=target.all_heads(_middle(range(target.num_layers))),
        draft_heads=draft.all_heads(_middle(layers)) if draft else (),
        calibrated=False,
    )


def _middle(layers: Sequence[int]) -> list[int]:
    last = len(layers) - 1
    return sorted({layers[min(round(len(layers) * share), last)] for share in (0.3, 0.5, 0.7)})


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the token → id map, the part of a tokenizer that both models must share."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def one_line(error: ValidationError) -> str:
    """Pydantic's findings as `field: what is wrong`, joined by semicolons."""
    lines = []
    for finding in error.errors():
        place = ".".join(str(part) for part in finding["loc"])
        message = finding["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)

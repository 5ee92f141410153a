"""The texts of a distillation: which train, which judge, and that they are apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dustin_trt.config import ConfigError
from dustin_trt.evaluation.texts import WORDS, expand, read_text

_APART = "what judges a draft must not have made it"
_EXCERPTS, _EXCERPT = 16, 200  # of a text looked for in another, characters of one


@dataclass(frozen=True)
class Texts:
    """What to train on and what to judge by.

    train, held_out : names of texts (`evaluation.texts`); what is held out is not trained on, even
        where a wildcard of `train` names it
    exclude : not trained on either
    context : tokens a sequence
    held_out_sequences : so many, evenly spread over the held-out texts
    retrieval_share : see `corpus.make_corpus`

    Raises
    ------
    ConfigError
        A number that makes no sense.
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    context: int = 1024
    held_out_sequences: int = 8
    retrieval_share: float = 0.08

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ConfigError(f"--context {self.context} is less than 2")
        if self.held_out_sequences < 1:
            raise ConfigError(f"--held-out-sequences {self.held_out_sequences} is less than 1")
        if not 0 <= self.retrieval_share < 1:
            raise ConfigError(f"--retrieval-share {self.retrieval_share} is not in 0–1, 1 excluded")

    def read(self) -> tuple[dict[str, str], dict[str, str]]:
        """The texts to train on and those held out, by name.

        Raises
        ------
        ConfigError
            A text on both sides, also a copy or a part of one; nothing left to train on; a text
            that cannot be read.
        """
        train, held_out = ({name: read_text(name) for name in names} for names in _names(self))
        for judge, judging in held_out.items():
            for name, text in train.items():
                if _is_in(judging, text) or _is_in(text, judging):
                    raise ConfigError(
                        f"{name}, to train on, and {judge}, held out, share most of their text: "
                        f"{_APART}; --exclude one"
                    )
        return train, held_out


def describe_text(text: str) -> dict[str, Any]:
    """What identifies a text: its length and SHA-256."""
    content = text.encode()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _names(texts: Texts) -> tuple[list[str], list[str]]:
    """Names of the texts to train on and of those held out.

    Raises
    ------
    ConfigError
        A text that was asked for on both sides, or nothing left to train on.
    """
    held_out = _expand(texts.held_out)
    if both := sorted({_place(name) for name in texts.train} & {*held_out}):
        raise ConfigError(f"{', '.join(both)} is given to train on and held out: {_APART}")
    dropped = {*held_out, *_expand(texts.exclude)}
    train = {place: name for place, name in _expand(texts.train).items() if place not in dropped}
    if not train:
        raise ConfigError("no text is left to train on: give more --text or fewer --exclude")
    return list(train.values()), list(held_out.values())


def _expand(given: Sequence[str]) -> dict[str, str]:
    """Names of texts by what they mean, however they are spelled."""
    return {_place(name): name for one in given for name in expand(one)}


def _place(name: str) -> str:
    return name if name.partition(":")[0] in WORDS else str(Path(name).expanduser().resolve())


def _is_in(text: str, other: str) -> bool:
    """Whether most of a few excerpts of a text are in another."""
    if len(text) <= _EXCERPT:
        return bool(text) and text == other
    places = range(0, max(1, len(text) - _EXCERPT), max(1, len(text) // _EXCERPTS))
    found = sum(text[at : at + _EXCERPT] in other for at in places)
    return 2 * found > len(places)

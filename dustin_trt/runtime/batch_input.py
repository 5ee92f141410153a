"""The lines of a batch job's input: what they may hold, and what is random about them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_trt.runtime.sampling_params import RequestError, SamplingParams

if TYPE_CHECKING:
    from dustin_trt.runtime.llm import Prompt

Id = str | int

_PROMPTS = ("prompt", "prompt_token_ids")
_SAMPLING: dict[str, tuple[str, Any]] = {
    "temperature": ("a number", lambda x: _is_int(x) or isinstance(x, float)),
    "top_p": ("a number", lambda x: _is_int(x) or isinstance(x, float)),
    "top_k": ("an integer", lambda x: _is_int(x)),
    "max_tokens": ("an integer", lambda x: _is_int(x)),
    "seed": ("an integer", lambda x: _is_int(x)),
    "stop": ("a string or a list of strings", lambda x: isinstance(x, str) or _all(x, _is_str)),
    "stop_token_ids": ("a list of integers", lambda x: _all(x, _is_int)),
    "ignore_eos": ("true or false", lambda x: isinstance(x, bool)),
}
"""Sampling fields of a line, strict about JSON types: "0.5" is no number, true no integer."""

_KNOWN = ("id", *_PROMPTS, *_SAMPLING)


class BatchError(RuntimeError):
    """The job cannot start or go on; the message says what to change."""


class LineError(RequestError):
    """A line that cannot be served; `id` is the line's, None where it has none that is usable."""

    def __init__(self, message: str, id: Id | None = None) -> None:
        super().__init__(message)
        self.id = id


@dataclass(frozen=True)
class Line:
    """A line that is well-formed.

    id : the line's own, or its number as a string
    prompt : text or `{"prompt_token_ids": […]}`
    params : the defaults, with the line's own parameters in place of them
    """

    id: Id
    prompt: Prompt
    params: SamplingParams


def line_id(number: int) -> str:
    """What an error about a line without a usable id goes by; no line may take such an id."""
    return f"line {number}"


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of the lines that are not blank, one in memory at a time.

    Raises
    ------
    BatchError
        The file cannot be read, now or further on.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise BatchError(f"cannot read {path}: {error.strerror}") from error


def count_lines(path: Path) -> int | None:
    """How many lines `read_lines` will give; None for a pipe, which can be read only once."""
    return sum(1 for _ in read_lines(path)) if path.is_file() else None


def parse_line(raw: bytes, number: int, defaults: SamplingParams) -> Line:
    """One input line. A field that is null counts as left out.

    Raises
    ------
    LineError
        Says which field is wrong and what it should be.
    """
    fields = _json_object(raw)
    own_id = _id(fields.get("id"))
    id = str(number) if own_id is None else own_id
    try:
        if unknown := [name for name in fields if name not in _KNOWN]:
            raise RequestError(f"unknown field {unknown[0]!r}; there are {', '.join(_KNOWN)}")
        fields = {name: value for name, value in fields.items() if value is not None}
        return Line(id, _prompt(fields), _params(fields, id, defaults))
    except RequestError as error:
        raise LineError(str(error), id) from error


def mix_seed(seed: int, id: Id) -> int:
    """The seed of one line under a job's default seed: 63 bits of BLAKE2b of `seed:id`.

    Equal prompts under different ids get different texts, and a line gets the same text whenever
    and beside whatever it runs. A seed that a line brings itself is used as it is.
    """
    digest = hashlib.blake2b(f"{seed}:{json.dumps(id)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
        # Half a surrogate pair ("\ud800") is JSON but no text: no tokenizer takes it.
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeError:
        raise LineError("the line is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise LineError(f"the line is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise LineError(f"the line is not JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise LineError('the line is not a JSON object such as {"id": "a", "prompt": "…"}')
    return fields


def _id(value: Any) -> Id | None:
    if value is None or _is_int(value):
        return value
    if not isinstance(value, str):
        raise LineError("id must be a string or an integer")
    if re.fullmatch(r"line \d+", value):
        raise LineError(f"id {value!r} is kept for errors of lines without an id: choose another")
    return value


def _prompt(fields: dict[str, Any]) -> Prompt:
    given = [name for name in _PROMPTS if name in fields]
    if len(given) != 1:
        raise RequestError(
            f"the line has {'both' if given else 'neither'} prompt {'and' if given else 'nor'} "
            "prompt_token_ids: give one of them"
        )
    value = fields[given[0]]
    if given[0] == "prompt":
        if not isinstance(value, str):
            raise RequestError("prompt must be a string (or use prompt_token_ids)")
        return value
    if not _all(value, _is_int):
        raise RequestError("prompt_token_ids must be a list of integers")
    return {"prompt_token_ids": value}


def _params(fields: dict[str, Any], id: Id, defaults: SamplingParams) -> SamplingParams:
    own = {name: fields[name] for name in _SAMPLING if name in fields}
    for name, value in own.items():
        what, right = _SAMPLING[name]
        if not right(value):
            raise RequestError(f"{name} must be {what}")
    if "seed" not in own and defaults.seed is not None:
        own["seed"] = mix_seed(defaults.seed, id)
    return defaults.replace(**own)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _all(value: Any, right: Any) -> bool:
    return isinstance(value, list) and all(map(right, value))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")

"""Long texts by name: files, and the books that the demo fetches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dustin_trt.config import ConfigError
from dustin_trt.evaluation import assets

WORDS = ("books", "austen")
"""What may stand before a colon in place of a file: plays of Shakespeare, novels of Austen."""


def read_text(name: str) -> str:
    """The text of `books:hamlet`, `austen:emma`, or a UTF-8 file.

    Raises
    ------
    ConfigError
        No such text; says which there are.
    """
    word, _, title = name.partition(":")
    if word in WORDS and title:
        shelf = _shelf(word)
        if title not in shelf:
            raise ConfigError(f"there is no text {name}; there are {', '.join(shelf)}")
        return shelf[title].read_text(encoding="utf-8")
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read text {name}: {error}") from error


def expand(name: str) -> list[str]:
    """The texts that a name stands for: `books:*` is all plays, a folder all its `*.txt`.

    Raises
    ------
    ConfigError
        A folder without texts.
    """
    word, _, title = name.partition(":")
    if word in WORDS and title == "*":
        return [f"{word}:{found}" for found in _shelf(word)]
    if Path(name).expanduser().is_dir():
        files = sorted(map(str, Path(name).expanduser().glob("*.txt")))
        if not files:
            raise ConfigError(f"there are no *.txt files in {name}")
        return files
    return [name]


def _shelf(word: str) -> dict[str, Path]:
    shelves: dict[str, Callable[[], dict[str, Path]]] = {
        "books": assets.books,
        "austen": assets.austen,
    }
    return shelves[word]()

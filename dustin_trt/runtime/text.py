"""Tokens become text while they arrive, and the text is watched for stop strings."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Incremental detokenisation with stop strings.

    Parameters
    ----------
    tokenizer : a transformers tokenizer; None keeps the text empty
    stop : strings that end the text and are cut off it

    Attributes
    ----------
    text : what is decoded so far, complete characters only
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        # Decoding starts at a token whose text is known, since what a token reads as can depend
        # on the one before it (as vLLM and TGI do).
        self._start = 0
        self._known = 0
        self._given = 0
        self.text = ""

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string is now complete."""
        if self._tokenizer is None:
            return False
        self._tokens.append(token)
        fresh = self._fresh()
        if not fresh or fresh.endswith("\ufffd"):  # the bytes of a character are still coming
            return False
        self._start, self._known = self._known, len(self._tokens)
        return self._extend(fresh)

    def finish(self) -> None:
        """No more tokens: an incomplete character becomes a replacement character."""
        if self._tokenizer is not None and self._known < len(self._tokens):
            self._extend(self._fresh())
            self._known = len(self._tokens)

    def take(self, *, final: bool = False) -> str:
        """The text not yet given out, less what may turn out to begin a stop string."""
        end = len(self.text)
        if not final:
            end -= max((_overlap(self.text, stop) for stop in self._stop), default=0)
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _fresh(self) -> str:
        before = self._decode(self._tokens[self._start : self._known])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _extend(self, fresh: str) -> bool:
        searched = len(self.text)
        self.text += fresh
        ends = [
            at
            for stop in self._stop
            if (at := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if ends:
            self.text = self.text[: min(ends)]
        return bool(ends)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

"""Pass-key retrieval: a number hidden in a long text, asked for at its end.

The task of Mohtashami and Jaggi (arXiv 2305.16300). A verifier that does not read the right
tokens cannot answer, while a continuation of prose hardly notices what it was not shown.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ASK = (
    "There is an important pass key hidden inside the following text. Find it and memorize it.\n\n"
)
_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_QUESTION = "\n\nWhat is the pass key?"
_ANSWER = "The pass key is"


@dataclass(frozen=True)
class PassKeyPrompt:
    """A prompt and what must come of it.

    tokens : token ids, a chat turn up to "The pass key is"
    key : five digits
    needle : positions of the sentence that holds the key
    """

    tokens: list[int]
    key: str
    needle: range

    def found_in(self, text: str) -> bool:
        """Whether a generated text names the key."""
        return self.key in text


def passkey_prompts(
    tokenizer: Any, text: str, *, length: int, count: int, seed: int
) -> list[PassKeyPrompt]:
    """Prompts of `length` tokens with keys at random depths of different stretches of `text`.

    Parameters
    ----------
    tokenizer : of a model with a chat template
    text : the haystack, longer than `length` tokens; line breaks are taken out, so that the key's
        own paragraph stands alone
    length, count, seed : size of a prompt, how many, and what decides keys and depths

    Raises
    ------
    ValueError
        When the text is shorter than one prompt.
    """
    encode = encoder(tokenizer)
    opening, closing = chat_frame(tokenizer)
    head, tail = encode(opening + _ASK), encode(_QUESTION + closing + _ANSWER)
    hay = haystack(encode, text, length)
    random_source = random.Random(seed)
    prompts = []
    for i in range(count):
        key = str(random_source.randint(10000, 99999))
        needle = encode(_NEEDLE.format(key=key))
        tokens, at = hide(
            hay, head, needle, tail, length=length, share=i / max(1, count - 1),
            depth=random_source.uniform(0.05, 0.9),
        )  # fmt: skip
        prompts.append(PassKeyPrompt(tokens, key, range(at, at + len(needle))))
    return prompts


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Token ids of a piece of text, without special tokens around it."""

    def encode(piece: str) -> list[int]:
        ids: list[int] = tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
        return ids

    return encode


def haystack(encode: Callable[[str], list[int]], text: str, length: int) -> list[int]:
    """A text on one line, as tokens to hide something in.

    Raises
    ------
    ValueError
        When the text is shorter than a prompt of `length` tokens.
    """
    hay = encode(re.sub(r"\s+", " ", text))
    if len(hay) < length:
        raise ValueError(f"the text has {len(hay)} tokens, fewer than a prompt of {length}")
    return hay


def chat_frame(tokenizer: Any) -> tuple[str, str]:
    """What stands before and after a user's words, up to where the model answers.

    Raises
    ------
    ValueError
        A tokenizer without a chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template: retrieval prompts need one")
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True
    )
    opening, closing = turn.split("\0")
    return opening, closing


def hide(
    hay: list[int],
    head: list[int],
    needle: list[int],
    tail: list[int],
    *,
    length: int,
    share: float,
    depth: float,
) -> tuple[list[int], int]:
    """A prompt of `length` tokens with `needle` in a stretch of `hay`, and where the needle begins.

    Parameters
    ----------
    share : which stretch, from the first (0) to the last (1)
    depth : where in it, from its beginning (0) to its end (1)
    """
    room = length - len(head) - len(tail) - len(needle)
    start = int(share * (len(hay) - room))
    before = int(room * depth)
    hidden = hay[start : start + before] + needle + hay[start + before : start + room]
    return head + hidden + tail, len(head) + before

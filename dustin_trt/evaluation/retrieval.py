"""Questions whose answer stands in one sentence of a long text.

The pass key (`passkey.py`) is one kind; these others have words for answers, so that heads chosen
with them are not those that only find digits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dustin_trt.evaluation.passkey import chat_frame, encoder, haystack, hide


@dataclass(frozen=True)
class Question:
    """A kind of question.

    needle : the sentence to hide, with `{}` for the answer
    ask, lead : the question, and how the answer begins
    answers : what may stand there; None means five random digits
    """

    needle: str
    ask: str
    lead: str
    answers: tuple[str, ...] | None = None


_PLACES = ("Lisbon", "Vienna", "Dublin", "Naples", "Cairo", "Bergen", "Madrid", "Warsaw", "Athens")
_NAMES = ("Eleanor Marsh", "Henry Dalton", "Rosa Keller", "Simon Archer", "Clara Whitman")
_WORDS = ("lantern", "harvest", "granite", "compass", "orchard", "whisper", "thunder", "velvet")

QUESTIONS = {
    "pass key": Question(
        "The pass key is {0}. Remember it. {0} is the pass key.",
        "What is the pass key?",
        "The pass key is",
    ),
    "number": Question(
        "The number of the locked room is {0}.",
        "What is the number of the locked room?",
        "The number of the locked room is",
    ),
    "place": Question(
        "The old merchant hid the silver ring in {0}.",
        "Where did the old merchant hide the silver ring?",
        "The old merchant hid the silver ring in",
        _PLACES,
    ),
    "name": Question(
        "The keeper of the lighthouse is called {0}.",
        "What is the keeper of the lighthouse called?",
        "The keeper of the lighthouse is called",
        _NAMES,
    ),
    "word": Question(
        "The secret word of the society is {0}.",
        "What is the secret word of the society?",
        "The secret word of the society is",
        _WORDS,
    ),
}


@dataclass(frozen=True)
class RetrievalPrompt:
    """A prompt whose continuation stands in it.

    tokens : token ids, up to the words before the answer
    answer : token ids of the answer
    span : positions in `tokens` where the answer stands, ascending
    """

    tokens: list[int]
    answer: list[int]
    span: list[int]


def retrieval_prompts(
    tokenizer: Any,
    text: str,
    *,
    length: int,
    count: int,
    seed: int,
    kinds: Sequence[str] = tuple(QUESTIONS),
) -> list[RetrievalPrompt]:
    """Prompts of `length` tokens over different stretches of `text`, the kinds taking turns.

    Parameters
    ----------
    tokenizer : of a model with a chat template
    text : the haystack, longer than `length` tokens
    length, count, seed : size of a prompt, how many, and what decides answers and depths
    kinds : of `QUESTIONS`

    Raises
    ------
    ValueError
        A text shorter than one prompt, a tokenizer without a chat template.
    """
    encode = encoder(tokenizer)
    opening, closing = chat_frame(tokenizer)
    hay = haystack(encode, text, length)
    head = encode(f"{opening}Read the following text and answer the question at its end.\n\n")
    chance = random.Random(f"{seed} {length}")
    prompts = []
    for number in range(count):
        question = QUESTIONS[kinds[number % len(kinds)]]
        answer = (
            chance.choice(question.answers)
            if question.answers
            else str(chance.randint(10000, 99999))
        )
        needle = encode("\n\n" + question.needle.format(answer) + "\n\n")
        tail = encode(f"\n\n{question.ask}{closing}{question.lead}")
        tokens, first = hide(
            hay, head, needle, tail, length=length, share=number / max(1, count - 1),
            depth=chance.uniform(0.05, 0.9),
        )  # fmt: skip
        wanted = encode(" " + answer)
        span = [first + at for at in _occurrences(needle, wanted)]
        prompts.append(RetrievalPrompt(tokens, wanted, span))
    return prompts


def _occurrences(needle: list[int], answer: list[int]) -> list[int]:
    """Positions of the answer's tokens in the needle, every time it stands there."""
    size = len(answer)
    starts = [i for i in range(len(needle) - size + 1) if needle[i : i + size] == answer]
    if not starts:
        raise ValueError("the tokenizer cuts the answer differently inside the sentence")
    return [start + offset for start in starts for offset in range(size)]

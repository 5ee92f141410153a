"""The recipe's texts and questions as token sequences with windows to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dustin_trt.calibration.recipe import Prompts, Recipe, Texts
from dustin_trt.calibration.samples import Window
from dustin_trt.config import ConfigError
from dustin_trt.evaluation.passkey import PassKeyPrompt, passkey_prompts
from dustin_trt.evaluation.retrieval import RetrievalPrompt, retrieval_prompts
from dustin_trt.evaluation.texts import read_text

T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """A sequence to look at, and where.

    name : of its file of samples
    """

    name: str
    tokens: list[int]
    windows: list[Window]

    @property
    def context(self) -> int:
        """History of its first window."""
        return self.windows[0].at

    @property
    def work(self) -> int:
        """About how many tokens it costs to look at."""
        return self.windows[-1].at + 20 * len(self.windows)


def longest(recipe: Recipe) -> int:
    """Tokens of the longest sequence that a recipe looks at."""
    spare = recipe.search.max_gamma + 2
    texts = [
        max(part.context) + part.windows * part.stride + spare
        for part in (recipe.texts, recipe.check.texts)
    ]
    parts = [recipe.prompts, recipe.head_scores, *filter(None, [recipe.check.pass_keys])]
    return max(*texts, *(part.length + 32 for part in parts))


def text_passages(tokenizer: Any, part: Texts, kind: str, gamma: int) -> list[Passage]:
    """A stretch of every text for every context, with its windows.

    Raises
    ------
    ConfigError
        A text that is too short; says how long it must be.
    """
    passages: list[Passage] = []
    for context in part.context:
        for name in part.texts:
            length = context + part.windows * part.stride + gamma + 2
            text = read_text(name)
            tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            if len(tokens) < length:
                raise ConfigError(
                    f"text {name} has {len(tokens)} tokens, and windows after {context} of "
                    f"history need {length}: use a longer text or a smaller context"
                )
            start = (len(tokens) - length) // 2  # the middle: beginnings are lists of names
            windows = [Window(context + i * part.stride) for i in range(part.windows)]
            cut = tokens[start : start + length]
            passages.append(Passage(f"{kind}-{len(passages):03}", cut, windows))
    return passages


def questions(tokenizer: Any, part: Prompts, seed: int) -> list[RetrievalPrompt]:
    """The prompts of a recipe's part, its texts taking turns.

    Raises
    ------
    ConfigError
        A text that is too short, a tokenizer without a chat template.
    """

    def ask(text: str, number: int, **given: Any) -> list[RetrievalPrompt]:
        kinds = part.kinds[number:] + part.kinds[:number]
        return retrieval_prompts(tokenizer, text, kinds=kinds, **given)

    return _from_texts(part, seed, ask)


def pass_keys(tokenizer: Any, part: Prompts, seed: int) -> list[PassKeyPrompt]:
    """Pass-key prompts over the texts of a recipe's part.

    Raises
    ------
    ConfigError
        See `questions`.
    """

    def ask(text: str, number: int, **given: Any) -> list[PassKeyPrompt]:
        return passkey_prompts(tokenizer, text, **given)

    return _from_texts(part, seed, ask)


def question_passages(prompts: Sequence[RetrievalPrompt], gamma: int) -> list[Passage]:
    """Questions with their answers as sequences, with a window where the answer begins."""
    passages = []
    for number, prompt in enumerate(prompts):
        # Past the answer the model's own words do not matter: its last token fills the window.
        tokens = prompt.tokens + prompt.answer + prompt.answer[-1:] * (gamma + 2)
        window = Window(len(prompt.tokens), tuple(prompt.span))
        passages.append(Passage(f"prompt-{number:03}", tokens, [window]))
    return passages


def _from_texts(part: Prompts, seed: int, ask: Callable[..., list[T]]) -> list[T]:
    """Prompts over each text of a part in turn; `ask` makes them from a text and its number."""
    each, rest = divmod(part.count, len(part.texts))
    found: list[T] = []
    for number, name in enumerate(part.texts):
        if not (count := each + (number < rest)):
            continue
        try:
            found += ask(
                read_text(name), number, length=part.length, count=count, seed=seed * 1009 + number
            )
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    return found

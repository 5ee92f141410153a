"""Texts as training sequences of one length, in an order that a seed decides."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dustin_trt.evaluation.passkey import passkey_prompts


@dataclass(frozen=True)
class Corpus:
    """Sequences to train on.

    sequences : Tensor `[S, context]` int64
    """

    sequences: Tensor

    def __len__(self) -> int:
        return len(self.sequences)

    def order(self, seed: int, epoch: int) -> list[int]:
        """The numbers of all sequences, shuffled by seed and epoch alone."""
        numbers = list(range(len(self)))
        random.Random(f"{seed} {epoch}").shuffle(numbers)
        return numbers


def make_corpus(
    tokenizer: Any, texts: Iterable[str], *, context: int, retrieval_share: float, seed: int
) -> Corpus:
    """Cut texts into sequences and mix retrieval prompts among them.

    Parameters
    ----------
    tokenizer : the target's
    texts : each is cut for itself; its last, shorter piece is dropped
    context : tokens a sequence
    retrieval_share : share of sequences that are pass-key prompts over the same texts, answer
        included, so that the draft learns to look far back; needs a chat template
    seed : decides keys and depths

    Raises
    ------
    ValueError
        When the texts together do not fill one sequence, or a share needs a missing chat template,
        longer sequences or longer texts.
    """
    pieces: list[list[int]] = []
    texts = list(texts)
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        ends = range(context, len(tokens) + 1, context)
        pieces += [tokens[end - context : end] for end in ends]
    if not pieces:
        raise ValueError(
            f"the texts do not fill one sequence of {context} tokens: give longer texts, or a "
            "smaller --context"
        )
    count = round(len(pieces) * retrieval_share / (1 - retrieval_share))
    if count:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("retrieval prompts need a chat template: set --retrieval-share 0")
        pieces += _retrieval(tokenizer, texts, context=context, count=count, seed=seed)
    return Corpus(torch.tensor(pieces))


def _retrieval(
    tokenizer: Any, texts: Sequence[str], *, context: int, count: int, seed: int
) -> list[list[int]]:
    """`count` prompts of `context` tokens with their answers, spread over the texts."""
    pieces: list[list[int]] = []
    room = context - len(_answer(tokenizer, "00000"))
    for number, text in enumerate(texts):
        left = count - len(pieces)
        share = -(-left // (len(texts) - number))  # what a short text cannot give, the others do
        if not share:
            break
        try:
            prompts = passkey_prompts(
                tokenizer, text, length=room, count=share, seed=seed * 1009 + number
            )
        except ValueError:  # shorter than one prompt
            continue
        pieces += [p.tokens + _answer(tokenizer, p.key) for p in prompts]
    if any(len(piece) != context for piece in pieces):
        raise ValueError(
            f"a retrieval prompt does not fit into {context} tokens: give a larger --context, or "
            "--retrieval-share 0"
        )
    if not pieces:
        raise ValueError(
            f"no text is long enough to hide a pass key in {context} tokens of it: give longer "
            "texts, or --retrieval-share 0"
        )
    return pieces


def _answer(tokenizer: Any, key: str) -> list[int]:
    tokens: list[int] = tokenizer(f" {key}.", add_special_tokens=False).input_ids
    return tokens


def frequent_tokens(corpus: Corpus, size: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """The `size` most frequent tokens of a corpus, ascending; `always` are among them.

    Ties and tokens that never occur go by their id: byte-pair vocabularies list what was merged
    first, so what is frequent anywhere, at the front.

    Returns
    -------
    Tensor `[min(size, vocab_size)]` int64
    """
    counts = Counter(corpus.sequences.flatten().tolist())
    kept = dict.fromkeys(token for token in always if token < vocab_size)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    for token in ranked:
        if len(kept) >= size:
            break
        kept[token] = None
    return torch.tensor(sorted(kept))

"""A real byte-level BPE tokenizer of 300 tokens, and checkpoint folders that carry it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import tiny

SPECIAL = ("<|endoftext|>", "<|pad|>")
# Merges are written out, not trained, so that ids never depend on the tokenizers release.
_MERGES = (
    "Ġ t", "h e", "Ġt he", "i n", "Ġ a", "e r", "o n", "r e", "Ġ s", "a t", "n d", "Ġa nd",
    "Ġ o", "Ġo f", "i s", "o r", "e n", "Ġ w", "i t", "in g", "e s", "Ġ b", "a n", "Ġ h",
    "o u", "l l", "Ġ c", "Ġ m", "a r", "Ġ f", "e d", "v e", "Ġ p", "a l", "s t", "o m",
    "Ġ d", "i c", "Ġt o", "Ġb e", "e l", "r o",
)  # fmt: skip


def make(merges: tuple[str, ...] = _MERGES) -> PreTrainedTokenizerFast:
    """Two special tokens (0 ends a text, 1 pads), 256 bytes, one token a merge.

    Other `merges` give a tokenizer that does not fit the models of this one.
    """
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [merge.replace(" ", "") for merge in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[1],
        clean_up_tokenization_spaces=False,
    )


VOCAB = len(SPECIAL) + 256 + len(_MERGES)


def model(family: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """`tiny.make` with logits for this tokenizer."""
    return tiny.make(family, seed, **{"vocab_size": VOCAB, "pad_token_id": 1, **changes})


def save(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: object,
) -> Path:
    """A checkpoint folder of `model(...)` with the tokenizer in it."""
    model(family, seed, **changes).save_pretrained(folder)
    (tokenizer or make()).save_pretrained(folder)
    return folder

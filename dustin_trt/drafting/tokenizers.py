"""Whether a draft speaks the target's language."""

from __future__ import annotations

from typing import Any

_PROBE = "The 7 semantic heads (naïve, 日本語) read:\n\tx_{i+1} = 3.14 * don't\n"


class TokenizerMismatchError(ValueError):
    """Draft and target give different tokens to the same text, or texts to the same token."""


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Compare two transformers tokenizers for what speculative decoding needs of them.

    Ids must mean the same pieces, and a text must be cut the same way. The sizes of padded
    vocabularies may differ (Qwen2.5 has 151936 and 152064 logits for the same tokens).

    Raises
    ------
    TokenizerMismatchError
        Names the first difference.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            raise TokenizerMismatchError(
                f"the draft's tokenizer differs from the target's: {token!r} is "
                f"{_id(ours.get(token))} in the target and {_id(theirs.get(token))} in the draft; "
                "use a draft of the same family"
            )
    if target(_PROBE).input_ids != draft(_PROBE).input_ids:
        raise TokenizerMismatchError(
            "the draft's tokenizer has the target's tokens but cuts text differently; "
            "use a draft of the same family"
        )


def _id(value: int | None) -> str:
    return "missing" if value is None else f"id {value}"

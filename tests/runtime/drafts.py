"""What the tests of the loop run over: drafters, policies, and a model that writes plain text."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from dustin_trt import LLM
from tests import tokenizer as text
from tests.tiny import make

DRAFTS = ("none", "lookup", "skip:1", "good", "bad", "windowed")


def good_draft(family: str = "llama", **changes: object) -> PreTrainedModel:
    """The target with a little noise: accepted often, not always."""
    model = make(family, **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.06 * parameter.std() * noise
    return model


def llm(draft: str, family: str = "llama", **options: object) -> LLM:
    """An LLM on the tiny target; "same" drafts with the target's weights, others as in `DRAFTS`."""
    if draft == "windowed":
        options = {"draft_window": 12, **options}
    drafts = {
        "good": good_draft, "windowed": good_draft, "bad": lambda f: make(f, seed=1), "same": make
    }  # fmt: skip
    model = drafts[draft](family) if draft in drafts else draft
    return LLM(make(family), model, **{"prefill_chunk": 32, **options})


def sparse_policies(draft: str) -> list[dict[str, object]]:
    """Options of every policy, signal and join that the draft allows, at a small budget."""
    small = {"budget": 26}
    policies = [{"policy": "dense"}, {"policy": "streaming"}, {"policy": "oracle"}]
    policies.append({"policy": "dustin", "signal": "history"})
    if draft not in ("none", "lookup"):
        policies.append({"policy": "dustin", "signal": "lookahead"})
        policies += [{"policy": "dustin", "join": join} for join in ("split", "sum")]
    return [{**policy, **small} for policy in policies]


def writer(seed: int = 0) -> PreTrainedModel:
    """A random model that writes printable ASCII of the tests' tokenizer."""
    model, words = text.model(seed=seed), text.make()
    for token in range(text.VOCAB):
        if not words.decode([token]).isprintable() or not words.decode([token]).isascii():
            model.lm_head.weight.data[token] = 0
    for token in (0, 1):  # the special ones
        model.lm_head.weight.data[token] = 0
    return model


def writing_llm(draft: str | PreTrainedModel = "none", **options: object) -> LLM:
    """An LLM of `writer`; the draft "same" has every token accepted."""
    words = text.make()
    model = writer() if isinstance(draft, str) and draft == "same" else draft
    defaults = {"tokenizer": words, "draft_tokenizer": words, "policy": "dense"}
    return LLM(writer(), model, **{**defaults, **options})

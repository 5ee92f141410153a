"""Models whose retrieval heads are known, because their weights were set by hand."""

from __future__ import annotations

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dustin_trt.calibration.pair import Pair
from dustin_trt.config import Head
from dustin_trt.drafting import DraftModel
from dustin_trt.engines.torch_engine import TorchEngine
from dustin_trt.evaluation.retrieval import RetrievalPrompt
from dustin_trt.kv_cache import PagedKVCache
from dustin_trt.models.causal_lm import CausalLM

VOCAB = 200
FIRST, SECOND = range(160, 180), range(180, 200)  # tokens that only stand where an answer is
COMMON = range(100, 120)  # tokens that decoys look at, all over the text

_D = 16
# What a head looks at: an embedding dimension that marks it, and the rotary pair its keys are in.
# The last pairs turn so slowly that positions do not matter.
_SIGHTS = {FIRST: (61, 7), SECOND: (62, 6), COMMON: (63, 5)}


def planted(looks: dict[Head, range], *, layers: int = 4, seed: int = 0) -> LlamaForCausalLM:
    """A decoder of 4 query and 2 KV heads a layer; each of `looks` looks at its tokens only.

    Every other head looks at everything alike. A KV head serves two query heads: its keys mark each
    kind of token in a rotary pair of its own, and a query reads one of them or none.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=_D, max_position_embeddings=2048,
        attention_bias=True, rope_theta=1e8, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.normal_(std=0.5)
        for tokens, (mark, _) in _SIGHTS.items():
            embedding[:, mark] = 0
            embedding[list(tokens), mark] = 4
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj):
                projection.weight.zero_()
                projection.bias.zero_()
            for kv_head in range(2):
                for mark, place in _SIGHTS.values():
                    attention.k_proj.weight[kv_head * _D + place, mark] = 4
            for head in range(4):
                if (tokens := looks.get(Head(number, head))) is not None:
                    attention.q_proj.bias[head * _D + _SIGHTS[tokens][1]] = 4
    return model


def pair(target: LlamaForCausalLM, draft: LlamaForCausalLM, length: int = 1024) -> Pair:
    """Both models with caches of one slot."""

    def engine(model: LlamaForCausalLM, every_head: bool) -> TorchEngine:
        wrapped = CausalLM(model)
        spec = wrapped.spec
        cache = PagedKVCache(
            num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
            num_slots=1, capacity=length, dtype=wrapped.dtype,
        )  # fmt: skip
        return TorchEngine(wrapped, cache, spec.all_heads() if every_head else ())

    drafter = DraftModel(engine(draft, True), VOCAB, lookahead=True)
    return Pair(engine(target, False), drafter, None)


def text(length: int, seed: int) -> list[int]:
    """Random tokens, one in ten of them common, none of them an answer."""
    chance = random.Random(seed)
    return [
        chance.choice(COMMON) if chance.random() < 0.1 else chance.randrange(1, 100)
        for _ in range(length)
    ]


def prompt(length: int, seed: int) -> RetrievalPrompt:
    """A text with two answer tokens of each kind in it, and those as its answer."""
    chance = random.Random(seed)
    tokens = text(length, seed)
    at = chance.randrange(80, length - 40)
    answer = [*chance.sample(FIRST, 2), *chance.sample(SECOND, 2)]
    tokens[at : at + 4] = answer
    return RetrievalPrompt(tokens, answer, list(range(at, at + 4)))

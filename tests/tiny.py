"""Tiny random models of the real transformers classes, and what `generate` says of them."""

from __future__ import annotations

from functools import cache

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 199

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large weights keep random logits apart: near ties would let rounding choose the token.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WIDE_GROUPS = {"hidden_size": 112, "num_attention_heads": 28, "num_key_value_heads": 4}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied-bias": (
        LlamaForCausalLM,
        LlamaConfig,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-yarn": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 256,
                "rope_theta": 10000.0,
            }
        },
    ),
    "qwen2-28/4": (Qwen2ForCausalLM, Qwen2Config, {**_WIDE_GROUPS, "use_sliding_window": False}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3-head_dim": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
}


def make(family: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model; the same arguments give the same weights."""
    model_class, config_class, extra = FAMILIES[family]
    config = config_class(**{**_BASE, **extra, **changes})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers starts biases at 0, which would hide a lost one
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def ids(*prompts: list[int]) -> list[dict]:
    """Prompts in the form `LLM.generate` takes."""
    return [{"prompt_token_ids": tokens} for tokens in prompts]


@cache
def expected(
    family: str, lengths: tuple[int, ...], new_tokens: int, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """transformers' own greedy continuation of `prompt(length)` for each length, one by one."""
    model = make(family, seed)
    return tuple(
        tuple(
            model.generate(
                torch.tensor([prompt(n)]),
                attention_mask=torch.ones(1, n, dtype=torch.long),
                max_new_tokens=new_tokens,
                do_sample=False,
            )[0][n:].tolist()
        )
        for n in lengths
    )

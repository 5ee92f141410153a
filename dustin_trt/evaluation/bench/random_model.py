"""Models of a named shape with random weights, and a coin in place of acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dustin_trt import sampling
from dustin_trt.evaluation.bench.caches import RandomValues
from dustin_trt.evaluation.bench.shapes import Shape
from dustin_trt.kv_cache import PagedKVCache

_CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
_SCALE = 0.02  # as models are initialised


def random_model(shape: Shape, dtype: torch.dtype, positions: int) -> PreTrainedModel:
    """A model of this shape with random weights, filled in seconds.

    Parameters
    ----------
    shape, dtype : what to make
    positions : tokens it must have positions for, if that is more than the shape's own
    """
    config_class, model_class = _CLASSES[shape.architecture]
    config = config_class(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(shape.max_positions, positions),
        rope_theta=shape.rope_theta,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):  # transformers would draw every weight, which takes minutes
        model: Any = model_class(config)
    model.to(dtype).to_empty(device="cpu")
    model.tie_weights()
    values = RandomValues(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1)
        elif name.endswith("bias"):
            parameter.data.zero_()
        else:
            values.fill(parameter.data, _SCALE)
    # What is no parameter was lost on the way: the frequencies of the rotary embedding.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model


def fill_history(cache: PagedKVCache, prompts: list[list[int]]) -> None:
    """Random keys and values for every prompt, as if a prefill had written them.

    What a step costs does not depend on what the cache holds, and a prefill of random weights
    tells nothing.
    """
    values = RandomValues(cache.k[0].dtype)
    for tensor in (*cache.k, *cache.v):
        values.fill(tensor)
    for slot, prompt in enumerate(prompts):
        cache.resident[slot] = list(prompt)
        cache.lengths[slot] = len(prompt)


@dataclass(frozen=True)
class CoinAcceptance:
    """`sampling.accept` whose verdict is a coin's: random weights never agree.

    All of its work is done; only which drafts count as accepted is decided otherwise. Each draft
    after accepted ones is accepted with probability `rate`, so that a step of Γ drafts accepts
    `rate + rate² + … + rate^Γ` on average. The coins are the requests' own random numbers: with
    the same seeds every method meets the same luck.
    """

    rate: float

    def __call__(
        self,
        logits: Tensor,
        drafts: Tensor,
        counts: Tensor,
        draft_probs: Tensor | None,
        uniforms: Tensor,
        sampling_batch: sampling.SamplingBatch,
    ) -> tuple[Tensor, Tensor]:
        """See `sampling.accept`."""
        sampling.accept(logits, drafts, counts, draft_probs, uniforms, sampling_batch)
        width = drafts.shape[1]
        heads = uniforms[:, :width] < self.rate
        heads &= torch.arange(width, device=drafts.device) < counts[:, None]
        accepted = heads.long().cumprod(1).sum(1)
        rows = torch.arange(len(drafts), device=drafts.device)
        return accepted, logits[rows, accepted].argmax(-1)

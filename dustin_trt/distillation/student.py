"""The student: some of the target's layers between the target's own embeddings and output rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


class Student(nn.Module):
    """Layers and final norm to train; embeddings and output rows stay the target's.

    Parameters
    ----------
    target : Hugging Face decoder whose weights are still in place
    layers : which of its layers the student starts from, in order
    output_tokens : Tensor `[Vd]` int64, tokens the student can propose, ascending

    Attributes
    ----------
    inner : the decoder without its output head, fp32
    head : Tensor `[Vd, hidden]`, the target's output rows of `output_tokens`
    """

    def __init__(
        self, target: PreTrainedModel, layers: Sequence[int], output_tokens: Tensor
    ) -> None:
        super().__init__()
        self.config = cut_config(target.config, layers)
        self.config.architectures = [type(target).__name__]
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        inner, theirs = model.model, target.model
        for mine, number in zip(inner.layers, layers, strict=True):
            mine.load_state_dict(theirs.layers[number].state_dict())
        inner.norm.load_state_dict(theirs.norm.state_dict())
        inner.embed_tokens = theirs.embed_tokens
        inner.embed_tokens.requires_grad_(False)
        self.inner = inner.to(theirs.embed_tokens.weight.device)
        self.output_tokens = output_tokens
        rows = target.get_output_embeddings().weight.detach()
        self.head = rows[output_tokens.to(rows.device)].contiguous()

    def forward(self, tokens: Tensor) -> Tensor:
        """Final hidden states `[B, T, hidden]`, normed, of `tokens [B, T]`."""
        hidden: Tensor = self.inner(tokens, use_cache=False).last_hidden_state
        return hidden

    def trained(self) -> dict[str, Tensor]:
        """What training changes: the layers and the final norm, by name."""
        return {
            name: value
            for name, value in self.inner.state_dict().items()
            if not name.startswith("embed_tokens.")
        }

    def load_trained(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `trained` gave."""
        missing, unexpected = self.inner.load_state_dict(tensors, strict=False)
        assert missing == ["embed_tokens.weight"] and not unexpected


def cut_config(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The target's configuration with fewer layers.

    Raises
    ------
    ValueError
        A layer the target does not have, or none.
    """
    count = config.num_hidden_layers
    if unknown := sorted(set(layers) - set(range(count))):
        raise ValueError(f"the target has no layers {unknown}; it has 0–{count - 1}")
    if not layers:
        raise ValueError("a student needs at least one layer")
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(layers)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[number] for number in layers]
    return config

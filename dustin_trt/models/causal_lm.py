"""A supported decoder behind one call: tokens and positions in, logits out."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dustin_trt.config import ModelSpec
from dustin_trt.models.decoder_layers import AttentionStep, DecoderLayers, Watch

SHARED_DRAFT = "dustin_draft"
"""What marks the config.json of a draft that shares its target's embeddings (`shared_draft`)."""

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class UnsupportedModelError(ValueError):
    """A model whose attention is not plain causal softmax attention, or not known to be."""


def check_supported(config: PretrainedConfig, architecture: str) -> None:
    """Refuse by name what our attention would compute wrongly.

    Raises
    ------
    UnsupportedModelError
        Unknown class, sliding-window layers, soft-capped scores, another activation than SiLU,
        rotary embeddings that depend on the longest sequence of a batch.
    """
    if architecture not in SUPPORTED:
        raise UnsupportedModelError(
            f"{architecture} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    sliding = [kind for kind in getattr(config, "layer_types", None) or () if "sliding" in kind]
    windowed = getattr(config, "sliding_window", None) is not None
    if sliding or (windowed and getattr(config, "use_sliding_window", True)):
        raise UnsupportedModelError(
            f"{architecture} with sliding-window attention (sliding_window="
            f"{getattr(config, 'sliding_window', None)}) is not supported: its layers may not read "
            "the whole history. If the checkpoint was trained with full attention, set "
            "sliding_window to null in its config.json"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            raise UnsupportedModelError(f"{architecture} with {name} is not supported")
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(
            f"{architecture} with hidden_act {activation!r} is not supported, only 'silu'"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if part not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"{architecture} with partial_rotary_factor {part} is not supported: every "
            "dimension of a head must be rotated"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModelError(
            f"{architecture} with {kind} rotary scaling is not supported: positions would depend "
            "on the longest sequence of the batch; use yarn, linear, llama3 or none"
        )


def spec_of(config: PretrainedConfig, architecture: str) -> ModelSpec:
    """The shape of a model of this configuration."""
    head_dim = getattr(config, "head_dim", None)
    return ModelSpec(
        architecture=architecture,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
    )


class CausalLM:
    """A Hugging Face decoder that runs our attention.

    Parameters
    ----------
    model : a model of one of the `SUPPORTED` classes. It is put into evaluation mode, and its
        weights are taken over: its own forward pass may not work afterwards.
    output_tokens : Tensor `[Vd]` int64, the tokens that the rows of its head stand for, where they
        are not the whole vocabulary; every other token then has logit -inf

    Attributes
    ----------
    spec : ModelSpec
    """

    def __init__(self, model: PreTrainedModel, output_tokens: Tensor | None = None) -> None:
        config = model.config
        check_supported(config, type(model).__name__)
        self.model = model.eval()
        self.spec = spec_of(config, type(model).__name__)
        self.layers = tuple(range(self.spec.num_layers))
        self.output_tokens = output_tokens
        self._decoder = DecoderLayers.of(model)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights, and so of the cache."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def pass_weights(self) -> int:
        """Weights that a pass multiplies by: those of the layers, and the output rows."""
        layers: Any = self.model.model.layers
        inner = sum(p.numel() for number in self.layers for p in layers[number].parameters())
        tokens = self.output_tokens
        rows = self.spec.vocab_size if tokens is None else len(tokens)
        return int(inner + self.spec.hidden_size * rows)

    def output_rows(self, tokens: Tensor | None) -> Tensor:
        """Rows `[Vd, hidden]` of the output head for `tokens [Vd]`, or the whole of it for None."""
        head = self._decoder.head_weight()
        return head if tokens is None else head[tokens].contiguous()

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        step: AttentionStep,
        *,
        last_only: bool = False,
        watch: Watch | None = None,
    ) -> Tensor:
        """Run the decoder.

        Parameters
        ----------
        tokens, positions : Tensor `[B, w]` int64
        step : receives every layer's queries, keys and values
        last_only : compute the logits of the last token only
        watch : called with "embedding" or "layer 3" and what left it, `[B, w, hidden]`

        Returns
        -------
        Tensor `[B, w or 1, V]` fp32
        """
        logits = self._decoder.forward(
            tokens, positions, step, self.layers, last_only=last_only, watch=watch
        ).float()
        if self.output_tokens is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.spec.vocab_size), float("-inf"))
        return whole.index_copy_(-1, self.output_tokens, logits)

    def without_layers(self, skipped: Iterable[int]) -> CausalLM:
        """The same weights without some layers: a self-draft that can share the cache.

        Layer numbers stay those of the whole model (LayerSkip, arXiv 2404.16710; Draft & Verify,
        arXiv 2309.08168).

        Raises
        ------
        ValueError
            A layer that does not exist, or no layer left.
        """
        skipped = set(skipped)
        if unknown := sorted(skipped - set(self.layers)):
            raise ValueError(
                f"cannot skip layers {unknown}: the model has layers 0–{self.spec.num_layers - 1}"
            )
        kept = [layer for layer in self.layers if layer not in skipped]
        if not kept:
            raise ValueError("cannot skip every layer of the model")
        draft = copy.copy(self)
        draft.layers = tuple(kept)
        return draft

    def first_non_finite(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep
    ) -> str | None:
        """Where a pass first produces NaN or infinity: "embedding", "layer 3", "output" or None."""
        found: list[str] = []

        def watch(place: str, hidden: Tensor) -> None:
            if not found and not torch.isfinite(hidden).all():
                found.append(place)

        watch("output", self.forward(tokens, positions, step, last_only=True, watch=watch))
        return found[0] if found else None


# Said outright: without it, transformers asks on the terminal and then runs a checkpoint's code.
_OWN_CODE_ONLY = {"local_files_only": True, "trust_remote_code": False}


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
) -> CausalLM:
    """Load a checkpoint folder of Hugging Face's format; never runs code that comes with it.

    Raises
    ------
    FileNotFoundError
        No checkpoint there.
    UnsupportedModelError
        See `check_supported`; found before any weight is read.
    ValueError
        Damaged weights.
    """
    return CausalLM(load_checkpoint(path, dtype=dtype, device=device))


def load_checkpoint(
    path: str | Path, *, dtype: torch.dtype | str, device: torch.device | str
) -> PreTrainedModel:
    """The same as transformers' own model, which can be trained with."""
    config = read_config(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, **_OWN_CODE_ONLY
        )
    except SafetensorError as error:
        raise ValueError(f"the weights in {path} are damaged: {error}; fetch them again") from error
    loaded: PreTrainedModel = model.to(device)  # type: ignore[arg-type]  # hidden by its wrapper
    return loaded


def read_config(path: str | Path) -> PretrainedConfig:
    """The configuration of a checkpoint that can be run by itself; raises what `load` does."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no model folder {path}")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is no model folder: it has no config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, **_OWN_CODE_ONLY)
    except ValueError as error:
        first = str(error).partition("\n")[0]
        raise UnsupportedModelError(
            f"{path} is not supported: {first} Code that comes with a checkpoint is never run; "
            f"supported are {', '.join(SUPPORTED)}"
        ) from error
    check_supported(config, (config.architectures or [type(config).__name__])[0])
    if hasattr(config, SHARED_DRAFT):
        raise UnsupportedModelError(
            f"{path} is a draft that shares its target's embeddings and cannot run alone: give it "
            "as draft (--draft), beside that target"
        )
    return config

"""The forward pass of Llama-like decoders in few, large calls.

At one to five tokens a row, transformers' own forward pass spends as long in small operations and
Python as in matrix products. This one computes the same from the same modules: projections that
read the same input are one product, residuals are added inside products where oneDNN does that,
and attention is ours. Figures: docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dustin_trt.models._glue import rms_norm, rotate_, silu_mul

Watch = Callable[[str, Tensor], None]
"""Called with a place in a model and the hidden states that left it."""


class AttentionStep(Protocol):
    """One forward pass as a layer's attention sees it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Cache the new `k`, `v` `[B, w, Hkv, D]` and attend with `q` `[B, w, Hq, D]`.

        Returns
        -------
        Tensor `[B, w, Hq, D]`
        """
        ...


class Linear:
    """Linear modules of one input as a single product; takes their weights over.

    In bfloat16 on a CPU the weight is kept in oneDNN's own layout, which otherwise is made anew in
    every call, and the modules' weights become shapes without memory. Otherwise they become views
    of the joint weight.

    Parameters
    ----------
    modules : `nn.Linear` of equal input size; a bias on some means zeros on the others
    keep : leave the first module's weight where it is (an embedding shares it)
    """

    def __init__(self, *modules: nn.Linear, keep: bool = False) -> None:
        weights = [m.weight.detach() for m in modules]
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias: Tensor | None = None
        if any(m.bias is not None for m in modules):
            self.bias = torch.cat(
                [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach()
                 for m in modules]
            )  # fmt: skip
        self.packed = _packs(self.weight)
        first = 0
        for module in modules:
            rows = slice(first, first := first + module.out_features)
            if not self.packed:
                module.weight = nn.Parameter(self.weight[rows], requires_grad=False)
            elif not keep:
                shape = torch.empty_like(module.weight, device="meta")
                module.weight = nn.Parameter(shape, requires_grad=False)
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias (+ residual)`."""
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else residual + y
        if residual is None:
            return _linear(x, self.weight, self.bias, "none", [], "")
        return _linear_and(x, residual, self.weight, self.bias, "add")


_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_and = torch.ops.mkldnn._linear_pointwise.binary


def _packs(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class _Norm:
    """Root mean square normalisation of the last dimension."""

    def __init__(self, module: Any) -> None:
        self.weight = module.weight.detach()
        self.eps = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class _Layer:
    """A decoder layer; see `DecoderLayers`."""

    number: int
    before_attention: _Norm
    qkv: Linear
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: Linear
    before_mlp: _Norm
    gate_up: Linear
    down: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @classmethod
    def of(cls, number: int, module: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return cls(
            number=number,
            before_attention=_Norm(module.input_layernorm),
            qkv=Linear(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=norms[0] and _Norm(norms[0]),
            k_norm=norms[1] and _Norm(norms[1]),
            out=Linear(attention.o_proj),
            before_mlp=_Norm(module.post_attention_layernorm),
            gate_up=Linear(mlp.gate_proj, mlp.up_proj),
            down=Linear(mlp.down_proj),
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            scale=attention.scaling,
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep) -> Tensor:
        """`x [B, w, hidden]`; `cos`, `sin` `[B, w, D]`."""
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.head_dim))
        rotated = heads[:, :, : self.heads + self.kv_heads]
        if self.q_norm and self.k_norm:
            q, k = rotated.split((self.heads, self.kv_heads), 2)
            rotated = torch.cat((self.q_norm(q), self.k_norm(k)), 2)
        rotate_(rotated, cos, sin)
        q, k = rotated[:, :, : self.heads], rotated[:, :, self.heads :]
        v = heads[:, :, self.heads + self.kv_heads :]
        x = self.out(step.attend(self.number, q, k, v, self.scale).flatten(2), x)
        return self.down(silu_mul(self.gate_up(self.before_mlp(x))), x)


class DecoderLayers:
    """A whole decoder: tokens and positions in, logits out.

    Parameters
    ----------
    model : a Hugging Face decoder of a supported class; its linear weights are taken over (see
        `Linear`), so that its own forward pass may not work afterwards
    """

    def __init__(self, model: PreTrainedModel) -> None:
        inner: Any = model.model
        self._embedding = inner.embed_tokens
        self._rotary = inner.rotary_emb
        self._layers = [_Layer.of(i, layer) for i, layer in enumerate(inner.layers)]
        self._norm = _Norm(inner.norm)
        head: Any = model.lm_head
        self._shared = head.weight is inner.embed_tokens.weight
        self._head = Linear(head, keep=self._shared)

    @classmethod
    def of(cls, model: PreTrainedModel) -> DecoderLayers:
        """The one decoder of a model, made at the first call: its weights are taken over once."""
        if not hasattr(model, _ATTRIBUTE):
            object.__setattr__(model, _ATTRIBUTE, cls(model))
        decoder: DecoderLayers = getattr(model, _ATTRIBUTE)
        return decoder

    def head_weight(self) -> Tensor:
        """The output head's rows `[V, hidden]`, a copy where it is kept in oneDNN's layout."""
        if self._shared:
            return self._embedding.weight.detach()
        return self._head.weight.to_dense() if self._head.packed else self._head.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        step: AttentionStep,
        layers: tuple[int, ...],
        *,
        last_only: bool = False,
        watch: Watch | None = None,
    ) -> Tensor:
        """Run some of the layers.

        Parameters
        ----------
        tokens, positions : Tensor `[B, w]` int64
        step : receives every layer's queries, keys and values
        layers : which layers, in order
        last_only : compute the logits of the last token only
        watch : called with "embedding" or "layer 3" and what left it, `[B, w, hidden]`

        Returns
        -------
        Tensor `[B, w or 1, V]` in the model's dtype
        """
        x = self._embedding(tokens)
        if watch:
            watch("embedding", x)
        cos, sin = (t.contiguous() for t in self._rotary(x, positions))
        for layer in layers:
            x = self._layers[layer](x, cos, sin, step)
            if watch:
                watch(f"layer {layer}", x)
        return self._head(self._norm(x[:, -1:] if last_only else x))


_ATTRIBUTE = "_dustin_decoder_layers"

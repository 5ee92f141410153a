"""Our attention in transformers' registry: the model calls it, the engine decides what it does."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "dustin"


class AttentionStep(Protocol):
    """One forward pass as a layer's attention sees it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Cache the new `k`, `v` `[B, w, Hkv, D]` and attend with `q` `[B, w, Hq, D]`.

        Returns
        -------
        Tensor `[B, w, Hq, D]`
        """
        ...


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    step: AttentionStep,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return step.attend(int(module.layer_idx), q, k, v, scaling), None  # type: ignore[arg-type]


# No mask function is registered under this name, which makes every model skip building a mask;
# the forward pass is given `use_cache=False`, so no transformers cache is involved either.
AttentionInterface.register(NAME, _attention)

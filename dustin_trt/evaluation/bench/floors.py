"""The least a step must read, and so the least time the memory's bandwidth allows it."""

from __future__ import annotations

from typing import Any

from dustin_trt.config import ModelSpec
from dustin_trt.drafting import DraftModel
from dustin_trt.engines.base import Engine, Window
from dustin_trt.engines.torch_engine import TorchEngine
from dustin_trt.models.causal_lm import CausalLM
from dustin_trt.runtime.llm import LLM


def step_bytes(llm: LLM, *, rows: int, history: float, read: float) -> dict[str, float]:
    """Bytes by part that one step of this way to decode must read.

    Weights once a forward pass, keys and values once a forward pass, scored keys once, scores and
    logits once. Activations and what is written are left out, so this is a lower bound.

    Parameters
    ----------
    llm : a way to decode
    rows : B
    history, read : history tokens of a row, and those of them that verification reads; means
    """
    decoder = llm.decoder
    target, drafter = _torch(decoder.target), decoder.drafter
    size = llm.dtype.itemsize
    per_token = _kv_elements(target.spec) * size
    parts = dict.fromkeys(("draft", "score", "select", "verify", "accept"), 0.0)
    parts["verify"] = _weight_bytes(target.model) + rows * read * per_token
    w = 1
    if isinstance(drafter, DraftModel):
        w += decoder.gamma
        reading = drafter.reading
        window = min(reading.size, history) if isinstance(reading, Window) else history
        model = _torch(drafter.engine).model
        cached = len(model.layers) / model.spec.num_layers * _kv_elements(model.spec) * size
        parts["draft"] = decoder.gamma * (_weight_bytes(model) + rows * window * cached)
    parts["score"] = llm.scoring_share * per_token * rows * history
    policy = decoder.policy
    parts["select"] = 4 * rows * history * (policy.needs_history + policy.needs_lookahead)
    parts["accept"] = 4 * rows * w * target.spec.vocab_size
    return parts


def _torch(engine: Engine) -> TorchEngine:
    assert isinstance(engine, TorchEngine)  # the only backend there is
    return engine


def _kv_elements(spec: ModelSpec) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim


def _weight_bytes(model: CausalLM) -> int:
    """Bytes of the weights that a forward pass reads: its layers and the output matrix.

    Of the embedding it reads a few rows. A module whose weights were packed still has their shapes.
    """
    inner: Any = model.model.model
    modules = [*(inner.layers[i] for i in model.layers), inner.norm, model.model.lm_head]
    parameters = (p for module in modules for p in module.parameters())
    return sum(p.numel() * p.element_size() for p in parameters)

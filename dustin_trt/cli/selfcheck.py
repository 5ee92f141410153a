"""Does this machine compute what it should: the ops on small tensors, the loop on a small model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dustin_trt import LLM, SamplingParams, ops
from dustin_trt.runtime.llm import Prompt

_SLOTS, _HEADS, _KV_HEADS, _DIM, _CAPACITY, _WINDOW = 2, 6, 2, 64, 48, 3


def wrong_ops(device: str) -> list[str]:
    """Names of the ops whose registered version on `device` differs from the CPU reference."""
    return [name for name in ops.__all__ if not _agrees(name, device)]


def generate(device: str) -> None:
    """Decode with a random model through draft, score, select, verify, accept.

    Reading everything, Dustin must give what full verification gives.

    Raises
    ------
    RuntimeError
        It does not.
    """
    torch_state = torch.random.get_rng_state()  # the caller's own
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(device)  # type: ignore[arg-type]
    torch.random.set_rng_state(torch_state)
    llm = LLM(model, draft="skip:0", policy="dustin", budget=32, device=device, max_batch_size=2)
    prompts: list[Prompt] = [{"prompt_token_ids": list(range(1, n))} for n in (50, 60)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = {
        name: [output.token_ids for output in twin.generate(prompts, params)]
        for name, twin in (
            ("sparse", llm),
            ("whole", llm.variant(budget=128)),
            ("dense", llm.variant(policy="dense")),
        )
    }
    if texts["whole"] != texts["dense"] or any(len(tokens) != 12 for tokens in texts["sparse"]):
        raise RuntimeError("reading everything, Dustin differs from full verification")


def _agrees(name: str, device: str) -> bool:
    inputs = _INPUTS[name]()
    # Copies, since some ops write into their inputs.
    there = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in inputs]
    expected = _outputs(_reference(name), inputs)
    found = _outputs(getattr(ops, name), there)
    return all(
        torch.allclose(a.float(), b.cpu().float(), rtol=1e-4, atol=1e-5)
        for a, b in zip(expected, found, strict=True)
    )


def _reference(name: str) -> Callable:
    return importlib.import_module(f"dustin_trt.ops.{name}").reference


def _outputs(op: Callable, inputs: list[Any]) -> list[Tensor]:
    """What an op returns, or its inputs where it writes into them."""
    result = op(*inputs)
    return [x for x in (inputs if result is None else result) if isinstance(x, Tensor)]


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def _cache() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k = _random(_SLOTS, _KV_HEADS, _CAPACITY, _DIM)
    pages = torch.tensor([[1], [0]], dtype=torch.int32)
    return k, k.flip(0).clone(), pages, torch.tensor([40, 21], dtype=torch.int32)


def _scores() -> Tensor:
    return _random(_SLOTS, _CAPACITY).softmax(1)


def _kv_append() -> list[Any]:
    k = _random(_SLOTS, _WINDOW, _KV_HEADS, _DIM)
    return [k, -k, *_cache()]


def _srh_score() -> list[Any]:
    k, _, pages, lengths = _cache()
    queries = _random(_SLOTS, 1, 2, _DIM)
    return [queries, [0, 1], k, pages, lengths, _DIM**-0.5, torch.zeros(_SLOTS, _CAPACITY)]


def _select_tokens() -> list[Any]:
    return [_scores(), _scores().flip(1), _cache()[3], 24, 6, 4, 8]


def _dense_attention() -> list[Any]:
    return [_random(_SLOTS, _WINDOW, _HEADS, _DIM), *_cache(), _DIM**-0.5]


def _sparse_attention() -> list[Any]:
    chosen = _reference("select_tokens")(*_select_tokens())
    return [*_dense_attention()[:-1], *chosen, _DIM**-0.5]


_INPUTS: dict[str, Callable[[], list[Any]]] = {
    "dense_attention": _dense_attention,
    "kv_append": _kv_append,
    "select_tokens": _select_tokens,
    "sparse_attention": _sparse_attention,
    "srh_score": _srh_score,
}

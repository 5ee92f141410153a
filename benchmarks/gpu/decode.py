"""Decoding with random weights through the real loop: vanilla against Dustin, acceptance given."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu import plan as plans

if TYPE_CHECKING:
    from benchmarks.gpu.measure import Setting

_WARM_UP = 4  # steps: graphs are captured in them


def measure(setting: Setting) -> None:
    """Steps of every method in turns; rows hold seconds a step and what it committed.

    The loop, the models and the history's size are real; what the history holds is random, and a
    coin decides which drafts count as accepted (see `evaluation.bench.random_model`).
    """
    try:
        from dustin_trt.evaluation.bench.random_model import random_model
        from dustin_trt.runtime import llm as _  # noqa: F401 — needs packages that ops do not
    except ModuleNotFoundError as error:
        setting.rows.problem(
            "decode",
            f"the decoding loop needs {error.name}, which this Python lacks: pip install it, or "
            "put it into build/gpu-packages",
        )
        return
    decode = setting.plan.decode
    torch.manual_seed(0)
    length = decode.context + (decode.steps + _WARM_UP + 2) * (decode.gamma + 1)
    target, draft = (
        random_model(shape, setting.dtype, length).to(setting.device)
        for shape in (decode.target, decode.draft)
    )
    methods = _methods(setting, decode, target, draft, length)
    coin_rate = rate_for(decode.tau, decode.gamma)
    prompts = _prompts(decode)
    for llm in methods.values():
        _fill(llm, prompts)
    for turn in range(decode.rounds):
        for name in list(methods)[turn % len(methods) :] + list(methods)[: turn % len(methods)]:
            with setting.rows.guarded(name, context=decode.context, batch=decode.batch):
                run = _run(methods[name], prompts, coin_rate, decode)
                setting.rows.add(
                    f"decode, {name}", context=decode.context, batch=decode.batch, round=turn,
                    seconds=run.seconds_a_step, tau=run.tau, steps=run.steps,
                    graphs=_takes_graphs() and not setting.rehearsal,
                    tokens_per_second=decode.batch * run.tau / run.seconds_a_step,
                    target=decode.target.name, draft=decode.draft.name, gamma=decode.gamma,
                    budget=decode.budget, draft_window=decode.draft_window,
                )  # fmt: skip


def rate_for(tau: float, gamma: int) -> float:
    """The coin's rate p with `1 + p + … + p^Γ = τ`, by halving."""
    if not 1 <= tau <= gamma + 1:
        raise ValueError(f"tau {tau} is not in 1–{gamma + 1}, what {gamma} drafts can commit")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(gamma + 1)) < tau:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _takes_graphs() -> bool:
    from dustin_trt.runtime.llm import LLM

    return "cuda_graphs" in inspect.signature(LLM).parameters


def _methods(
    setting: Setting, decode: plans.Decode, target: Any, draft: Any, length: int
) -> dict[str, Any]:
    from dustin_trt.runtime.llm import LLM

    graphs: dict[str, Any] = {}
    if _takes_graphs() and not setting.rehearsal:
        graphs["cuda_graphs"] = True
    config = _config(decode)
    dustin = LLM(
        target, draft, config=config, policy="dustin", budget=decode.budget, gamma=decode.gamma,
        draft_window=decode.draft_window, dtype=setting.dtype, device=setting.device,
        max_batch_size=decode.batch, max_model_len=length, **graphs,
    )  # fmt: skip
    return {"vanilla": dustin.variant(draft="none", policy="dense", config=None), "Dustin": dustin}


def _config(decode: plans.Decode) -> Any:
    """As many heads as the paper's search found, spread over as many KV heads as there are."""
    from benchmarks.model import HISTORY, LOOKAHEAD
    from dustin_trt.config import DustinConfig, Head

    def spread(shape: Any, count: int, heads: int) -> tuple[Head, ...]:
        layers = [(2 * i + 1) * shape.num_layers // (2 * count) for i in range(count)]
        return tuple(Head(layer, head) for layer in layers for head in shape.spread_heads(heads))

    return DustinConfig.make(
        target_heads=spread(decode.target, HISTORY.layers, HISTORY.heads),
        draft_heads=spread(decode.draft, LOOKAHEAD.layers, LOOKAHEAD.heads),
        budget=decode.budget,
        gamma=decode.gamma,
        draft_window=decode.draft_window,
        calibrated=False,
    )


def _prompts(decode: plans.Decode) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(decode.target.vocab_size, decode.draft.vocab_size)
    size = (decode.batch, decode.context)
    return torch.randint(0, vocabulary, size, generator=generator).tolist()


def _fill(llm: Any, prompts: list[list[int]]) -> None:
    """Random keys and values for every prompt, as if a prefill had written them."""
    decoder = llm.decoder
    engines = [decoder.target, getattr(decoder.drafter, "engine", None)]
    for engine in filter(None, engines):
        cache = engine.cache
        if cache.resident[0] == prompts[0]:
            continue  # a variant's cache is the same one
        for tensor in (*cache.k, *cache.v):
            tensor.normal_()
        for slot, prompt in enumerate(prompts):
            cache.resident[slot] = list(prompt)
            cache.lengths[slot] = len(prompt)


@dataclass
class _Run:
    """Times of the steps of one run, taken where the loop decides what is accepted.

    The loop waits for the GPU once in every step, so that the time between two such places is a
    whole step's, whatever still runs at either.
    """

    coin: Any
    at: list[float] = field(default_factory=list)
    committed: list[Tensor] = field(default_factory=list)

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.at.append(time.perf_counter())
        accepted, following = self.coin(*arguments)
        self.committed.append(accepted.clone())
        return accepted, following

    @property
    def steps(self) -> int:
        """Timed ones."""
        return len(self.at) - 1 - _WARM_UP

    @property
    def seconds_a_step(self) -> float:
        """Mean over the timed steps."""
        return (self.at[-1] - self.at[_WARM_UP]) / self.steps

    @property
    def tau(self) -> float:
        """Tokens a row and timed step."""
        timed = self.committed[_WARM_UP:-1]
        return 1 + sum(float(accepted.float().mean()) for accepted in timed) / len(timed)


def _run(llm: Any, prompts: list[list[int]], rate: float, decode: plans.Decode) -> _Run:
    from dustin_trt.evaluation.bench.random_model import CoinAcceptance
    from dustin_trt.runtime.sampling_params import SamplingParams

    wanted = decode.steps + _WARM_UP + 1
    run = _Run(CoinAcceptance(rate))
    llm.decoder.accept = run
    params = [
        SamplingParams(max_tokens=wanted * (decode.gamma + 1) + 1, ignore_eos=True, seed=row)
        for row in range(len(prompts))
    ]
    stream = llm.stream([{"prompt_token_ids": tokens} for tokens in prompts], params)
    for _ in stream:
        if len(run.at) >= wanted:
            break
    stream.close()
    if run.steps < decode.steps:
        raise RuntimeError(f"the loop ended after {len(run.at)} of {wanted} steps")
    return run

"""Engines: built, loaded, compared with the torch engine, then their two passes timed.

A rehearsal does the same with ONNX's evaluator in TensorRT's place.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu import plan as plans
from benchmarks.gpu.rows import TOLERANCE, WrongResultError

if TYPE_CHECKING:
    from benchmarks.gpu.measure import Setting

_NAME = "engine"


def measure(setting: Setting) -> None:
    """The engine of the plan, or why there is none."""
    plan = setting.plan.engine
    sizes = {"context": plan.context, "batch": plan.batch}
    backend, absent = choose(setting.rehearsal)
    if backend is None:
        setting.rows.problem(_NAME, f"skipped: {absent}", expected=True, **sizes)
        return
    with setting.rows.guarded(_NAME, **sizes), tempfile.TemporaryDirectory() as folder:
        _measure(setting, plan, backend, Path(folder))


def choose(rehearsal: bool) -> tuple[str | None, str]:
    """The backend to build for; None, and why, where none is here."""
    if absent := [n for n in ("onnx", "onnx_ir", "ml_dtypes") if not importlib.util.find_spec(n)]:
        return None, f"{absent[0]} is not installed: pip install 'dustin-trt[export]'"
    if rehearsal:
        return "onnx", ""
    from dustin_trt.engines.plugin_library import plugin_library

    if plugin_library() is None:
        return (
            None,
            "the TensorRT plugins were not built: their headers are missing (TENSORRT_ROOT)",
        )
    for module in ("tensorrt", "tensorrt_rtx"):
        if importlib.util.find_spec(module):
            return module.replace("_", "-"), ""
    return None, "TensorRT is not installed"


def _measure(setting: Setting, plan: plans.Engine, backend: str, folder: Path) -> None:
    from dustin_trt.build.build import Options, build_engines
    from dustin_trt.config import DustinConfig, Head
    from dustin_trt.evaluation.bench.random_model import random_model
    from dustin_trt.runtime.llm import LLM

    dtype = torch.float32 if backend == "onnx" else setting.dtype
    # What it reads, it writes, and room for the longest draft.
    longest = plan.context + 32
    model = random_model(plan.shape, torch.float32, longest)
    model.to("cpu", dtype).save_pretrained(folder / "model")
    _tokenizer().save_pretrained(folder / "model")
    middle = plan.shape.num_layers // 2
    config = DustinConfig.make(
        target_heads=tuple(Head(middle, head) for head in plan.shape.spread_heads(2)),
        budget=plan.budget, gamma=plan.w - 1, calibrated=False,
    )  # fmt: skip
    options = Options(
        backend=backend, dtype=str(dtype).removeprefix("torch."), max_batch=plan.batch,
        max_context=plan.context + 16, chunk=plan.chunk, signal="history",
    )  # fmt: skip
    made = build_engines(folder / "model", None, config, folder / "engines", options)
    common: dict[str, Any] = {
        "device": setting.device, "max_batch_size": plan.batch, "draft": None,
    }  # fmt: skip
    if not setting.rehearsal:
        common["cuda_graphs"] = False  # the clock records the passes themselves
    plain = common | {"config": config, "policy": "dustin", "max_model_len": plan.context + 16}
    engine = LLM(engine_dir=folder / "engines", **common).decoder.target
    torch_engine = LLM(folder / "model", dtype=dtype, **plain).decoder.target
    exact = LLM(folder / "model", dtype=torch.float32, **plain).decoder.target

    spy = _Spy(engine.session)
    engine.session = spy
    found, beside, right = (_passes(each, plan, config) for each in (engine, torch_engine, exact))
    for what, expected in right.items():
        # Both round differently on their way; an engine may be as far from fp32 as torch is.
        ours, theirs = (_distance(each[what], expected) for each in (found, beside))
        if not ours <= 2 * theirs + TOLERANCE[dtype]:
            raise WrongResultError(
                f"{what} of the engine is off by {ours:.2e} in the norm, torch's by {theirs:.2e}: "
                "not timed"
            )
    calls = {
        f"{_NAME}, {phase} pass": [lambda p=phase, i=inputs: spy.session.run(p, i)]
        for phase, inputs in spy.seen.items()
    }
    seconds, problems = setting.clock.time(calls, setting.plan.rounds)
    windows = {"context": plan.chunk, "generation": plan.w}
    for name, values in seconds.items():
        w = windows[name.removeprefix(f"{_NAME}, ").removesuffix(" pass")]
        setting.rows.timed(
            name, values, None, context=plan.context, batch=plan.batch, w=w, backend=backend,
            least=min(values), most=max(values), versions=made.versions,
            bytes=sum(file.bytes for step in made.target for file in step.files),
        )  # fmt: skip
    for name, problem in problems.items():
        setting.rows.problem(name, problem, context=plan.context, batch=plan.batch)


class _Spy:
    """A session, and the inputs of its last pass of every phase."""

    def __init__(self, session: Any) -> None:
        self.session, self.device = session, session.device
        self.seen: dict[str, dict[str, Tensor]] = {}

    def run(self, phase: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the session runs it."""
        self.seen[phase] = dict(inputs)
        outputs: dict[str, Tensor] = self.session.run(phase, inputs)
        return outputs


def _passes(engine: Any, plan: plans.Engine, config: Any) -> dict[str, Tensor]:
    """Logits after prefill, and of a window that reads sparsely."""
    from dustin_trt.engines.base import Dustin

    generator = torch.Generator().manual_seed(3)
    size = (plan.batch, plan.context + plan.w)
    tokens = torch.randint(0, plan.shape.vocab_size, size, generator=generator)
    prompts = tokens[:, : plan.context].tolist()
    prefilled = []
    for slot, prompt in enumerate(prompts):
        engine.cache.reserve(slot, plan.context + 16)
        prefilled.append(engine.prefill(slot, prompt, chunk=plan.chunk))
    device = engine.cache.k[0].device
    chosen = Dustin(
        history_queries=torch.stack([each.srh_queries for each in prefilled]),
        lookahead_scores=None, budget=config.budget, lookahead=config.lookahead_tokens,
        sink=config.sink, window=config.window,
    )  # fmt: skip
    slots = torch.arange(plan.batch, device=device)
    window = tokens[:, plan.context :].to(device)
    verified = engine.verify(slots, window, chosen)
    return {
        "prefill": torch.stack([each.logits for each in prefilled]),
        "verification": verified.logits,
    }


def _distance(found: Tensor, right: Tensor) -> float:
    right = right.double()
    return float((found.double() - right).norm() / right.norm())


def _tokenizer() -> Any:
    """A folder needs one; no text is read."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")

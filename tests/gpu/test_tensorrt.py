"""Engines on a GPU: built here by TensorRT, driven by the loop, held to transformers' eager model.

A rehearsal has ONNX's evaluator in TensorRT's place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.device import DEVICE, REHEARSAL, needs_gpu

pytest.importorskip("pydantic", reason="the decoding loop needs pydantic, which is not installed")
pytest.importorskip("onnx_ir", reason="engines need onnx-ir, which is not installed")

from transformers import AutoModelForCausalLM

from benchmarks.gpu.engine import choose
from dustin_trt import LLM, SamplingParams
from tests.build.pair import build, configuration, save_pair
from tests.tiny import ids, prompt

BACKEND, ABSENT = choose(bool(REHEARSAL))
pytestmark = pytest.mark.skipif(BACKEND is None, reason=f"no engines: {ABSENT}")

PROMPTS = ids(*(prompt(n, n) for n in (90, 40, 17, 120)))
PARAMS = SamplingParams(max_tokens=12)
EVERYTHING = 150

halves = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    # A head of the kernels' sizes; weights that float16 can add up.
    folder = tmp_path_factory.mktemp("pair")
    return save_pair(folder, head_dim=64, initializer_range=0.1)


def made(pair, folder, dtype, **changes) -> Path:
    config = configuration(*pair, **changes)
    return build(*pair, folder / "engines", config, backend=BACKEND, dtype=dtype)


def load(folder: Path, **options) -> LLM:
    return LLM(engine_dir=folder, device=DEVICE, **options)


@torch.inference_mode()
def check_against_eager(folder: Path, outputs, dtype: str) -> None:
    """Each token is the one that transformers' eager attention takes, or ties with it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.to(DEVICE).set_attn_implementation("eager")
    for asked, output in zip(PROMPTS, outputs, strict=True):
        given = asked["prompt_token_ids"]
        assert len(output.token_ids) == 12 or output.finish_reason == "stop"
        tokens = torch.tensor([[*given, *output.token_ids]], device=DEVICE)
        logits = model(tokens).logits[0, len(given) - 1 : -1].float()
        taken = logits.gather(1, tokens[0, len(given) :, None])[:, 0]
        near = 2**-5 * logits.abs().amax(1)  # what bf16 rounds off on the way through three layers
        assert bool((taken >= logits.amax(1) - near).all())


def test_smallest_engines_equal_eager_torch(tmp_path, pair):
    dtype = "float32" if REHEARSAL else "bfloat16"
    folder = made(pair, tmp_path, dtype, budget=EVERYTHING)
    check_against_eager(pair[0], load(folder).generate(PROMPTS, PARAMS), dtype)


@needs_gpu
@halves
@pytest.mark.parametrize("policy", ["dense", "dustin"])
def test_engines_equal_eager_torch(tmp_path, pair, dtype, policy):
    folder = made(pair, tmp_path, dtype, budget=EVERYTHING)
    outputs = load(folder, policy=policy).generate(PROMPTS, PARAMS)
    check_against_eager(pair[0], outputs, dtype)


@needs_gpu
@halves
def test_recorded_passes_change_nothing(tmp_path, pair, dtype):
    folder = made(pair, tmp_path, dtype)
    eager = load(folder, cuda_graphs=False).generate(PROMPTS, PARAMS)
    recorded = load(folder, cuda_graphs=True)
    for _ in range(2):  # the second time from graphs that were recorded before
        again = recorded.generate(PROMPTS, PARAMS)
        assert [x.token_ids for x in again] == [x.token_ids for x in eager]
        assert [x.stats.accepted for x in again] == [x.stats.accepted for x in eager]


@needs_gpu
def test_another_plugin_library_is_refused(tmp_path, pair, monkeypatch):
    from dustin_trt.engines.plugin_library import VARIABLE, plugin_library

    folder = made(pair, tmp_path, "float16")
    changed = tmp_path / "plugins.so"
    changed.write_bytes(plugin_library().read_bytes() + b"\0")
    monkeypatch.setenv(VARIABLE, str(changed))
    with pytest.raises(ValueError, match="were built with plugins"):
        load(folder)

"""Decoding with engines of a TensorRT of Python: the tokens of the torch engine, and its errors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnx", reason="graphs are run by onnx's reference evaluator")

from dustin_trt import LLM, SamplingParams
from dustin_trt.build.build import Options, build_engines
from dustin_trt.config import DustinConfig, Head
from dustin_trt.engines.manifest import Manifest
from tests import tokenizer as text
from tests.engines import fake_tensorrt as fake
from tests.runtime.drafts import good_draft
from tests.runtime.tape import recording, visible_ops
from tests.tiny import ids, prompt

LENGTHS = (33, 5, 58, 20)
PROMPTS = ids(*map(prompt, LENGTHS))
SHAPE = {"vocab_size": text.VOCAB, "pad_token_id": 1, "max_position_embeddings": 256}
CONFIG = DustinConfig.make(
    target_heads=(Head(0, 1), Head(1, 4), Head(2, 2)), draft_heads=(Head(0, 3), Head(2, 5)),
    budget=24, gamma=3, sink=2, window=4, draft_window=16, guard=0.3, calibrated=False,
)  # fmt: skip
PARAMS = [
    SamplingParams(max_tokens=n, temperature=t, seed=3, ignore_eos=True)
    for n, t in ((9, 0.0), (7, 0.9), (10, 0.0), (5, 1.2))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Target and draft as folders."""
    folder = tmp_path_factory.mktemp("models")
    words = text.make()
    for name, model in (("target", text.model()), ("draft", good_draft(**SHAPE))):
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def engines(models, tmp_path_factory):
    """An engine folder for the fake."""
    folder = tmp_path_factory.mktemp("engines")
    options = Options(
        backend="onnx", dtype="float32", max_batch=3, max_context=128, chunk=32, page_size=16
    )
    build_engines(*models, CONFIG, folder / "onnx", options)
    return fake.as_tensorrt(folder / "onnx", folder / "tensorrt")


@pytest.fixture
def world(tmp_path):
    with fake.installed(tmp_path) as found:
        yield found


def found(llm):
    outputs = llm.generate(PROMPTS, PARAMS)
    return [
        (o.token_ids, o.stats.steps, o.stats.accepted, o.stats.guarded_steps) for o in outputs
    ]  # fmt: skip


@pytest.fixture(scope="module")
def by_torch(models):
    target, draft = models
    return found(
        LLM(
            target, draft, config=CONFIG, max_batch_size=3, max_model_len=128, page_size=16,
            prefill_chunk=32,
        )
    )  # fmt: skip


def compiled(engines, **options):
    return LLM(engine_dir=engines, max_batch_size=3, prefill_chunk=32, **options)


def test_the_tokens_are_those_of_torch(engines, by_torch, world):
    llm = compiled(engines)
    assert llm._target_model.session.memory.weights > 0
    for _ in range(2):
        assert found(llm) == by_torch
    phases = {phase for _, phase, _ in world.passes}
    assert phases == {"context", "generation"}


def test_recorded_steps_change_nothing(engines, by_torch, world):
    recorder = fake.Recorder()
    with visible_ops(), recording(recorder):
        llm = compiled(engines)
        for _ in range(2):
            assert found(llm) == by_torch
    replays = [tape.replays for tape in recorder.tapes]
    assert len(replays) > 2 and max(replays) > 5


def test_dense_decoding(engines, models, world):
    dense = {"policy": "dense"}
    target, draft = models
    torch_llm = LLM(
        target, draft, config=CONFIG, max_batch_size=3, max_model_len=128, prefill_chunk=32, **dense
    )
    for variant in ({}, {"draft": "none"}):
        assert [tokens for tokens, *_ in found(compiled(engines, **dense, **variant))] == [
            tokens for tokens, *_ in found(torch_llm.variant(**variant, **dense))
        ]


def test_engines_of_other_plugins_are_refused(engines, world, tmp_path):
    manifest = Manifest.load(engines)
    other = fake.as_tensorrt(engines.parent / "onnx", tmp_path / "other")
    manifest.model_copy(update={"plugins": "0" * 16}).save(other)
    with pytest.raises(ValueError, match="built with plugins 0000000000000000"):
        compiled(other)


def test_two_sessions_hold_their_own_memory(engines, world):
    llm = compiled(engines)
    target, draft = llm._target_model.session, llm._draft.model.session
    assert len(world.buffers) == 2
    assert target._activations.data_ptr() != draft._activations.data_ptr()
    assert torch.device("cpu") == target.device

"""Drafts that share their target's embeddings and output rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dustin_trt import LLM, SamplingParams
from dustin_trt.distillation.student import Student
from dustin_trt.engines.base import Dense
from dustin_trt.engines.torch_engine import TorchEngine
from dustin_trt.models import causal_lm, decoder_layers
from dustin_trt.models.causal_lm import CausalLM, UnsupportedModelError
from dustin_trt.models.shared_draft import load_shared_draft, save_shared_draft
from dustin_trt.runtime.loading import make_cache
from tests import test_sampling, tiny

TOKENS = torch.tensor([0, 3, 5, 8, *range(20, 140)])
FAMILIES = ["llama", "llama-tied-bias", "qwen2-tied", "qwen3-head_dim", "mistral"]


def _student(family: str, tokens: torch.Tensor = TOKENS, seed: int = 0) -> Student:
    """Two of the target's layers, and a little off so that it errs."""
    student = Student(tiny.make(family, seed), (0, 2), tokens)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in student.inner.named_parameters():
            if not name.startswith("embed_tokens"):
                weight += 0.01 * torch.randn_like(weight)
    return student


def _save(student: Student, folder, tokens: torch.Tensor | None = TOKENS):
    folder.mkdir(exist_ok=True)
    save_shared_draft(
        folder,
        student.config,
        {f"model.{name}": tensor for name, tensor in student.trained().items()},
        tokens,
        student.inner.embed_tokens.weight,
    )
    return folder


def _logits(model: CausalLM, tokens: list[int]) -> torch.Tensor:
    cache = make_cache(model, 64, 1, None)
    cache.reserve(0, 60)
    run = TorchEngine(model, cache).verify(torch.tensor([0]), torch.tensor([tokens]), Dense())
    return run.logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_what_the_student_said(family, tmp_path):
    student, tokens = _student(family), tiny.prompt(20)
    with torch.no_grad():
        expected = student(torch.tensor([tokens]))[0] @ student.head.T
    folder = _save(student, tmp_path / "draft")
    target = CausalLM(tiny.make(family))
    draft = load_shared_draft(folder, target)
    logits = _logits(draft, tokens)
    assert logits.shape == (20, tiny.VOCAB)
    torch.testing.assert_close(logits[:, TOKENS], expected, rtol=1e-4, atol=1e-4)
    others = torch.ones(tiny.VOCAB, dtype=torch.bool)
    others[TOKENS] = False
    assert (logits[:, others] == float("-inf")).all()
    # The target is as it was, and its embeddings are in memory once.
    torch.testing.assert_close(
        _logits(target, tokens), tiny.make(family)(torch.tensor([tokens])).logits[0],
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    assert draft.model.model.embed_tokens is target.model.model.embed_tokens
    assert draft.pass_weights < target.pass_weights
    modes = {(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1  # who may read the one may read the other


@pytest.mark.parametrize("family", ["llama", "llama-tied-bias"])
@pytest.mark.parametrize("trimmed", [True, False])
def test_greedy_decoding_with_it_is_the_targets_own(family, trimmed, tmp_path):
    tokens = TOKENS if trimmed else torch.arange(tiny.VOCAB)
    folder = _save(_student(family, tokens), tmp_path / "draft", TOKENS if trimmed else None)
    llm = LLM(tiny.make(family), folder, policy="dense", gamma=3)
    outputs = llm.generate(
        tiny.ids(*(tiny.prompt(n) for n in (9, 30))), SamplingParams(max_tokens=24)
    )
    assert [tuple(o.token_ids) for o in outputs] == list(tiny.expected(family, (9, 30), 24))
    assert sum(output.stats.drafted for output in outputs) > 0


def test_sampling_with_it_is_distributed_as_the_target(tmp_path):
    changes = {**test_sampling.TINY, "num_hidden_layers": 2}
    student = Student(tiny.make(**changes), (1,), torch.tensor([0, 2, 3, 5]))
    save_shared_draft(
        tmp_path, student.config, {f"model.{n}": t for n, t in student.trained().items()},
        student.output_tokens, student.inner.embed_tokens.weight,
    )  # fmt: skip
    llm = LLM(
        tiny.make(**changes), tmp_path, policy="dense", gamma=2, max_batch_size=500,
        max_model_len=16,
    )  # fmt: skip
    params = [
        SamplingParams(temperature=test_sampling.TEMPERATURE, max_tokens=3, seed=seed)
        for seed in range(1000)
    ]
    outputs = llm.generate(tiny.ids(*[test_sampling.PROMPT] * len(params)), params)
    drafted = sum(output.stats.drafted for output in outputs)
    assert 0.1 < sum(output.stats.accepted for output in outputs) / drafted < 0.95
    tokens = np.array([output.token_ids for output in outputs])
    joint = test_sampling.TestThroughTheLoop().exact(2).sum(-1)
    for first, exact in ((0, joint.sum(2)), (1, joint.sum(0))):
        pairs = tokens[:, first] * changes["vocab_size"] + tokens[:, first + 1]
        assert test_sampling.goodness(pairs, exact.ravel()) > test_sampling.SURE


@pytest.mark.parametrize("family", ["llama", "llama-tied-bias"])
@pytest.mark.parametrize("trimmed", [True, False])
def test_beside_a_head_in_onednns_layout(family, trimmed, tmp_path, monkeypatch):
    # As in bfloat16 where the processor has the instructions; oneDNN takes float32 everywhere.
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    monkeypatch.setattr(decoder_layers, "_packs", lambda weight: True)
    tokens = TOKENS if trimmed else torch.arange(tiny.VOCAB)
    folder = _save(_student(family, tokens), tmp_path / "draft", TOKENS if trimmed else None)
    target = CausalLM(tiny.make(family))
    assert target._decoder._head.packed
    rows = tiny.make(family).get_output_embeddings().weight
    assert torch.equal(target.output_rows(None), rows)
    assert torch.equal(target.output_rows(TOKENS), rows[TOKENS])
    expected = _student(family, tokens)(torch.tensor([tiny.prompt(20)]))[0] @ rows[tokens].T
    logits = _logits(load_shared_draft(folder, target), tiny.prompt(20))
    torch.testing.assert_close(logits[:, tokens], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0, 50.0, 1e6])
def test_a_token_outside_is_never_drafted(temperature, tmp_path):
    folder = _save(_student("llama"), tmp_path / "draft")
    llm = LLM(tiny.make("llama"), folder, policy="dense", gamma=4)
    seen, propose = [], llm.decoder.drafter.propose

    def watch(batch, gamma):
        proposal = propose(batch, gamma)
        seen.append(proposal)
        return proposal

    llm.decoder.drafter.propose = watch
    llm.generate(
        tiny.ids(tiny.prompt(9)), SamplingParams(max_tokens=40, temperature=temperature, seed=0)
    )
    assert seen
    others = torch.ones(tiny.VOCAB, dtype=torch.bool)
    others[TOKENS] = False
    for proposal in seen:
        assert torch.isin(proposal.tokens, TOKENS).all()
        if proposal.probs is not None:
            assert (proposal.probs[..., others] == 0).all()
            torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(proposal.probs.shape[:2]))


def test_it_runs_beside_its_target_only(tmp_path):
    folder = _save(_student("llama"), tmp_path / "draft")
    with pytest.raises(
        UnsupportedModelError, match=r"cannot run alone: give it as draft \(--draft"
    ):
        causal_lm.load(folder)
    with pytest.raises(ValueError, match="embeddings of another target: use it with"):
        LLM(tiny.make("llama", seed=5), folder)
    with pytest.raises(ValueError, match="embeddings of another target: use it with"):
        load_shared_draft(folder, CausalLM(tiny.make("llama", seed=5)))
    with pytest.raises(ValueError, match=r"199 × 96 there, 300 × 96 here"):
        load_shared_draft(folder, CausalLM(tiny.make("llama", vocab_size=300)))
    # The same embeddings, rounded.
    load_shared_draft(folder, CausalLM(tiny.make("llama").to(torch.bfloat16)))


def test_damaged_folders_are_named(tmp_path):
    target = CausalLM(tiny.make("llama"))
    folder = _save(_student("llama"), tmp_path / "draft")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, weights)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        load_shared_draft(folder, target)
    save_file({**tensors, "model.layers.7.x": torch.ones(1)}, weights)
    with pytest.raises(ValueError, match=r"layers\.7\.x is not in the model"):
        load_shared_draft(folder, target)
    weights.write_bytes(whole[:2000])
    with pytest.raises(ValueError, match="cannot be read"):
        load_shared_draft(folder, target)
    weights.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        load_shared_draft(folder, target)
    config = json.loads((folder / "config.json").read_text())
    config["dustin_draft"]["format"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="format 9; this version reads 1"):
        load_shared_draft(folder, target)

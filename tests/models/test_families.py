from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from dustin_trt import LLM, SamplingParams
from dustin_trt.engines.base import Dense
from dustin_trt.engines.torch_engine import TorchEngine
from dustin_trt.kv_cache import PagedKVCache
from dustin_trt.models.causal_lm import CausalLM, UnsupportedModelError, load
from tests import tiny

NEW_TOKENS = 10
LENGTHS = (1, 45, 8)  # ragged: shorter than a window, longer than a prefill chunk
CHUNK = 16
families = pytest.mark.parametrize("family", tiny.FAMILIES)


def _engine(model: CausalLM, slots: int, page_size: int | None = None) -> TorchEngine:
    spec = model.spec
    return TorchEngine(
        model,
        PagedKVCache(
            num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
            num_slots=slots, capacity=96, page_size=page_size,
        ),
    )  # fmt: skip


def _engine_logits(
    engine: TorchEngine, prompts: list[list[int]], rest: list[list[int]]
) -> list[torch.Tensor]:
    """Prefill in chunks, then the rest in windows of 5, 1 and 3, two of which are rolled back."""
    slots = torch.arange(len(prompts))
    logits = []
    for slot, tokens in enumerate(prompts):
        engine.cache.reserve(slot, 90)
        logits.append([engine.prefill(slot, tokens, chunk=7).logits])
    done = 0
    for width, kept in ((5, 2), (1, 1), (3, 3), (4, 1)):
        window = torch.tensor([row[done : done + width] for row in rest])
        verified = engine.verify(slots, window, Dense())
        engine.commit(slots, torch.full((len(prompts),), kept))
        for b, row in enumerate(logits):
            row += list(verified.logits[b, :kept])
        done += kept
    return [torch.stack(row) for row in logits]


def _generate(llm: LLM, lengths: tuple[int, ...] = LENGTHS) -> tuple[tuple[int, ...], ...]:
    prompts = tiny.ids(*(tiny.prompt(n) for n in lengths))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    return tuple(tuple(output.token_ids) for output in outputs)


@families
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("page_size", [None, 6], ids=["contiguous", "paged"])
def test_logits_equal_transformers(family, attention, page_size):
    peer = tiny.make(family, attn_implementation=attention)
    engine = _engine(CausalLM(tiny.make(family)), len(LENGTHS), page_size)
    prompts = [tiny.prompt(n) for n in LENGTHS]
    rest = [tiny.prompt(12, seed=b + 1) for b in range(len(LENGTHS))]
    for prompt, tail, logits in zip(
        prompts, rest, _engine_logits(engine, prompts, rest), strict=True
    ):
        with torch.no_grad():
            right = peer(torch.tensor([prompt + tail])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(logits, right[: len(logits)], rtol=1e-4, atol=1e-4)


@families
@pytest.mark.parametrize("drafter", ["none", "lookup", "skip:1", "model"])
def test_greedy_equals_generate(family, drafter):
    draft = tiny.make(family, seed=7, num_hidden_layers=2) if drafter == "model" else drafter
    llm = LLM(tiny.make(family), draft, max_batch_size=3, prefill_chunk=CHUNK, gamma=3)
    assert _generate(llm) == tiny.expected(family, LENGTHS, NEW_TOKENS)


def test_greedy_equals_generate_with_a_draft_of_another_family():
    llm = LLM(tiny.make("qwen2-28/4"), tiny.make("llama"), max_batch_size=3, prefill_chunk=CHUNK)
    assert _generate(llm) == tiny.expected("qwen2-28/4", LENGTHS, NEW_TOKENS)


@families
def test_a_saved_checkpoint_gives_the_same_tokens(tmp_path, family):
    tiny.make(family).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.spec == CausalLM(tiny.make(family)).spec
    assert _generate(LLM(model.model, "lookup")) == tiny.expected(family, LENGTHS, NEW_TOKENS)


@pytest.mark.parametrize(
    ("saved", "asked", "loaded"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_load_takes_the_dtype_asked_for(tmp_path, saved, asked, loaded):
    tiny.make().to(saved).save_pretrained(tmp_path)
    assert load(tmp_path, dtype=asked).dtype == loaded


@families
def test_spec(family):
    model = tiny.make(family)
    spec, attention = CausalLM(model).spec, model.model.layers[0].self_attn
    assert spec.architecture == type(model).__name__
    assert spec.num_layers == len(model.model.layers)
    assert spec.num_heads * spec.head_dim == attention.q_proj.out_features
    assert spec.num_kv_heads * spec.head_dim == attention.k_proj.out_features
    assert spec.num_heads // spec.num_kv_heads == attention.num_key_value_groups
    assert (spec.vocab_size, spec.hidden_size) == tuple(model.get_input_embeddings().weight.shape)
    assert spec.max_positions == 512


def _gemma2() -> Gemma2ForCausalLM:
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, attn_logit_softcapping=50.0,
        )
    )  # fmt: skip


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2))


REFUSED = {
    "sliding Mistral": (
        lambda: tiny.make("mistral", sliding_window=128),
        r"MistralForCausalLM with sliding-window attention \(sliding_window=128\)",
    ),
    "sliding Qwen2": (
        lambda: tiny.make(
            "qwen2-tied", use_sliding_window=True, sliding_window=128, max_window_layers=1
        ),
        r"Qwen2ForCausalLM with sliding-window attention \(sliding_window=128\)",
    ),
    "sliding Qwen3": (
        lambda: tiny.make(
            "qwen3-head_dim", use_sliding_window=True, sliding_window=64, max_window_layers=2
        ),
        r"Qwen3ForCausalLM with sliding-window attention \(sliding_window=64\)",
    ),
    "soft-capped Gemma2": (_gemma2, "Gemma2ForCausalLM is not supported"),
    "soft-capped Llama": (
        lambda: tiny.make("llama", attn_logit_softcapping=30.0),
        "LlamaForCausalLM with attn_logit_softcapping is not supported",
    ),
    "GPT2": (_gpt2, "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, "),
    "dynamic rope": (
        lambda: tiny.make("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "LlamaForCausalLM with dynamic rotary scaling is not supported",
    ),
}
refused = pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED.keys())


@refused
def test_refuses_by_name(make, words):
    with pytest.raises(UnsupportedModelError, match=words):
        CausalLM(make())


@refused
def test_refuses_a_checkpoint_before_reading_weights(tmp_path, make, words):
    make().save_pretrained(tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UnsupportedModelError, match=words):
        load(tmp_path)


def test_a_window_that_is_switched_off_is_no_window():
    config = {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 1}
    CausalLM(tiny.make("qwen2-tied", **config))


@pytest.mark.parametrize("path", ["", "missing"])
def test_a_folder_without_config_is_not_found(tmp_path, path):
    with pytest.raises(FileNotFoundError, match=r"no model folder"):
        load(tmp_path / path)


class TestWithoutLayers:
    @pytest.mark.parametrize("skipped", [[0], [1], [0, 2], []], ids=str)
    def test_equals_a_model_made_without_them(self, skipped):
        whole = tiny.make()
        kept = [layer for layer in range(3) if layer not in skipped]
        peer = tiny.make(num_hidden_layers=len(kept), attn_implementation="eager")
        for part in ("embed_tokens", "norm"):
            getattr(peer.model, part).load_state_dict(getattr(whole.model, part).state_dict())
        peer.lm_head.load_state_dict(whole.lm_head.state_dict())
        for layer, i in zip(peer.model.layers, kept, strict=True):
            layer.load_state_dict(whole.model.layers[i].state_dict())
        draft = CausalLM(whole).without_layers(skipped)
        tokens = tiny.prompt(20)
        with torch.no_grad():
            right = peer(torch.tensor([tokens])).logits[0, -1]
        engine = _engine(draft, 1)
        engine.cache.reserve(0, 20)
        for keys in engine.cache.k:
            keys.zero_()
        torch.testing.assert_close(
            engine.prefill(0, tokens, chunk=7).logits, right, rtol=1e-4, atol=1e-4
        )
        assert [bool(engine.cache.k[layer].any()) for layer in range(3)] == [
            layer in kept for layer in range(3)
        ]

    def test_shares_weights_and_leaves_the_whole_model_whole(self):
        whole = CausalLM(tiny.make())
        draft = whole.without_layers([1])
        assert draft.layers == (0, 2)
        assert whole.layers == (0, 1, 2)
        assert draft.model is whole.model
        assert draft.spec == whole.spec

    @pytest.mark.parametrize("skipped", [[3], [-1], [0, 7]], ids=str)
    def test_an_unknown_layer_is_an_error(self, skipped):
        with pytest.raises(ValueError, match=rf"layers \[{skipped[-1]}\].*has layers 0–2"):
            CausalLM(tiny.make()).without_layers(skipped)

    def test_no_layer_left_is_an_error(self):
        with pytest.raises(ValueError, match="every layer"):
            CausalLM(tiny.make()).without_layers([0, 1, 2])


class TestCodeOfACheckpointNeverRuns:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        """A checkpoint with code that leaves a trace, and a user who agrees to run it."""
        monkeypatch.setattr(builtins, "input", lambda *_: "yes")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        folder = tmp_path / "checkpoint"
        tiny.make().save_pretrained(folder)
        trace = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        (folder / "evil.py").write_text(trace + "raise SystemError('code of a checkpoint ran')\n")
        return folder

    def _point(self, folder: Path, **fields: object) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        path.write_text(json.dumps({**config, **fields}))

    def test_where_transformers_has_its_own(self, folder):
        self._point(folder)
        tokens = _generate(LLM(load(folder).model))
        assert tokens == tiny.expected("llama", LENGTHS, NEW_TOKENS)
        assert not (folder.parent / "ran").exists()

    def test_where_it_is_all_there_is(self, folder):
        self._point(folder, model_type="evil")
        with pytest.raises(UnsupportedModelError, match="never run"):
            load(folder)
        assert not (folder.parent / "ran").exists()

    def test_for_a_tokenizer(self, folder):
        tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        with pytest.raises(FileNotFoundError, match="no tokenizer that can be read"):
            LLM(folder)
        assert not (folder.parent / "ran").exists()

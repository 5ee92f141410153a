"""What a configuration brings beside heads: the draft's window and the weights it was made for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dustin_trt import LLM, SamplingParams
from dustin_trt.config import ConfigError, DustinConfig, default_config
from dustin_trt.engines.base import Dense
from dustin_trt.fingerprint import weights_fingerprint
from dustin_trt.runtime import llm as llm_module
from tests import tokenizer as text
from tests.runtime.drafts import llm
from tests.tiny import ids, prompt

GREEDY = SamplingParams(max_tokens=16)


class TestDraftWindow:
    PROMPT = ids(prompt(90))

    def drafter_window(self, **options) -> int | None:
        return self.size(llm("good", policy="dense", **options))

    def size(self, model) -> int | None:
        reading = model.decoder.drafter.reading
        return None if isinstance(reading, Dense) else reading.size

    def test_is_512_by_default(self):
        assert DustinConfig().draft_window == 512
        assert self.drafter_window() == 512

    def test_is_the_configurations(self):
        config = llm("good").config
        assert self.drafter_window(config=config.replace(draft_window=40)) == 40
        assert self.drafter_window(config=config.replace(draft_window=0)) is None

    def test_an_argument_overrides_it(self):
        config = llm("good").config.replace(draft_window=40)
        assert self.drafter_window(config=config, draft_window=12) == 12
        assert self.drafter_window(config=config, draft_window=0) is None
        model = llm("good", config=config, draft_window=12)
        assert model.config.draft_window == 12
        assert self.size(model.variant(draft_window=None)) == 40

    def test_changes_what_is_drafted(self):
        config = llm("good").config.replace(draft_window=6)
        drafted = [
            llm("good", policy="dense", **options).generate(self.PROMPT, GREEDY)[0].stats.accepted
            for options in ({"config": config}, {"draft_window": 6}, {"draft_window": 0})
        ]
        assert drafted[0] == drafted[1] != drafted[2]

    def test_must_hold_more_than_the_drafts_sink(self):
        with pytest.raises(ValueError, match="draft window 4 must be larger"):
            self.drafter_window(config=llm("good").config.replace(draft_window=4))
        with pytest.raises(ConfigError, match="draft_window: Input should be greater"):
            self.drafter_window(draft_window=-1)


class TestWeights:
    @pytest.fixture
    def folders(self, tmp_path) -> tuple[Path, Path]:
        target = text.save(tmp_path / "target")
        return target, text.save(tmp_path / "draft", seed=1, num_hidden_layers=2)

    def config(self, target: Path, draft: Path) -> DustinConfig:
        models = LLM(target, draft)
        return default_config(
            models.decoder.target.spec, models.decoder.drafter.engine.spec
        ).replace(
            target_weights=weights_fingerprint(target), draft_weights=weights_fingerprint(draft)
        )

    def change(self, folder: Path, *names: str) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name in names:
            tensors[name] *= 1.01
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def test_the_same_models_are_accepted_wherever_they_lie(self, folders, tmp_path):
        target, draft = folders
        path = tmp_path / "dustin.json"
        self.config(target, draft).save(path)
        assert LLM(target, draft, config=path).generate("the heron", GREEDY)
        shutil.move(draft, tmp_path / "elsewhere")
        LLM(str(target), str(tmp_path / "elsewhere"), config=path)

    def test_a_changed_target_is_refused(self, folders):
        target, draft = folders
        config = self.config(target, draft)
        self.change(
            target, "model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"
        )
        with pytest.raises(ConfigError) as error:
            LLM(target, draft, config=config)
        assert str(error.value) == (
            "the configuration was made for other target weights: layer 1 and layer 2 changed; "
            "calibrate this pair again, or use the checkpoint it was made for"
        )
        LLM(target, draft)  # there is nothing to compare

    def test_a_changed_draft_is_refused(self, folders):
        target, draft = folders
        config = self.config(target, draft)
        self.change(draft, "lm_head.weight")
        with pytest.raises(ConfigError, match="other draft weights: head changed"):
            LLM(target, draft, config=config)

    def test_another_dtype_on_disk_is_refused(self, folders):
        target, draft = folders
        config = self.config(target, draft)
        text.model().bfloat16().save_pretrained(target)
        with pytest.raises(ConfigError, match="other target weights: all 6 parts changed"):
            LLM(target, draft, config=config)

    def test_another_dtype_in_memory_is_accepted(self, folders):
        target, draft = folders
        LLM(target, draft, config=self.config(target, draft), dtype="bfloat16")

    def test_shards_of_the_same_weights_are_accepted(self, folders, tmp_path):
        target, draft = folders
        config = self.config(target, draft)
        (target / "model.safetensors").unlink()
        text.model().save_pretrained(target, max_shard_size="100KB")
        assert not (target / "model.safetensors").exists()
        LLM(target, draft, config=config)

    def test_weights_of_loaded_models_are_not_compared(self, folders):
        target, draft = folders
        config = self.config(target, draft)
        words = text.make()
        other = {"tokenizer": words, "draft_tokenizer": words}
        LLM(text.model(seed=7), text.model(seed=8, num_hidden_layers=2), config=config, **other)
        with pytest.raises(ConfigError, match="draft weights: head changed"):
            self.change(draft, "lm_head.weight")
            LLM(text.model(seed=7), draft, config=config, **other)

    def test_a_draft_that_skips_layers_has_the_targets_weights(self, folders):
        target, draft = folders
        config = self.config(target, draft)
        spec = LLM(target).decoder.target.spec
        skipping = config.replace(draft_heads=[(0, 1)], draft_weights={"head": "0" * 12})
        assert LLM(target, "skip:1", config=skipping).config.draft_heads == ((0, 1),)
        other = skipping.replace(draft={**spec.__dict__, "num_layers": 99})
        with pytest.raises(ConfigError, match="another draft: num_layers is 3 here and 99 there"):
            LLM(target, "skip:1", config=other)

    def test_variants_are_checked_too(self, folders, tmp_path):
        target, draft = folders
        config = self.config(target, draft)
        model = LLM(target, draft)
        wrong = config.replace(target_weights={**config.target_weights, "layer 0": "0" * 12})
        with pytest.raises(ConfigError, match="target weights: layer 0 changed"):
            model.variant(config=wrong)
        model = model.variant(config=config)
        other = text.save(tmp_path / "other", seed=2, num_hidden_layers=2)
        with pytest.raises(ConfigError, match="draft weights: embeddings, layer 0 and 2 more"):
            model.variant(draft=other)
        model.variant(draft=draft)

    def test_a_model_is_read_once_for_all_variants(self, folders, monkeypatch):
        target, draft = folders
        read = []

        def watch(folder):
            read.append(folder)
            return weights_fingerprint(folder)

        monkeypatch.setattr(llm_module, "weights_fingerprint", watch)
        model = LLM(target, draft, config=self.config(target, draft))
        model.variant(policy="dense").variant(budget=64)
        assert read == [target, draft]
        LLM(target, draft)
        assert len(read) == 2

    def test_changed_weights_of_equal_output_are_still_refused(self, folders):
        """It is the checkpoint that is compared, not what it computes."""
        target, draft = folders
        config = self.config(target, draft)
        tensors = load_file(target / "model.safetensors")
        tensors["unused.weight"] = torch.ones(3)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match="target weights: other changed"):
            LLM(target, draft, config=config)

"""Tiny checkpoint folders, and engine folders of them."""

from __future__ import annotations

from pathlib import Path

from dustin_trt.build.build import Options, build_engines
from dustin_trt.config import DustinConfig, default_config
from dustin_trt.models.causal_lm import read_config, spec_of
from tests import tokenizer
from tests.runtime.drafts import good_draft

SIZES = {"max_context": 200, "max_batch": 3, "page_size": 16, "chunk": 32}


def save_pair(folder: Path, family: str = "llama", **changes: object) -> tuple[Path, Path]:
    """Folders of a target and of a draft that often agrees with it."""
    target = tokenizer.save(folder / "target", family, **changes)
    good_draft(family, vocab_size=tokenizer.VOCAB, pad_token_id=1, **changes).save_pretrained(
        folder / "draft"
    )
    tokenizer.make().save_pretrained(folder / "draft")
    return target, folder / "draft"


def configuration(target: Path, draft: Path | None, **changes: object) -> DustinConfig:
    """Small budgets, so that what is chosen matters."""
    specs = []
    for path in (target, draft):
        config = path and read_config(path)
        specs.append(config and spec_of(config, config.architectures[0]))
    small = {"budget": 26, "window": 8, "gamma": 3, "draft_window": 12}
    return default_config(*specs).replace(**{**small, **changes})


def build(target: Path, draft: Path | None, output: Path, config=None, **options: object) -> Path:
    """An engine folder for ONNX's evaluator."""
    config = config or configuration(target, draft)
    options = {"backend": "onnx", "dtype": "float32", **SIZES, **options}
    build_engines(target, draft, config, output, Options(**options))
    return output

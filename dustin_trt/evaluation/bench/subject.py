"""What `bench decode` decodes: a checkpoint on real text, or random weights on random tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dustin_trt.config import DustinConfig, Head
from dustin_trt.evaluation import assets, machine
from dustin_trt.evaluation.bench.layer import HISTORY, LOOKAHEAD, check_budget
from dustin_trt.evaluation.bench.random_model import random_model
from dustin_trt.evaluation.bench.shapes import SHAPES, Shape, small_draft
from dustin_trt.runtime.llm import LLM
from dustin_trt.runtime.loading import MAX_GAMMA

SELF_DRAFT = "skip:14,17"
"""28 of SmolLM2's 30 layers: no smaller model with its tokenizer comes in a package."""
_SINK, _WINDOW = 4, 16
_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class DecodeSettings:
    """What `bench decode` measures; `dustin-trt bench decode --help` has the meanings."""

    model: Path | None = None
    shape: str | None = None
    draft: str | None = None
    acceptance: float | None = None
    config: Path | None = None
    dtype: str = "auto"
    context: int = 8000
    batch: int = 8
    gamma: int = 4
    budget: int = 512
    draft_window: int = 512
    new_tokens: int = 64
    rounds: int = 3

    def check(self) -> None:
        """Refuse what means nothing, before anything is loaded."""
        check_budget(self.budget, self.context, _SINK + _WINDOW)
        if self.model and self.shape:
            raise ValueError("--model and --shape exclude each other: give one")
        if self.acceptance is not None and not self.shape:
            raise ValueError(
                "--acceptance is for random weights (--shape): a checkpoint's is measured"
            )
        if self.model and not self.draft:
            raise ValueError("--model needs a --draft: a folder, or skip:LAYERS")
        if self.draft_window <= _SINK:
            raise ValueError(f"--draft-window {self.draft_window} must be more than {_SINK}")
        if self.gamma > MAX_GAMMA:
            raise ValueError(f"--gamma {self.gamma} is more than {MAX_GAMMA}: lower it")


@dataclass(frozen=True)
class Subject:
    """A loaded target, what drafts for it, and what it decodes.

    name, draft_name : for the report
    llm : the target alone; its variants decode
    draft : what `LLM.variant` takes
    config : of Dustin; None for uncalibrated defaults
    prompts : token ids
    acceptance : the coin's rate; None on real weights
    dtype : of weights and cache
    """

    name: str
    draft_name: str
    llm: LLM
    draft: Any
    config: DustinConfig | None
    prompts: list[list[int]]
    acceptance: float | None
    dtype: str

    def describe(self, settings: DecodeSettings) -> dict[str, Any]:
        """For the report: nothing of where files lie on this machine."""
        asked = asdict(settings)
        for name in ("model", "shape", "config"):
            del asked[name]
        found = {"draft": self.draft_name, "acceptance": self.acceptance, "dtype": self.dtype}
        config = None if settings.config is None else settings.config.name
        return {"models": [self.name], **asked, **found, "config": config}


def load_subject(settings: DecodeSettings) -> Subject:
    """Load or make the models and cut the prompts.

    Raises
    ------
    ValueError, FileNotFoundError, MemoryError, AssetError
        What does not fit together, is not there, or finds no room.
    """
    settings.check()
    dtype = machine.fastest_dtype() if settings.dtype == "auto" else settings.dtype
    config = DustinConfig.load(settings.config) if settings.config else None
    if settings.shape:
        return _random(settings, SHAPES[settings.shape], dtype, config)
    model = settings.model or assets.smollm2()
    _check_positions(model, settings)
    llm = LLM(model, **_options(settings), dtype=dtype)
    draft = settings.draft or SELF_DRAFT
    prompts = _cut_prompts(llm.tokenizer, assets.books(), settings.context, settings.batch)
    return Subject(model.name, Path(draft).name, llm, draft, config, prompts, None, dtype)


def _options(settings: DecodeSettings) -> dict[str, Any]:
    return {
        "gamma": settings.gamma,
        "draft_window": 0,
        "max_batch_size": settings.batch,
        "max_model_len": settings.context + settings.new_tokens,
    }


def _check_positions(model: Path, settings: DecodeSettings) -> None:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # loading says what is wrong with the folder
    positions = config.get("max_position_embeddings")
    if positions is not None and settings.context + settings.new_tokens > positions:
        raise ValueError(
            f"--context {settings.context} and --new-tokens {settings.new_tokens} are more than "
            f"the {positions} positions of {model.name}: lower one"
        )


def _cut_prompts(
    tokenizer: Any, books: dict[str, Path], length: int, count: int
) -> list[list[int]]:
    """`count` prompts of `length` tokens from different books, past the list of characters.

    A book too short goes on with the next one; when the books run out, other places in them serve.
    """
    names = sorted(books)
    tokens: dict[str, list[int]] = {}

    def read(book: int) -> list[int]:
        name = names[book % len(names)]
        if name not in tokens:
            text = books[name].read_text(encoding="utf-8")
            tokens[name] = tokenizer(text, verbose=False).input_ids
        return tokens[name]

    prompts = []
    for row in range(count):
        start = 1000 + (row // len(names)) * length
        prompt: list[int] = read(row)[start % len(read(row)) :][:length]
        following = row
        while len(prompt) < length:
            following += 1
            prompt = prompt + read(following)[: length - len(prompt)]
        prompts.append(prompt)
    return prompts


def _random(
    settings: DecodeSettings, shape: Shape, dtype: str, config: DustinConfig | None
) -> Subject:
    kind: torch.dtype = getattr(torch, dtype)
    small = small_draft(shape)
    draft_name = settings.draft or (small.name if small else _skip_two(shape))
    skips = draft_name.startswith("skip:")
    if not skips and draft_name not in SHAPES:
        raise ValueError(
            f"--draft {draft_name}: with --shape a draft is skip:LAYERS or a shape, one of "
            f"{', '.join(SHAPES)}"
        )
    draft_shape = shape if skips else SHAPES[draft_name]
    length = settings.context + settings.new_tokens
    _check_memory(settings, [shape] if skips else [shape, draft_shape], length, kind.itemsize)
    llm = LLM(random_model(shape, kind, length), **_options(settings), dtype=kind)
    if config is None:
        skipped = draft_name.removeprefix("skip:").split(",") if skips else []
        left = [i for i in range(draft_shape.num_layers) if str(i) not in skipped]
        config = DustinConfig.make(
            target_heads=_spread(shape, range(shape.num_layers), HISTORY.layers, HISTORY.heads),
            draft_heads=_spread(draft_shape, left, LOOKAHEAD.layers, LOOKAHEAD.heads),
            calibrated=False,
        )
    draft = draft_name if skips else random_model(draft_shape, kind, length)
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(shape.vocab_size, draft_shape.vocab_size)
    size = (settings.batch, settings.context)
    prompts = torch.randint(0, vocabulary, size, generator=generator).tolist()
    acceptance = 0.7 if settings.acceptance is None else settings.acceptance
    name = f"{shape.name}-random"
    return Subject(name, draft_name, llm, draft, config, prompts, acceptance, dtype)


def _skip_two(shape: Shape) -> str:
    return f"skip:{shape.num_layers * 14 // 30},{shape.num_layers * 17 // 30}"


def _spread(shape: Shape, layers: Sequence[int], count: int, heads: int) -> tuple[Head, ...]:
    """As many heads as the paper's search found, evenly spread: nobody searched for these."""
    count, heads = min(count, len(layers)), min(heads, shape.num_heads)
    chosen = [layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)]
    return tuple(Head(layer, head) for layer in chosen for head in shape.spread_heads(heads))


def _check_memory(
    settings: DecodeSettings, shapes: list[Shape], length: int, itemsize: int
) -> None:
    weights = sum(shape.parameters for shape in shapes) * itemsize
    token = sum(2 * s.num_layers * s.num_kv_heads * s.head_dim for s in shapes) * itemsize
    cache = settings.batch * (length + MAX_GAMMA) * token
    available = machine.available_memory()
    if weights + cache > _MEMORY_SHARE * available:
        raise MemoryError(
            f"--shape {shapes[0].name} with --context {settings.context} --batch {settings.batch} "
            f"takes {weights / 2**30:.1f} GiB of weights and {cache / 2**30:.1f} of cache, and "
            f"{available / 2**30:.1f} GiB are free: choose a smaller shape, or lower one of them"
        )

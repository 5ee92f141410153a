"""`dustin-trt distill`: from a target and texts to a folder that `--draft` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from dustin_trt import __version__
from dustin_trt.config import ConfigError
from dustin_trt.distillation.corpus import Corpus, make_corpus
from dustin_trt.distillation.output import (
    alone,
    check_output,
    licence_of,
    stored_dtype,
    write_draft,
)
from dustin_trt.distillation.student import cut_config
from dustin_trt.distillation.texts import Texts, describe_text
from dustin_trt.distillation.train import Settings, Training
from dustin_trt.evaluation import machine
from dustin_trt.models.causal_lm import load_checkpoint, read_config
from dustin_trt.runtime.loading import load_tokenizer, torch_device, torch_dtype

Report = Callable[[Training, float], None]


def distill(
    target: Path,
    output: Path,
    texts: Texts,
    settings: Settings | None = None,
    *,
    num_layers: int = 3,
    dtype: str = "auto",
    save_dtype: str = "bfloat16",
    device: str = "cpu",
    licence: str | None = None,
    resume: bool = False,
    report: Report | None = None,
) -> Training:
    """Train a draft for a target and write it into `output`, anew at every checkpoint.

    Parameters
    ----------
    target : checkpoint folder of a supported decoder
    output : gets the draft, `distill.json` (how it was made, and the curve), and `work/`
    settings : how to train; without layers in it, `num_layers` of the target's are taken, evenly
        spread, the first and the last among them
    dtype : the target's, and of products in training
    save_dtype : of the draft's weights
    licence : of the draft, for `distill.json`; None says that the target's applies
    resume : go on from the checkpoint in `output`
    report : called after each step with the training and the step's loss

    Raises
    ------
    ValueError
        (ConfigError and UnsupportedModelError among them) for what does not fit; OSError for a
        full disk; TrainingError.
    """
    settings = settings or Settings(layers=())
    stored_dtype(save_dtype)  # what costs nothing to refuse comes first
    check_output(output, resume)
    config = read_config(target)
    if texts.context > (positions := config.max_position_embeddings):
        raise ConfigError(
            f"--context {texts.context} is more than the target's {positions} positions"
        )
    if not settings.layers:
        settings = replace(settings, layers=spread(num_layers, config.num_hidden_layers))
    cut_config(config, settings.layers)
    train, held_out = texts.read()
    model, tokenizer = _load(target, dtype, device)
    corpus = make_corpus(
        tokenizer, train.values(), context=texts.context,
        retrieval_share=texts.retrieval_share, seed=settings.seed,
    )  # fmt: skip
    made = {
        "target": target.resolve().name,
        "licence": licence or licence_of(target),
        "texts": {
            role: {name: describe_text(text) for name, text in named.items()}
            for role, named in (("train", train), ("held_out", held_out))
        },
        "context": texts.context,
        "retrieval_share": texts.retrieval_share,
        "settings": asdict(settings),
        "versions": {
            "dustin_trt": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": machine.describe(),
    }
    judge = _held_out(tokenizer, held_out, texts)
    with alone(output):
        training = Training(
            model, corpus, judge, output / "work", settings, always=always_kept(tokenizer)
        )
        if resume and training.resume():
            write_draft(training, output, made, save_dtype)  # a kill may have come before it
        training.run(report, lambda now: write_draft(now, output, made, save_dtype))
    return training


def spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` of so many layers, evenly spread; the first and, of two or more, the last among them.

    Raises
    ------
    ValueError
        More than there are, or none.
    """
    if not 1 <= count <= layers:
        raise ValueError(f"a draft of {count} layers: the target has {layers}")
    return tuple(round(i * (layers - 1) / max(1, count - 1)) for i in range(count))


def always_kept(tokenizer: Any) -> list[int]:
    """Tokens that stay in the output vocabulary however rare: special, digits, the template's."""
    kept = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    for digit in "0123456789":
        kept.update(tokenizer(digit, add_special_tokens=False).input_ids)
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": ""}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        kept.update(tokenizer(text, add_special_tokens=False).input_ids)
    return sorted(kept)


def _load(target: Path, dtype: str, device: str) -> tuple[PreTrainedModel, Any]:
    tokenizer = load_tokenizer(target)
    model = load_checkpoint(target, dtype=torch_dtype(dtype), device=torch_device(device))
    if model.dtype == torch.float16:  # gradients of 1e-8 would be 0
        raise ConfigError("float16 is too narrow to train in: use --dtype bfloat16 or float32")
    return model.eval().requires_grad_(False), tokenizer


def _held_out(tokenizer: Any, named: dict[str, str], texts: Texts) -> Corpus:
    """Sequences to judge by, evenly spread over the held-out texts."""
    try:
        sequences = make_corpus(
            tokenizer, named.values(), context=texts.context, retrieval_share=0, seed=0
        ).sequences
    except ValueError as error:
        raise ConfigError(f"--held-out: {error}") from error
    count = min(len(sequences), texts.held_out_sequences)
    return Corpus(sequences[torch.linspace(0, len(sequences) - 1, count).long()])


def describe_curve(points: Sequence[Any]) -> str:
    """The last point in words."""
    last = points[-1]
    return (
        f"on held-out text {last.agreement:.1%} of its tokens are the target's (greedy), "
        f"{last.overlap:.1%} when sampling"
    )

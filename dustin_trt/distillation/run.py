"""`dustin-trt distill`: from a target and texts to a folder that `--draft` takes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from dustin_trt import __version__
from dustin_trt.config import ConfigError
from dustin_trt.distillation.corpus import Corpus, make_corpus
from dustin_trt.distillation.train import Settings, Training
from dustin_trt.evaluation import machine
from dustin_trt.evaluation.texts import expand, read_text
from dustin_trt.models.causal_lm import check_supported
from dustin_trt.models.shared_draft import save_shared_draft
from dustin_trt.runtime.loading import load_tokenizer, torch_dtype

Report = Callable[[Training, float], None]


@dataclass(frozen=True)
class Texts:
    """What to train on and what to judge by.

    train, held_out : names of texts (`evaluation.texts`); what is held out is not trained on, even
        where a wildcard of `train` names it
    exclude : not trained on either
    context : tokens a sequence
    held_out_sequences : so many, evenly spread over the held-out texts
    retrieval_share : see `corpus.make_corpus`
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    context: int = 1024
    held_out_sequences: int = 8
    retrieval_share: float = 0.08


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
    model, tokenizer = _load(target, dtype, device)
    settings = settings or Settings(layers=())
    if not settings.layers:
        settings = replace(settings, layers=spread(num_layers, model.config.num_hidden_layers))
    train, held_out = _names(texts)
    work = output / "work"
    if (work / "checkpoint.pt").exists() and not resume:
        raise ConfigError(
            f"{output} holds a training already: --resume goes on with it, another --output "
            "starts anew"
        )
    if output.exists() and not work.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty and no draft of ours: name another --output")
    contents = {name: read_text(name) for name in (*train, *held_out)}
    corpus = make_corpus(
        tokenizer, [contents[name] for name in train], context=texts.context,
        retrieval_share=texts.retrieval_share, seed=settings.seed,
    )  # fmt: skip
    judged = make_corpus(
        tokenizer, [contents[name] for name in held_out], context=texts.context,
        retrieval_share=0, seed=settings.seed,
    ).sequences  # fmt: skip
    places = torch.linspace(0, len(judged) - 1, min(len(judged), texts.held_out_sequences)).long()
    training = Training(
        model, corpus, Corpus(judged[places]), work, settings, always=always_kept(tokenizer)
    )
    if resume:
        training.resume()
    made = {
        "target": target.name,
        "licence": licence or "that of the target, whose layers it was made from",
        "texts": {
            role: {name: _digest(contents[name]) for name in names}
            for role, names in (("train", train), ("held_out", held_out))
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
    training.run(report, lambda now: write_draft(now, output, made, save_dtype))
    return training


def write_draft(training: Training, output: Path, made: dict[str, Any], save_dtype: str) -> None:
    """Write what a training has reached as a draft that can be used."""
    kept = torch_dtype(save_dtype)
    assert isinstance(kept, torch.dtype)
    student, vocabulary = training.student, training.target.config.vocab_size
    tokens = student.output_tokens
    embeddings: Any = training.target.get_input_embeddings()
    save_shared_draft(
        output,
        student.config,
        {f"model.{name}": tensor.to(kept) for name, tensor in student.trained().items()},
        None if len(tokens) == vocabulary else tokens,
        embeddings.weight.detach(),
    )
    record = {
        **made,
        "steps": training.step,
        "output_tokens": len(tokens),
        "curve": [asdict(point) for point in training.curve],
    }
    partial = output / "distill.json.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, output / "distill.json")


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
    if not (target / "config.json").is_file():
        raise FileNotFoundError(f"there is no model folder {target}")
    tokenizer = load_tokenizer(target)
    own_code_only: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model: Any = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch_dtype(dtype), attn_implementation="sdpa", **own_code_only
    )
    check_supported(model.config, type(model).__name__)
    return model.to(device).eval().requires_grad_(False), tokenizer


def _names(texts: Texts) -> tuple[list[str], list[str]]:
    """Names of the texts to train on and of those held out.

    Raises
    ------
    ConfigError
        A text that was asked for on both sides, or nothing left to train on.
    """
    held_out = [name for given in texts.held_out for name in expand(given)]
    if both := sorted({*texts.train} & {*held_out}):
        raise ConfigError(
            f"{', '.join(both)} is given to train on and held out: what judges a draft must not "
            "have made it"
        )
    dropped = {*held_out, *(name for given in texts.exclude for name in expand(given))}
    train = [name for given in texts.train for name in expand(given) if name not in dropped]
    if not train:
        raise ConfigError("no text is left to train on: give more --text or fewer --exclude")
    return list(dict.fromkeys(train)), list(dict.fromkeys(held_out))


def _digest(text: str) -> dict[str, Any]:
    content = text.encode()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def describe_curve(points: Sequence[Any]) -> str:
    """The last point in words."""
    last = points[-1]
    return (
        f"on held-out text {last.agreement:.1%} of its tokens are the target's (greedy), "
        f"{last.overlap:.1%} when sampling"
    )

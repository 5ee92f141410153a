"""Drafts that share their target's embeddings and output rows: a few layers, and nothing else.

A folder holds `config.json` (the target's with fewer layers, and `dustin_draft`) and
`model.safetensors` with the layers, the final norm and, where the output vocabulary was trimmed,
`output_tokens`. It loads beside the target it was made for and beside no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dustin_trt.models.causal_lm import SHARED_DRAFT, CausalLM, check_supported

_FORMAT = 1
_SAMPLES = 32
_TENSORS = "model.safetensors"
OUTPUT_TOKENS = "output_tokens"
"""The tensor of tokens that a trimmed output head can propose."""


def is_shared_draft(folder: str | Path) -> bool:
    """Whether a folder holds such a draft."""
    if not (Path(folder) / "config.json").is_file():
        return False
    config, _ = PretrainedConfig.get_config_dict(str(folder), local_files_only=True)
    return SHARED_DRAFT in config


def save_shared_draft(
    folder: Path,
    config: PretrainedConfig,
    tensors: dict[str, Tensor],
    output_tokens: Tensor | None,
    embeddings: Tensor,
) -> None:
    """Write a draft; `model.safetensors` appears whole or not at all, and an older one stays.

    Parameters
    ----------
    folder : exists
    config : of the draft
    tensors : "model.layers.0.…" and "model.norm.weight", in the dtype to store
    output_tokens : Tensor `[Vd]` int64, ascending, the tokens it can propose; None for all
    embeddings : Tensor `[V, hidden]`, the target's, of which a sample is remembered

    Raises
    ------
    OSError
        A full disk, for one.
    """
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if output_tokens is not None:
        stored[OUTPUT_TOKENS] = output_tokens.to(torch.int32)
    partial = folder / f"{_TENSORS}.partial"
    try:
        save_file(stored, partial, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write {folder / _TENSORS}: {error}") from error
    setattr(config, SHARED_DRAFT, {"format": _FORMAT, "embeddings": _sample(embeddings)})
    config.save_pretrained(folder)
    partial.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read it
    partial.replace(folder / _TENSORS)


def load_shared_draft(folder: str | Path, target: CausalLM) -> CausalLM:
    """Load a draft beside its target, whose embeddings stay in memory once.

    Raises
    ------
    ValueError
        Another target than the one it was made for, damaged weights, a newer format.
    """
    folder = Path(folder)
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    theirs: Any = target.model.model
    check_shared_draft(folder, config, theirs.embed_tokens.weight)
    try:
        tensors = load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from error
    tokens = tensors.pop(OUTPUT_TOKENS, None)
    tokens = None if tokens is None else tokens.long().to(target.device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    inner: Any = model.model
    inner.embed_tokens = theirs.embed_tokens
    inner.rotary_emb = type(inner.rotary_emb)(config).to(target.device)
    rows = target.output_rows(tokens)
    model.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    model.lm_head.weight = nn.Parameter(rows, requires_grad=False)
    ours = {name: t.to(target.device, target.dtype) for name, t in tensors.items()}
    missing, unexpected = model.load_state_dict(ours, strict=False, assign=True)
    wrong = [name for name in missing if name.startswith(("model.layers.", "model.norm."))]
    if wrong or unexpected:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: "
            f"{(wrong or unexpected)[0]} is {'missing' if wrong else 'not in the model'}"
        )
    return CausalLM(model, tokens)


def check_shared_draft(folder: Path, config: Any, embeddings: Tensor) -> None:
    """Refuse a draft that cannot be run beside a target with these embeddings `[V, hidden]`.

    Raises
    ------
    ValueError
        Another target than the one it was made for, a newer format, an unsupported model.
    """
    check_supported(config, (config.architectures or ["a draft without a class"])[0])
    note = getattr(config, SHARED_DRAFT)
    if note.get("format") != _FORMAT:
        raise ValueError(
            f"{folder} is a draft of format {note.get('format')}; this version reads {_FORMAT}"
        )
    here, there = _sample(embeddings), note.get("embeddings")
    same_shape = (config.vocab_size, config.hidden_size) == tuple(embeddings.shape)
    if not same_shape or not torch.allclose(
        torch.tensor(here), torch.tensor(there), rtol=2e-2, atol=1e-3
    ):
        raise ValueError(
            f"{folder} shares the embeddings of another target"
            + ("" if same_shape else f" ({config.vocab_size} × {config.hidden_size} there, "
               f"{embeddings.shape[0]} × {embeddings.shape[1]} here)")
            + ": use it with the checkpoint it was distilled from, or distil one for this target"
        )  # fmt: skip


def _sample(embeddings: Tensor) -> list[float]:
    """A few numbers of an embedding, the same up to rounding in every dtype it is loaded as."""
    rows = torch.linspace(0, embeddings.shape[0] - 1, _SAMPLES).long()
    columns = torch.linspace(0, embeddings.shape[1] - 1, _SAMPLES).long()
    return [round(value, 5) for value in embeddings[rows, columns].float().tolist()]

"""Which weights a checkpoint folder holds, without reading all of them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_RUNS, _RUN = 64, 64  # of a tensor, elements of one
_DIGITS = 12
_PARTS = {"embed_tokens": "embeddings", "norm": "norm", "lm_head": "head"}
_ORDER = ("embeddings", "layer", "norm", "head", "other")


def weights_fingerprint(folder: str | Path) -> dict[str, str]:
    """A fingerprint of every part of a checkpoint, the same however it is cut into files.

    The first 12 hexadecimal digits of the SHA-256 of the names, shapes, dtypes and a sample of the
    part's tensors. The sample is all of a tensor of up to 4096 elements, and 64 runs of 64 from all
    over a larger one: it shows training, merging, quantising and conversion, while a change of a
    few rows or elements of a large tensor can go unseen. The files are mapped into memory, so that
    little more than the sample is read of them.

    Parameters
    ----------
    folder : holds `model.safetensors`, or shards and `model.safetensors.index.json`; where there
        are both, the single file counts, as for transformers

    Returns
    -------
    dict
        By part: "embeddings", "layer 0" and so on, "norm", "head", and "other" for tensors of
        other names. Empty where the folder has no safetensors.

    Raises
    ------
    ValueError
        A file that is damaged or that the index names and is not there; says which.
    """
    tensors: dict[str, dict[str, bytes]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                    tensors.setdefault(_part(name), {})[name] = _describe(file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read the weights in {path}: {error}") from error
    return {
        part: hashlib.sha256(
            b"".join(name.encode() + b"\0" + content for name, content in sorted(named.items()))
        ).hexdigest()[:_DIGITS]
        for part, named in sorted(tensors.items(), key=lambda item: _place(item[0]))
    }


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors of a checkpoint folder, as transformers chooses them; may be none.

    Raises
    ------
    ValueError
        An index that is none.
    """
    folder = Path(folder)
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / shard for shard in shards]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of safetensors: it needs a weight_map of names to files"
        ) from error


def _part(name: str) -> str:
    """The part of the model that a tensor of a transformers checkpoint belongs to."""
    name = name.removeprefix("model.")
    if layer := re.match(r"layers\.(\d+)\.", name):
        return f"layer {int(layer[1])}"
    return _PARTS.get(name.partition(".")[0], "other")


def _place(part: str) -> tuple[int, int]:
    """Orders parts as a forward pass meets them."""
    kind, _, number = part.partition(" ")
    return _ORDER.index(kind), int(number or 0)


def _describe(tensor: Tensor) -> bytes:
    sample = tensor.reshape(-1)
    if len(sample) > _RUNS * _RUN:
        sample = sample[_places(len(sample))]
    content = sample.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)}\0".encode() + content


def _places(elements: int) -> Tensor:
    """Where the sample of a tensor of so many elements lies, `[runs, run]` int64.

    Runs, because any place on a disk costs as much as the few thousand bytes around it. One in each
    of as many equal pieces, at a distance from its beginning that differs from piece to piece: else
    all of them could lie in the same columns of a matrix.
    """
    piece, run = elements // _RUNS, torch.arange(_RUNS)
    begin = run * piece + run * 39 % _RUNS * (piece - _RUN) // (_RUNS - 1)  # 39/64: golden section
    return begin[:, None] + torch.arange(_RUN)

"""A checkpoint's weights, read one by one when wanted: memory never holds a whole model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dustin_trt.config import ModelSpec
from dustin_trt.fingerprint import weight_files
from dustin_trt.models.causal_lm import read_config, spec_of
from dustin_trt.models.shared_draft import OUTPUT_TOKENS, check_shared_draft, is_shared_draft

_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Checkpoint:
    """A folder of Hugging Face's format, with safetensors.

    A context manager: leaving it closes the files.

    Parameters
    ----------
    folder : of the checkpoint, or of a draft that shares its target's embeddings
    target : of such a draft

    Attributes
    ----------
    config : transformers' configuration
    spec : ModelSpec
    output_tokens : Tensor `[Vd]` int64, the tokens that rows of the head stand for; None for all

    Raises
    ------
    FileNotFoundError
        No checkpoint there, or none with safetensors.
    UnsupportedModelError
        See `models.causal_lm.check_supported`.
    ValueError
        Damaged weights, or a draft that was made for another target.
    """

    def __init__(self, folder: str | Path, target: Checkpoint | None = None) -> None:
        self.folder = Path(folder)
        self._open = ExitStack()
        self._target = None
        self.config: Any
        if target is not None and is_shared_draft(folder):
            self._target = target
            self.config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        else:
            self.config = read_config(folder)
        self.architecture = (self.config.architectures or [type(self.config).__name__])[0]
        self.spec: ModelSpec = spec_of(self.config, self.architecture)
        self._files = self._index()
        if target is not None and self._target:
            check_shared_draft(self.folder, self.config, target.tensor(_EMBEDDINGS))
        named = OUTPUT_TOKENS in self._files
        self.output_tokens = self.tensor(OUTPUT_TOKENS).long() if named else None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def dtype(self) -> torch.dtype:
        """That the checkpoint names as its own, else float32."""
        named = getattr(self.config, "dtype", None)
        return named if isinstance(named, torch.dtype) else torch.float32

    @property
    def tied(self) -> bool:
        """Whether the output head is the embeddings."""
        if self._target:
            return self.output_tokens is None and self._target.tied
        return _HEAD not in self._files

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored; embeddings and head of a shared draft are the target's."""
        if self._target and name == _EMBEDDINGS:
            return self._target.tensor(name)
        if self._target and name == _HEAD:
            rows = self._target.tensor(_EMBEDDINGS if self._target.tied else _HEAD)
            return rows if self.output_tokens is None else rows[self.output_tokens]
        if name not in self._files:
            raise self._missing(name)
        try:
            found: Tensor = self._files[name].get_tensor(name)
            return found
        except SafetensorError as error:
            raise ValueError(f"the weights in {self.folder} are damaged: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is stored here or in the target."""
        if self._target and name == _EMBEDDINGS:
            return self._target.shape(name)
        if name not in self._files:
            raise self._missing(name)
        return tuple(self._files[name].get_slice(name).get_shape())

    def rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[positions, D/2]` fp32 of the rotary embedding, scaling included.

        By transformers' own module, so that every kind of scaling it has is right here too.
        """
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self.config)
        module = type(model.model.rotary_emb)(self.config)
        cos, sin = module(torch.empty(0), torch.arange(positions)[None])
        half = self.spec.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _missing(self, name: str) -> ValueError:
        return ValueError(f"{self.folder} has no tensor {name}: its weights do not fit its config")

    def _index(self) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for path in weight_files(self.folder):
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"cannot read the weights in {path}: {error}") from error
            files |= dict.fromkeys(file.keys(), file)
        if not files:
            raise FileNotFoundError(
                f"{self.folder} has no model.safetensors: save the checkpoint in that format"
            )
        return files

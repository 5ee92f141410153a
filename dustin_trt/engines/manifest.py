"""What an engine folder holds: `manifest.json`, the compiled steps and the tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dustin_trt.config import ConfigError, DustinConfig, one_line
from dustin_trt.engines.step_graph import StepGraph
from dustin_trt.files import write_whole

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
"""Subfolder, where the target came with one."""

Backend = Literal["tensorrt", "tensorrt-rtx", "onnx"]
BACKENDS: tuple[Backend, ...] = ("tensorrt", "tensorrt-rtx", "onnx")

_SAMPLES, _SAMPLE = 64, 4096


class ManifestError(ValueError):
    """An engine folder that cannot be used; the message says what to do."""


class Artifact(BaseModel):
    """A file of the folder; `fingerprint` as `file_fingerprint` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bytes: int = Field(ge=0)
    fingerprint: str


class Step(BaseModel):
    """A compiled step: what it is, and its files, the one to load first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    graph: StepGraph
    files: tuple[Artifact, ...] = Field(min_length=1)


class Manifest(BaseModel):
    """An engine folder.

    Attributes
    ----------
    backend : what the steps were compiled for
    target : one step, or one a rank of tensor parallelism
    draft : None where the target was built alone
    config : what both were built with
    signal : what chooses, see `policies.DustinPolicy`
    max_context : prompt and generated tokens of a request at most
    eos : end-of-sequence tokens
    sources : what was built, by name
    target_weights, draft_weights : fingerprints of the weights, as `DustinConfig` has them
    versions : of the software that built it
    compute_capability : "9.0", of the GPU it was compiled for; None where it matters to none
    plugins : fingerprint of the plugin library it was compiled with
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    backend: Backend
    target: tuple[Step, ...] = Field(min_length=1)
    draft: Step | None = None
    config: DustinConfig
    signal: Literal["hybrid", "history", "lookahead"]
    max_context: int = Field(ge=1)
    eos: tuple[int, ...] = ()
    sources: dict[str, str] = Field(default_factory=dict)
    target_weights: dict[str, str] = Field(default_factory=dict)
    draft_weights: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    compute_capability: str | None = None
    plugins: str | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Manifest:
        steps = [*self.target, *([self.draft] if self.draft else [])]
        for step in steps:
            for file in step.files:
                if Path(file.name).name != file.name or file.name in ("", ".", ".."):
                    raise ValueError(f"file {file.name!r} is not a name in this folder")
            if step.graph.capacity < self.max_context:
                raise ValueError(
                    f"max_context {self.max_context} is more than the {step.graph.capacity} tokens "
                    f"of the {step.graph.role}'s cache"
                )
        if [step.graph.shard.rank for step in self.target] != list(range(len(self.target))):
            raise ValueError("the target's ranks are not all there, in order")
        return self

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read a folder's manifest and look whether its files are there, whole.

        Raises
        ------
        FileNotFoundError
            No engine folder.
        ManifestError
            A manifest that is damaged or of another version, a file that is missing or was cut off
            or changed.
        """
        folder = Path(folder)
        path = folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} is no engine folder: it has no {MANIFEST}; dustin-trt build makes one"
            )
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ManifestError(
                f"{path} cannot be used, build the engines again: {one_line(error)}"
            ) from error
        except OSError as error:
            raise ManifestError(f"{path} cannot be read: {error.strerror}") from error
        except ConfigError as error:
            raise ManifestError(f"{path}: {error}") from error
        for step in (*manifest.target, *([manifest.draft] if manifest.draft else [])):
            for file in step.files:
                _check(folder / file.name, file)
        return manifest

    def save(self, folder: Path) -> None:
        """Write the folder's manifest, whole or not at all."""
        write_whole(folder / MANIFEST, self.model_dump_json(indent=2) + "\n")


def artifact(path: Path) -> Artifact:
    """What a manifest says of a file."""
    return Artifact(
        name=path.name, bytes=path.stat().st_size, fingerprint=file_fingerprint(path)
    )  # fmt: skip


def file_fingerprint(path: Path) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a file's size and 64 samples of 4 KiB.

    Engines of large models take minutes to read whole; a cut, a mixed up and a damaged file show in
    a sample.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _check(path: Path, file: Artifact) -> None:
    if not path.is_file():
        raise ManifestError(f"{path} is missing: copy the whole folder, or build it again")
    if path.stat().st_size != file.bytes:
        raise ManifestError(
            f"{path} has {path.stat().st_size} bytes, {file.bytes} by the manifest: it was cut off "
            "or changed; copy it again, or build the engines again"
        )
    if file_fingerprint(path) != file.fingerprint:
        raise ManifestError(
            f"{path} is not what was built: it is damaged or from another build; copy it again, or "
            "build the engines again"
        )

"""Engine folders: what `dustin-trt build` made, ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dustin_trt.config import ConfigError, DustinConfig, ModelSpec
from dustin_trt.engines.manifest import Backend, Manifest, ManifestError, Step
from dustin_trt.engines.step_graph import Session, StepGraph

COMPILED_IN = (
    "target_heads", "draft_heads", "budget", "lookahead_tokens", "sink", "window", "join",
    "lookahead_weight", "draft_window",
)  # fmt: skip
"""What of a configuration an engine cannot change."""

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


@dataclass(frozen=True)
class CompiledModel:
    """A step that runs, in the place of a `CausalLM`."""

    session: Session
    graph: StepGraph

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self.graph.model

    @property
    def layers(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(self.spec.num_layers))

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and cache."""
        return self.graph.torch_dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.session.device


@dataclass(frozen=True)
class EngineFolder:
    """A folder, its manifest checked.

    Raises
    ------
    FileNotFoundError, ManifestError
        See `Manifest.load`; also for shards of a larger model, which no engine here joins.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: str | Path) -> EngineFolder:
        """Check a folder; nothing is loaded yet."""
        manifest = Manifest.load(path)
        if len(manifest.target) > 1:
            raise ManifestError(
                f"{path} holds {len(manifest.target)} shards of a tensor-parallel model: this "
                "runtime runs one process and one GPU, see docs/tensorrt.md"
            )
        return cls(Path(path), manifest)

    def device(self, wanted: torch.device | str | None) -> torch.device:
        """Where it runs: on the CPU by the reference evaluator, else on a GPU.

        Raises
        ------
        ManifestError
            Where it cannot run.
        """
        on_cpu = self.manifest.backend == "onnx"
        device = torch.device(wanted or ("cpu" if on_cpu else "cuda"))
        if device.type != ("cpu" if on_cpu else "cuda"):
            raise ManifestError(
                f"{self.path} was built for {self.manifest.backend} and cannot run on {device}: "
                + ("leave device out" if on_cpu else "use cuda, or a folder built for onnx")
            )
        return torch.device("cuda:0") if device == torch.device("cuda") else device

    def target(self, device: torch.device) -> CompiledModel:
        """Load the target."""
        return self._load(self.manifest.target[0], device)

    def draft(self, device: torch.device) -> CompiledModel | None:
        """Load the draft, where there is one."""
        step = self.manifest.draft
        return self._load(step, device) if step else None

    def check_config(self, config: DustinConfig) -> None:
        """Refuse a configuration that differs in what is compiled in.

        Raises
        ------
        ConfigError
            Names the first field that differs.
        """
        built = self.manifest.config
        for name in COMPILED_IN:
            if (wanted := getattr(config, name)) != (is_now := getattr(built, name)):
                shown = "" if isinstance(wanted, tuple) else f" {is_now}, not {wanted}"
                raise ConfigError(
                    f"{self.path} was built with another {name}{shown and ':'}{shown}; use what it "
                    "was built with, or build it again with this configuration"
                )
        longest = self.manifest.target[0].graph.max_window - 1
        if config.gamma > longest:
            raise ConfigError(
                f"gamma {config.gamma} is more than the {longest} that {self.path} was built for: "
                "lower it, or build it again"
            )

    def _load(self, step: Step, device: torch.device) -> CompiledModel:
        return CompiledModel(
            _session(self.manifest, self.path / step.files[0].name, step.graph, device), step.graph
        )


def _session(manifest: Manifest, file: Path, graph: StepGraph, device: torch.device) -> Session:
    backend: Backend = manifest.backend
    if backend == "onnx":
        from dustin_trt.engines.onnx_session import OnnxSession

        return OnnxSession(file, graph)
    from dustin_trt.engines.plugin_library import require_plugins
    from dustin_trt.engines.tensorrt import TensorRTSession, check_device

    check_device(device, manifest.compute_capability)
    plugins = require_plugins(manifest.plugins)
    return TensorRTSession(file, graph, plugins=plugins, module=_MODULES[backend], device=device)

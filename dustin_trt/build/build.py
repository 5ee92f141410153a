"""An engine folder from two checkpoints and a configuration."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from transformers import GenerationConfig

from dustin_trt import __version__
from dustin_trt.build.checkpoint import Checkpoint
from dustin_trt.build.graph import export
from dustin_trt.config import (
    ConfigError,
    DustinConfig,
    Head,
    ModelSpec,
    default_config,
    one_line,
    tokenizer_fingerprint,
)
from dustin_trt.drafting.tokenizers import check_same_tokenizer
from dustin_trt.engines.manifest import BACKENDS, TOKENIZER, Backend, Manifest, Step, artifact
from dustin_trt.engines.step_graph import Reading, Shard, StepGraph
from dustin_trt.fingerprint import weights_fingerprint
from dustin_trt.models.causal_lm import UnsupportedModelError
from dustin_trt.models.shared_draft import is_shared_draft
from dustin_trt.ops.cuda import HEAD_DIMS, MAX_GROUP, MAX_SCORED_HEADS
from dustin_trt.runtime.loading import MAX_GAMMA, end_tokens, load_tokenizer

Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done and steps in all."""

Signal = Literal["hybrid", "history", "lookahead"]

_DRAFT_SINK = 4  # of `DraftModel`
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Options:
    """How to build.

    backend : "tensorrt", "tensorrt-rtx", or "onnx" for the graphs alone, which ONNX's reference
        evaluator runs on a CPU
    dtype : "bfloat16", "float16", or for onnx "float32"; "auto" is the target's own, bfloat16 where
        that is float32 and the backend does not take it
    max_batch : rows decoded at a time
    max_context : prompt and generated tokens of a request at most; None all positions of the models
    chunk : prompt tokens of a prefill pass
    page_size : tokens of a cache page
    gamma : longest draft; None the configuration's
    signal : see `policies.DustinPolicy`; None "hybrid" where the configuration has draft heads and
        there is a draft, else "history"
    tensor_parallel : ranks to cut the target into, by KV head; graphs only
    keep_graphs : leave the ONNX files beside the engines
    plugins : plugin library; None the one built with this package
    timing_cache : file that TensorRT's measurements are kept in; None beside no build
    compute_capability : for tensorrt-rtx, of the GPU to build for, like "8.9"; None this machine's
    """

    backend: Backend = "tensorrt"
    dtype: str = "auto"
    max_batch: int = 8
    max_context: int | None = None
    chunk: int = 512
    page_size: int = 64
    gamma: int | None = None
    signal: Signal | None = None
    tensor_parallel: int = 1
    keep_graphs: bool = False
    plugins: Path | None = None
    timing_cache: Path | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class Plan:
    """What will be built: everything is checked, nothing is written.

    targets : one step, or one a rank
    """

    options: Options
    target: Checkpoint
    draft: Checkpoint | None
    config: DustinConfig
    signal: Signal
    max_context: int
    tokenizer: Any
    targets: tuple[StepGraph, ...]
    draft_step: StepGraph | None

    @property
    def steps(self) -> list[tuple[str, Checkpoint, StepGraph]]:
        """Name, weights and step of every file."""
        alone = len(self.targets) == 1
        found = [
            ("target" if alone else f"target.rank{step.shard.rank}", self.target, step)
            for step in self.targets
        ]
        if self.draft and self.draft_step:
            found.append(("draft", self.draft, self.draft_step))
        return found


def build_engines(
    target: str | Path,
    draft: str | Path | None,
    config: str | Path | DustinConfig | None,
    output: str | Path,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Build an engine folder, whole or not at all.

    Parameters
    ----------
    target, draft : checkpoint folders; draft None for n-gram lookup or none at run time
    config : `dustin.json`, or a DustinConfig; None uses an uncalibrated default
    output : folder to make; must not exist
    options : see `Options`
    progress : see `Progress`

    Raises
    ------
    FileExistsError
        `output` exists.
    FileNotFoundError, ConfigError, UnsupportedModelError, ValueError
        What does not fit together; see `plan`.
    ImportError, RuntimeError
        No compiler, or one that refused; see `build.tensorrt.compile_graph`.
    OSError
        A full disk, for one. Nothing is left of it.
    """
    with plan(target, draft, config, options) as work, new_folder(Path(output)) as folder:
        export_graphs(work, folder, progress)
        compiled = compile_graphs(work, folder, progress)
        return write_manifest(work, folder, compiled)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `output` when all went well, and is gone otherwise."""
    if output.exists():
        raise FileExistsError(f"{output} exists already: remove it, or name another output")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed
    partial.mkdir()
    try:
        yield partial
        partial.replace(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def plan(
    target: str | Path,
    draft: str | Path | None,
    config: str | Path | DustinConfig | None,
    options: Options | None = None,
) -> Iterator[Plan]:
    """Check everything that can be checked before anything is written.

    Raises
    ------
    FileNotFoundError
        No checkpoint, or no safetensors in it.
    UnsupportedModelError
        An architecture, head size, group or number of heads that the kernels do not take.
    ConfigError
        A configuration for other models, a budget that no slot can hold.
    ValueError
        Wrong options, damaged weights, tokenizers that differ.
    """
    options = options or Options()
    _check_options(options)
    if not isinstance(config, DustinConfig):
        config = DustinConfig.load(config) if config is not None else None
    with ExitStack() as opened:
        model = opened.enter_context(Checkpoint(target))
        small = opened.enter_context(Checkpoint(draft, model)) if draft is not None else None
        yield _plan(model, small, config, options)


def export_graphs(
    work: Plan, folder: Path, progress: Progress | None = None
) -> dict[str, list[Path]]:
    """Write every step as ONNX into `folder`; the files of each, graph first."""
    files = {}
    for name, checkpoint, step in work.steps:

        def report(done: int, total: int, name: str = name) -> None:
            if progress:
                progress(f"export {name}", done, total)

        path = folder / f"{name}.onnx"
        export(checkpoint, step, path, report)
        files[name] = [path, folder / f"{name}.weights"]
    return files


@dataclass(frozen=True)
class CompiledSteps:
    """Files of every step, the one to load first, and what a manifest says of the compiler."""

    files: dict[str, list[Path]]
    versions: dict[str, str]
    compute_capability: str | None = None
    plugins: str | None = None


def compile_graphs(work: Plan, folder: Path, progress: Progress | None = None) -> CompiledSteps:
    """Compile the graphs in `folder`; for onnx they stay as they are."""
    options = work.options
    graphs = {name: folder / f"{name}.onnx" for name, _, _ in work.steps}
    files: dict[str, list[Path]] = {}
    if options.backend == "onnx":
        files |= {name: [path, path.with_suffix(".weights")] for name, path in graphs.items()}
        return CompiledSteps(files, {"onnx": metadata.version("onnx")})
    from dustin_trt.build.tensorrt import compile_graph
    from dustin_trt.engines.plugin_library import fingerprint, require_plugins

    plugins = options.plugins or require_plugins(None)
    versions: dict[str, str] = {}
    capability = None
    for name, _, step in work.steps:

        def report(what: str, done: int, total: int, name: str = name) -> None:
            if progress:
                progress(f"compile {name}: {what}", done, total)

        engine = folder / f"{name}.engine"
        made = compile_graph(
            graphs[name],
            step,
            engine,
            backend=options.backend,
            plugins=plugins,
            timing_cache=options.timing_cache,
            compute_capability=options.compute_capability,
            progress=report,
        )
        files[name] = [engine]
        versions[options.backend] = made.version
        capability = made.compute_capability
        if not options.keep_graphs:
            for path in (graphs[name], graphs[name].with_suffix(".weights")):
                path.unlink()
    return CompiledSteps(files, versions, capability, fingerprint(plugins))


def write_manifest(work: Plan, folder: Path, compiled: CompiledSteps) -> Manifest:
    """Write tokenizer and manifest: what makes an engine folder of the files."""
    work.tokenizer.save_pretrained(folder / TOKENIZER)
    steps = {
        name: Step(graph=step, files=tuple(map(artifact, compiled.files[name])))
        for name, _, step in work.steps
    }
    draft = steps.pop("draft", None)
    names = {"target": work.target.folder.resolve().name}
    if work.draft:
        names["draft"] = work.draft.folder.resolve().name
    packages = ("torch", "transformers", "onnx-ir")
    manifest = Manifest(
        backend=work.options.backend,
        target=tuple(steps.values()),
        draft=draft,
        config=work.config,
        signal=work.signal,
        max_context=work.max_context,
        eos=_end_tokens(work),
        sources=names,
        target_weights=weights_fingerprint(work.target.folder),
        draft_weights=weights_fingerprint(work.draft.folder) if work.draft else {},
        versions={
            "dustin-trt": __version__,
            **{name: metadata.version(name) for name in packages},
            **compiled.versions,
        },
        compute_capability=compiled.compute_capability,
        plugins=compiled.plugins,
    )
    manifest.save(folder)
    return manifest


def _check_options(options: Options) -> None:
    if options.backend not in BACKENDS:
        raise ValueError(f"unknown backend {options.backend!r}; there are {', '.join(BACKENDS)}")
    if options.dtype not in ("auto", *_DTYPES):
        raise ValueError(f"unknown dtype {options.dtype!r}; there are auto, {', '.join(_DTYPES)}")
    if options.dtype == "float32" and options.backend != "onnx":
        raise ValueError(
            f"the kernels of {options.backend} take float16 and bfloat16: float32 is for onnx"
        )
    for name in ("max_batch", "chunk", "page_size", "tensor_parallel"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(options, name)}")
    if options.gamma is not None and not 1 <= options.gamma <= MAX_GAMMA:
        raise ValueError(f"gamma {options.gamma} is not in 1–{MAX_GAMMA}")
    if options.tensor_parallel > 1 and options.backend != "onnx":
        raise ValueError(
            "tensor_parallel exports one graph a rank (backend onnx); compiling them needs plugins "
            "for their collectives, which this package does not have, see docs/tensorrt.md"
        )


def _plan(
    target: Checkpoint, draft: Checkpoint | None, config: DustinConfig | None, options: Options
) -> Plan:
    draft_spec = draft.spec if draft else None
    config = config or default_config(target.spec, draft_spec)
    if options.gamma is not None:
        config = config.replace(gamma=options.gamma)
    if config.gamma > MAX_GAMMA:
        raise ConfigError(f"gamma {config.gamma} is more than {MAX_GAMMA}: lower it")
    tokenizer = load_tokenizer(target.folder)
    config.check(
        target.spec,
        draft_spec,
        tokenizer_fingerprint(tokenizer),
        weights_fingerprint(target.folder) if config.target_weights else None,
        weights_fingerprint(draft.folder) if draft and config.draft_weights else None,
    )
    if draft and not is_shared_draft(draft.folder):
        check_same_tokenizer(tokenizer, load_tokenizer(draft.folder))
    signal = options.signal or ("hybrid" if draft and config.draft_heads else "history")
    history, lookahead = signal != "lookahead", signal != "history"
    if history and not config.target_heads:
        raise ConfigError("the configuration names no target_heads to score the history with")
    if lookahead and not (draft and config.draft_heads):
        raise ConfigError(
            f"signal {signal!r} needs a draft, and draft_heads in its configuration: calibrate "
            "the pair, or choose signal 'history'"
        )
    positions = min(spec.max_positions for spec in (target.spec, draft_spec) if spec)
    max_context = options.max_context or positions
    if not 1 <= max_context <= positions:
        raise ValueError(
            f"max_context {max_context} is not in 1–{positions}, the models' positions"
        )

    dtype = options.dtype
    if dtype == "auto":
        dtype = str(target.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or (dtype == "float32" and options.backend != "onnx"):
            dtype = "bfloat16"
    max_pages = math.ceil((max_context + MAX_GAMMA) / options.page_size)
    common: dict[str, Any] = {
        "dtype": dtype,
        "page_size": options.page_size,
        "max_pages": max_pages,
        "max_batch": options.max_batch,
        "chunk": min(options.chunk, max_context),
    }
    if config.budget > max_context:
        raise ConfigError(
            f"budget {config.budget} is more than max_context {max_context}: every pass would read "
            "everything; lower the budget or raise max_context"
        )
    reading = Reading(
        budget=config.budget, sink=config.sink, window=config.window,
        lookahead=config.lookahead_tokens, history=history, lookahead_scores=lookahead,
        join=config.join, lookahead_weight=config.lookahead_weight,
    )  # fmt: skip
    targets = tuple(
        _step(
            target, "target", config.target_heads if history else (), reading, options,
            max_window=config.gamma + 1, shard=Shard(rank=rank, size=options.tensor_parallel),
            **common,
        )
        for rank in range(options.tensor_parallel)
    )  # fmt: skip
    draft_step = None
    if draft:
        window = config.draft_window
        # A window that holds every slot is no window.
        whole = not 0 < window < options.page_size * max_pages
        part = None if whole else Reading(budget=window, sink=_DRAFT_SINK)
        heads = config.draft_heads if lookahead else ()
        draft_step = _step(draft, "draft", heads, part, options, max_window=2, **common)
    return Plan(options, target, draft, config, signal, max_context, tokenizer, targets, draft_step)


def _step(
    checkpoint: Checkpoint,
    role: Literal["target", "draft"],
    heads: tuple[Head, ...],
    reading: Reading | None,
    options: Options,
    **sizes: Any,
) -> StepGraph:
    spec: ModelSpec = checkpoint.spec
    if options.backend != "onnx":
        group = spec.num_heads // spec.num_kv_heads
        for name, value, fits, takes in (
            (
                "head size",
                spec.head_dim,
                spec.head_dim in HEAD_DIMS,
                ", ".join(map(str, HEAD_DIMS)),
            ),
            ("query heads a KV head", group, group <= MAX_GROUP, f"up to {MAX_GROUP}"),
            ("retrieval heads of a layer", *_scored(heads), f"up to {MAX_SCORED_HEADS}"),
        ):
            if not fits:
                raise UnsupportedModelError(
                    f"{checkpoint.folder} ({role}): {name} {value} is not supported by the CUDA "
                    f"kernels, which take {takes}"
                )
    try:
        return StepGraph(
            role=role, model=spec, heads=tuple(sorted(heads)), reading=reading, **sizes
        )
    except ValidationError as error:
        raise ConfigError(f"{role}: {one_line(error)}") from error


def _scored(heads: tuple[Head, ...]) -> tuple[int, bool]:
    layers = [layer for layer, _ in heads]
    most = max((layers.count(layer) for layer in layers), default=0)
    return most, most <= MAX_SCORED_HEADS


def _end_tokens(work: Plan) -> tuple[int, ...]:
    try:
        generation = GenerationConfig.from_pretrained(work.target.folder, local_files_only=True)
    except OSError:
        generation = work.target.config
    return tuple(sorted(end_tokens(generation, work.tokenizer)))

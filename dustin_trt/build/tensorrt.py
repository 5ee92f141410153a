"""An exported step compiled by TensorRT or TensorRT-RTX.

In a process of its own: TensorRT's memory is given back when it ends, and TensorRT-RTX's parser
finds the library that it opens by a name which its wheel lacks.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dustin_trt.engines.step_graph import PHASES, StepGraph

Progress = Callable[[str, int, int], None]
"""Called with a phase of TensorRT's, steps done and steps in all."""

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_RTX_LIBRARY = "libtensorrt_rtx.so"


class CompileError(RuntimeError):
    """TensorRT refused a graph; the message has what it said."""


@dataclass(frozen=True)
class Compiled:
    """What was made.

    version : of the compiler
    compute_capability : "9.0"; None where it is not known
    seconds, bytes : time it took, size of the engine
    peak_bytes : most memory the compiler held
    """

    version: str
    compute_capability: str | None
    seconds: float
    bytes: int
    peak_bytes: int


def compile_graph(
    onnx: Path,
    graph: StepGraph,
    output: Path,
    *,
    backend: Literal["tensorrt", "tensorrt-rtx"],
    plugins: Path,
    timing_cache: Path | None = None,
    compute_capability: str | None = None,
    progress: Progress | None = None,
) -> Compiled:
    """Compile a graph; `output` appears whole or not at all.

    Strongly typed, with one profile a phase, in the order of `PHASES`.

    Parameters
    ----------
    onnx : as `build.graph.export` wrote it
    graph : what it is
    plugins : library of the five ops
    timing_cache : of TensorRT; read where it exists, then written
    compute_capability : for TensorRT-RTX, to build for; None the GPU of this machine
    progress : see `Progress`

    Raises
    ------
    ImportError
        The compiler is not installed.
    CompileError
        It refused: the plugins, the graph, or the build.
    ValueError
        No such compute capability.
    OSError
        A full disk, for one.
    """
    job = (str(onnx), graph.model_dump_json(), str(output), backend, str(plugins))
    cache = str(timing_cache) if timing_cache else None
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(
        target=_child, args=(theirs, *job, cache, compute_capability), daemon=True
    )
    with tempfile.TemporaryDirectory() as folder:
        _start(child, backend, Path(folder))
        theirs.close()
        try:
            return _answer(ours, child, backend, progress)
        finally:
            child.terminate()
            child.join()
            _partial(output).unlink(missing_ok=True)


def _answer(connection: Any, child: Any, backend: str, progress: Progress | None) -> Compiled:
    """Hand on what the child says until it is done."""
    while True:
        try:
            kind, what = connection.recv()
        except EOFError:
            child.join()
            raise CompileError(
                f"{backend} ended without a word (exit code {child.exitcode}): out of memory?"
            ) from None
        if kind == "error":
            raise what
        if kind == "done":
            made: Compiled = what
            return made
        if progress:
            progress(*what)


def _start(child: Any, backend: str, folder: Path) -> None:
    """Start a child that finds `libtensorrt_rtx.so`, by that very name, in `folder`."""
    library = _find_rtx() if backend == "tensorrt-rtx" else None
    if library is None:
        child.start()
        return
    (folder / _RTX_LIBRARY).symlink_to(library)
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{before}" if before else str(folder)
    try:
        child.start()
    finally:
        if before is None:
            del os.environ["LD_LIBRARY_PATH"]
        else:
            os.environ["LD_LIBRARY_PATH"] = before


def _find_rtx() -> Path | None:
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    for folder in (spec and spec.submodule_search_locations) or ():
        for found in sorted(Path(folder).glob(f"{_RTX_LIBRARY}*")):
            return found
    return None


def _child(connection: Any, *job: Any) -> None:
    try:
        connection.send(("done", _compile(connection, *job)))
    except KeyboardInterrupt:  # the parent has it as well
        pass
    except Exception as error:
        known = isinstance(error, (ImportError, OSError, ValueError, CompileError))
        # Not every exception can be sent; what it says can.
        connection.send(("error", type(error)(str(error)) if known else CompileError(repr(error))))


def _compile(
    connection: Any,
    onnx: str,
    graph_json: str,
    output: str,
    backend: str,
    plugins: str,
    timing_cache: str | None,
    compute_capability: str | None,
) -> Compiled:
    import resource

    started = time.monotonic()
    graph = StepGraph.model_validate_json(graph_json)
    trt = _import(backend)
    logger = _logger(trt)
    registry = trt.get_plugin_registry()
    if registry.load_library(plugins) is None:
        raise CompileError(f"{backend} cannot load the plugins {plugins}: {logger.last()}")
    last_error = ctypes.CDLL(plugins).dustin_last_error  # of the plugins, which now are loaded
    last_error.restype = ctypes.c_char_p
    builder = trt.Builder(logger)
    flags = trt.NetworkDefinitionCreationFlag
    strongly = 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0
    network = builder.create_network(strongly)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(onnx):
        said = parser.get_error(0)
        raise CompileError(
            f"{backend} refuses {Path(onnx).name} at {said.node_name() or 'its header'} "
            f"({said.node_operator()}): {last_error().decode() or logger.first() or said.desc()}"
        )
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.progress_monitor = monitor = _monitor(trt, connection)  # kept: TensorRT does not
    for phase in PHASES:
        config.add_optimization_profile(_profile(builder, graph, phase))
    if backend == "tensorrt-rtx":
        capability = _choose_capability(trt, config, compute_capability)
    else:
        capability = _own_capability()
    cache = _read_cache(config, timing_cache) if backend == "tensorrt" else None
    engine = builder.build_serialized_network(network, config)
    del monitor
    if engine is None:
        why = last_error().decode() or logger.first()
        raise CompileError(f"{backend} could not build {Path(onnx).name}: {why}")
    partial = _partial(Path(output))
    with partial.open("wb") as file:
        file.write(engine)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(output)
    if timing_cache and cache is not None:
        Path(timing_cache).write_bytes(config.get_timing_cache().serialize())
    return Compiled(
        version=trt.__version__,
        compute_capability=capability,
        seconds=time.monotonic() - started,
        bytes=engine.nbytes,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _import(backend: str) -> Any:
    name = _MODULES[backend]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        how = (
            "pip install 'dustin-trt[tensorrt-rtx]'"
            if backend == "tensorrt-rtx"
            else "use a container with TensorRT 10.14 or newer, see docs/tensorrt.md"
        )
        raise ImportError(f"{backend} is not installed ({error}): {how}", name=name) from error


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):
        """Keeps what TensorRT says of errors."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

        def first(self) -> str:
            return self.errors[0] if self.errors else ""

        def last(self) -> str:
            return self.errors[-1] if self.errors else "no reason given"

    return Logger()


def _monitor(trt: Any, connection: Any) -> Any:
    class Monitor(trt.IProgressMonitor):
        """Hands TensorRT's outermost phases on."""

        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if not parent:
                self.steps[name] = steps
                connection.send(("progress", (name, 0, steps)))

        def phase_finish(self, name: str) -> None:
            if steps := self.steps.pop(name, 0):
                connection.send(("progress", (name, steps, steps)))

        def step_complete(self, name: str, step: int) -> bool:
            if steps := self.steps.get(name):
                connection.send(("progress", (name, min(step + 1, steps), steps)))
            return True

    return Monitor()


def _profile(builder: Any, graph: StepGraph, phase: Any) -> Any:
    profile, sizes = builder.create_optimization_profile(), graph.sizes(phase)
    for name, (_, shape) in graph.inputs.items():
        if any(isinstance(part, str) for part in shape):
            least, usual, most = (
                [getattr(sizes[part], end) if isinstance(part, str) else part for part in shape]
                for end in ("min", "opt", "max")
            )
            profile.set_shape(name, least, usual, most)
    return profile


def _choose_capability(trt: Any, config: Any, wanted: str | None) -> str | None:
    if wanted is None:
        return _own_capability()
    name = f"SM{wanted.replace('.', '')}"
    if not hasattr(trt.ComputeCapability, name):
        known = ", ".join(sorted(n for n in dir(trt.ComputeCapability) if n.startswith("SM")))
        raise ValueError(
            f"TensorRT-RTX does not build for compute capability {wanted}; it builds for {known}"
        )
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, name), 0)
    return wanted


def _own_capability() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return "{}.{}".format(*torch.cuda.get_device_capability())


def _read_cache(config: Any, path: str | None) -> Any:
    if path is None:
        return None
    known = Path(path).read_bytes() if Path(path).is_file() else b""
    cache = config.create_timing_cache(known)
    config.set_timing_cache(cache, False)
    return cache


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial")

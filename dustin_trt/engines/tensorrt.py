"""A step that TensorRT runs, on torch's tensors and torch's stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dustin_trt.engines.step_graph import PHASES, Phase, StepGraph, TensorType, check_inputs
from dustin_trt.engines.tensorrt_device import Gpu, TensorRTError, check_device
from dustin_trt.engines.tensorrt_runtime import Runtime, runtime

__all__ = ["Memory", "TensorRTError", "TensorRTSession", "check_device"]

_TYPES = {
    "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "bool": "BOOL",
}  # fmt: skip
_MOST_CONTEXTS = {"context": 1, "generation": 4}
"""Execution contexts of a phase that wait to run passes of the sizes they ran last."""

Key = tuple[Any, ...]
"""A phase, and what is asked of the inputs of its pass: sizes, types, places."""


class Memory(NamedTuple):
    """What a session takes of a GPU, bytes; `weights` are those of the engine file."""

    weights: int
    activations: int


@dataclass
class _Context:
    """An execution context and what it was told last.

    caches : identity of the caches it is bound to
    """

    context: Any
    addresses: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    caches: object = None


class TensorRTSession:
    """A serialised engine, loaded; see `Session`.

    The engine has the two optimisation profiles of `PHASES`, in that order. An execution context
    keeps the sizes of its last pass, so that the next pass of these sizes sets addresses only. A
    context that ran while a CUDA graph was captured belongs to that graph and is left alone: a
    replay finds it as it was captured. All contexts share the memory for activations, since passes
    never run at once.

    Parameters
    ----------
    engine : the serialised engine
    graph : what it was built from
    plugins : the plugin library
    module : "tensorrt" or "tensorrt_rtx"
    device : a CUDA device
    progress : called with one line before memory is taken, which says how much

    Attributes
    ----------
    memory : what it holds

    Raises
    ------
    ImportError, TensorRTError
        TensorRT, the plugins or the GPU are missing or do not work.
    FileNotFoundError
        There is no such engine.
    MemoryError
        The GPU has not enough memory free.
    ValueError
        The engine is damaged, for another TensorRT or GPU, or was not built from `graph`.
    """

    def __init__(
        self,
        engine: Path,
        graph: StepGraph,
        *,
        plugins: Path,
        module: str = "tensorrt",
        device: torch.device,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        check_device(device)
        self.device = device
        self._path = engine
        self._graph = graph
        self._gpu = Gpu(device)
        self._say = progress or (lambda line: None)
        self._runtime = runtime(module, plugins)
        with self._gpu.stream():
            self._engine = self._load_weights()
            check_engine(self._engine, graph, self._runtime, engine)
            self._activations, self.memory = self._take_activations()
        self._caches: tuple[Tensor, ...] = ()
        self._cache_names = [name for name in graph.inputs if "." in name]
        self._step_names = [name for name in graph.inputs if "." not in name]
        self._all_names = graph.inputs.keys()
        self._outputs = {
            name: (getattr(torch, kind.dtype), kind.shape)
            for name, kind in graph.outputs.items()
            if "." not in name
        }
        self._accepted: set[Key] = set()
        self._waiting: dict[Key, _Context] = {}
        self._capturing: dict[Key, _Context] = {}
        self._captured: list[_Context] = []

    def run(self, phase: Phase, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Session.run`; queued on torch's current stream, and may be captured there.

        A pass is captured after one of the same sizes has run, in which TensorRT prepares for them.

        Raises
        ------
        ValueError
            An input that this phase does not take; nothing was queued then.
        MemoryError, TensorRTError
            TensorRT refuses to run.
        """
        steps = self._accept(phase, inputs)
        key = self._key(phase, inputs)
        context = self._context(key, inputs)
        outputs = {
            name: torch.empty(context.outputs[name], dtype=dtype, device=self.device)
            for name, (dtype, _) in self._outputs.items()
        }
        if context.caches is not self._caches:
            self._bind_caches(context)
        for tensors in (steps, outputs):
            for name, x in tensors.items():
                self._bind(context, name, x.data_ptr())
        with self._gpu.stream() as stream:
            queued = context.context.execute_async_v3(stream)
        if not queued:
            self._waiting.pop(key, None)  # whatever state that left it in
            raise self._failure(f"a pass of the {phase} phase does not run")
        return outputs

    # ---- loading -------------------------------------------------------------------------------

    def _load_weights(self) -> Any:
        if not self._path.is_file():
            raise FileNotFoundError(f"there is no engine {self._path}: build it again")
        weights = self._path.stat().st_size
        if not weights:
            raise ValueError(f"{self._path} is empty: build it again")
        free, total = self._gpu.free()
        self._say(
            f"{self._path.name}: {_size(weights)} of weights onto {self.device}, which has "
            f"{_size(free)} of {_size(total)} free"
        )
        if weights > free:
            raise MemoryError(
                f"{self._path} needs {_size(weights)} for its weights, and more for activations, "
                f"but {self.device} has only {_size(free)} of {_size(total)} free"
            )
        return self._runtime.deserialize(self._path)

    def _take_activations(self) -> tuple[Tensor, Memory]:
        sizes = [
            self._engine.get_device_memory_size_for_profile_v2(i) for i in range(len(PHASES))
        ]  # fmt: skip
        memory = Memory(self._path.stat().st_size, max(sizes))
        free, _ = self._gpu.free()
        self._say(f"{self._path.name}: {_size(max(sizes))} for activations")
        try:
            return self._gpu.allocate(max(sizes)), memory
        except MemoryError as error:
            raise MemoryError(
                f"{self._path} needs {_size(memory.activations)} for activations beside "
                f"{_size(memory.weights)} of weights, but {self.device} has only {_size(free)} "
                "free: build it for fewer rows or shorter chunks"
            ) from error

    # ---- what a pass takes ---------------------------------------------------------------------

    def _accept(self, phase: Phase, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs but for the caches, where TensorRT can read them.

        What was seen before is compared and not checked again: a large model has hundreds of
        caches, and a pass of a few milliseconds.
        """
        known = inputs.keys() == self._all_names and self._key(phase, inputs) in self._accepted
        if not known or any(
            inputs[name] is not x for name, x in zip(self._cache_names, self._caches, strict=False)
        ):
            self._check(phase, inputs)
        alignment = self._gpu.alignment
        steps = {name: inputs[name] for name in self._step_names}
        for name, x in steps.items():
            if x.data_ptr() % alignment:  # a view into something larger
                steps[name] = x.clone()
        return steps

    def _check(self, phase: Phase, inputs: Mapping[str, Tensor]) -> None:
        check_inputs(self._graph, phase, inputs)
        for name, x in inputs.items():
            if x.device != self.device:
                raise ValueError(f"{name} is on {x.device}, this engine on {self.device}")
        caches = {name: inputs[name] for name in self._cache_names}
        for name, x in caches.items():
            if x.data_ptr() % self._gpu.alignment:
                raise ValueError(
                    f"{name} begins at no multiple of {self._gpu.alignment} bytes: make it a "
                    "tensor of its own, no part of another"
                )
            kind, _, layer = name.partition(".")
            if kind == "k_history" and x.data_ptr() != caches[f"k_cache.{layer}"].data_ptr():
                raise ValueError(f"{name} must be the memory of k_cache.{layer}")
        if len(self._caches) != len(caches) or any(
            x is not y for x, y in zip(self._caches, caches.values(), strict=True)
        ):
            self._caches = tuple(caches.values())
        self._accepted.add(self._key(phase, inputs))

    def _key(self, phase: Phase, inputs: Mapping[str, Tensor]) -> Key:
        pages = inputs[self._cache_names[0]].shape[0] if self._cache_names else 0
        steps = (inputs[name] for name in self._step_names)
        return (phase, pages, *((x.shape, x.dtype, x.device, x.is_contiguous()) for x in steps))

    # ---- execution contexts --------------------------------------------------------------------

    def _context(self, key: Key, inputs: Mapping[str, Tensor]) -> _Context:
        """One whose inputs have the sizes of `key`."""
        if self._gpu.capturing():
            if key not in self._capturing:
                if key not in self._waiting:
                    raise TensorRTError(
                        "a pass of these sizes has to run once before a CUDA graph can record it"
                    )
                self._capturing[key] = self._waiting.pop(key)
            return self._capturing[key]
        if self._capturing:
            self._captured += self._capturing.values()
            self._capturing = {}
        context = self._waiting.pop(key, None)
        if context is None:
            phase: Phase = key[0]
            idle = [other for other in self._waiting if other[0] == phase]
            full = len(idle) >= _MOST_CONTEXTS[phase]
            context = self._waiting.pop(idle[0]) if full else self._make_context(phase)
            self._resize(context, inputs)
        self._waiting[key] = context  # the last is the one used last
        return context

    def _make_context(self, phase: Phase) -> _Context:
        trt, profile = self._runtime.trt, PHASES.index(phase)
        self._runtime.forget_errors()
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise self._failure("no execution context can be made")
        try:
            with self._gpu.stream() as stream:
                context.set_optimization_profile_async(profile, stream)
        except RuntimeError as error:
            raise self._failure(f"profile {profile} cannot be chosen") from error
        self._gpu.synchronize()  # passes may be queued on another stream than the profile's
        context.set_device_memory(self._activations.data_ptr(), self._activations.numel())
        return _Context(context)

    def _resize(self, context: _Context, inputs: Mapping[str, Tensor]) -> None:
        self._runtime.forget_errors()
        sizes: dict[int | str, int] = {}
        for name, kind in self._graph.inputs.items():
            shape = tuple(inputs[name].shape)
            sizes |= zip(kind.shape, shape, strict=True)
            if not context.context.set_input_shape(name, shape):
                raise self._failure(f"{name} cannot be {[*shape]}")
        for name, (_, wanted) in self._outputs.items():
            made = tuple(sizes.get(size, size) for size in wanted)
            found = tuple(context.context.get_tensor_shape(name))
            if found != made:
                raise TensorRTError(
                    f"{self._path}: {name} would be {[*found]}, not {[*made]}: build it again"
                )
            context.outputs[name] = found

    def _bind_caches(self, context: _Context) -> None:
        for name, x in zip(self._cache_names, self._caches, strict=True):
            self._bind(context, name, x.data_ptr())
            if not name.startswith("k_history."):
                self._bind(context, f"new_{name}", x.data_ptr())
        context.caches = self._caches

    def _bind(self, context: _Context, name: str, address: int) -> None:
        if context.addresses.get(name) == address:
            return
        if not context.context.set_tensor_address(name, address):
            context.addresses.pop(name, None)
            raise self._failure(f"{name} cannot be at address {address:#x}")
        context.addresses[name] = address

    def _failure(self, what: str) -> Exception:
        error = MemoryError if self._runtime.out_of_memory() else TensorRTError
        said = f"{self._path}: {what}; TensorRT says: {self._runtime.first_error()}"
        self._runtime.forget_errors()
        return error(said)


def check_engine(engine: Any, graph: StepGraph, runtime: Runtime, path: Path) -> None:
    """Refuse an engine that was not built from `graph`.

    Parameters
    ----------
    engine : TensorRT's `ICudaEngine`
    path : where it came from

    Raises
    ------
    ValueError
        Names the tensor that differs, and how.
    """
    trt = runtime.trt
    wanted = {name: ("INPUT", kind) for name, kind in graph.inputs.items()}
    wanted |= {name: ("OUTPUT", kind) for name, kind in graph.outputs.items()}
    found = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    if differ := sorted(wanted.keys() ^ set(found)):
        what = "lacks" if differ[0] in wanted else "has an unknown"
        raise ValueError(f"{path} {what} {differ[0]}: build it again")
    if engine.num_optimization_profiles != len(PHASES):
        raise ValueError(
            f"{path} has {engine.num_optimization_profiles} optimisation profiles, must have one "
            f"each for {' and '.join(PHASES)}: build it again"
        )
    fixed = {
        name for name in graph.sizes("context")
        if all(len({*graph.sizes(phase)[name]}) == 1 for phase in PHASES)
    }  # fmt: skip
    for name, (mode, kind) in wanted.items():
        problems = {
            f"is no {mode.lower()}": engine.get_tensor_mode(name)
            != getattr(trt.TensorIOMode, mode),
            f"is no {kind.dtype}": engine.get_tensor_dtype(name)
            != getattr(trt.DataType, _TYPES[kind.dtype]),
            "is not on the GPU": engine.get_tensor_location(name) != trt.TensorLocation.DEVICE,
        }
        shape = tuple(engine.get_tensor_shape(name))
        problems[f"is {[*shape]}, not {[*kind.shape]}"] = not _fits(shape, kind, fixed)
        if mode == "INPUT" and any(isinstance(size, str) for size in kind.shape):
            for i, phase in enumerate(PHASES):
                ranges = _ranges(kind, graph, phase)
                built = [tuple(x) for x in engine.get_tensor_profile_shape(name, i)]
                problems[f"can be {built} in the {phase} phase, not {ranges}"] = built != ranges
        if wrong := [what for what, problem in problems.items() if problem]:
            raise ValueError(f"{path}: {name} {wrong[0]}: build it again")


def _fits(shape: tuple[int, ...], kind: TensorType, fixed: set[str]) -> bool:
    """Whether an engine's dimensions, -1 where they are open until run time, are those wanted."""
    if len(shape) != len(kind.shape):
        return False
    return all(
        found == -1 or wanted in fixed if isinstance(wanted, str) else found in (-1, wanted)
        for found, wanted in zip(shape, kind.shape, strict=True)
    )


def _ranges(kind: TensorType, graph: StepGraph, phase: Phase) -> list[tuple[int, ...]]:
    """Least, usual and greatest shape of an input."""
    sizes = graph.sizes(phase)
    return [
        tuple(sizes[size][i] if isinstance(size, str) else size for size in kind.shape)
        for i in range(3)
    ]


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"

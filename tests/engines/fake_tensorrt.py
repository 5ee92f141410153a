"""A module in the place of `tensorrt`: its Python API, as far as dustin-trt uses it, on a CPU.

It has TensorRT's manners. Calls that are wrong (unknown tensors, sizes outside of a profile,
addresses missing or odd, no profile, no memory, a shape that changes while a graph is captured)
return False or None and are logged, or raise where the real binding does. An engine file says which
tensors an engine has, and what computes in its place: an exported graph by `OnnxSession`, or
`arithmetic`. Both work on the memory at the addresses that the context was given, and on nothing
else; `WORLD` is the machine: what is free, loaded, captured and on which stream.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dustin_trt.engines import compiled, tensorrt, tensorrt_device, tensorrt_runtime
from dustin_trt.engines.graphs import Outputs
from dustin_trt.engines.manifest import Manifest, Step, artifact
from dustin_trt.engines.plugin_library import NAMESPACE, PLUGINS, VERSION
from dustin_trt.engines.plugin_library import VARIABLE as PLUGINS_VARIABLE
from dustin_trt.engines.step_graph import PHASES, Phase, StepGraph
from tests.runtime.tape import Tape, TapeRecorder, _Looking, _Recording

__version__ = "10.14.1.48"
MAGIC = b"fake engine\n"
CPU = torch.device("cpu")
_GUARD = 0x5A


# ---- the machine -------------------------------------------------------------------------------


@dataclass
class World:
    """The machine.

    free, total : bytes of GPU memory
    capability : of the GPU
    stream : the handle that torch's current stream would have
    creators : (name, version, namespace) of plugins in the registry
    tape : what a graph is being captured on
    calls : (method, arguments) of contexts, in order
    passes : (context's number, phase, shape of input_ids or of the first input) of each execution
    """

    free: int = 1 << 30
    total: int = 1 << 30
    capability: str = "9.0"
    stream: int = 7
    alignment: int = 64
    creators: set[tuple[str, str, str]] = field(default_factory=set)
    tape: Tape | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    passes: list[tuple[int, Phase, tuple[int, ...]]] = field(default_factory=list)
    unsynchronized: set[int] = field(default_factory=set)
    buffers: list[tuple[Tensor, int]] = field(default_factory=list)
    log: Any = None
    starts: bool = True
    reads: list[int] = field(default_factory=list)

    def complain(self, line: str) -> None:
        if self.log is not None:
            self.log.log(ILogger.Severity.ERROR, line)
            self.log.log(ILogger.Severity.INFO, "an aside")

    def called(self, method: str) -> list[Any]:
        """Arguments of the calls of a method."""
        return [arguments for name, arguments in self.calls if name == method]


WORLD = World()


class FakeGpu:
    """In the place of `tensorrt_device.Gpu`; memory is handed out between guards."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def alignment(self) -> int:
        return WORLD.alignment

    def free(self) -> tuple[int, int]:
        return WORLD.free, WORLD.total

    def allocate(self, size: int) -> Tensor:
        if size > WORLD.free:
            raise MemoryError("CUDA out of memory")
        WORLD.free -= size
        whole = torch.full((size + 128,), _GUARD, dtype=torch.uint8)
        WORLD.buffers.append((whole, size))
        return whole[64 : 64 + size]

    def capturing(self) -> bool:
        return WORLD.tape is not None

    @contextmanager
    def stream(self) -> Iterator[int]:
        yield WORLD.stream

    def synchronize(self) -> None:
        WORLD.unsynchronized.clear()


def guards_hold() -> bool:
    """Whether nothing was written beside the memory for activations."""
    return all(
        bool((whole[:64] == _GUARD).all() and (whole[64 + size :] == _GUARD).all())
        for whole, size in WORLD.buffers
    )


# ---- engine files ------------------------------------------------------------------------------


def write_engine(
    path: Path,
    graph: StepGraph,
    onnx: Path | None = None,
    *,
    activations: tuple[int, int] = (3072, 1024),
    weights: int = 4096,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Write what `compile_graph` would have made of a graph.

    Parameters
    ----------
    onnx : what computes; None for `arithmetic`
    change : spoils what is written
    """
    tensors = {}
    for mode, kinds in (("INPUT", graph.inputs), ("OUTPUT", graph.outputs)):
        for name, (dtype, shape) in kinds.items():
            sizes = [graph.sizes(phase) for phase in PHASES]
            tensors[name] = {
                "mode": mode, "dtype": dtype, "location": "DEVICE",
                "shape": [-1 if isinstance(size, str) else size for size in shape],
                "names": [size if isinstance(size, str) else None for size in shape],
                "profiles": [
                    [[of[s][i] if isinstance(s, str) else s for s in shape] for i in range(3)]
                    for of in sizes
                ],
            }  # fmt: skip
    content: dict[str, Any] = {
        "version": __version__, "capability": WORLD.capability, "tensors": tensors,
        "activations": list(activations), "graph": graph.model_dump(mode="json"),
        "onnx": str(onnx) if onnx else None,
    }  # fmt: skip
    if change:
        change(content)
    body = json.dumps(content).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(MAGIC + digest + b"\n" + body + b"\n" + bytes(weights))
    return path


def write_plugins(path: Path, version: str = VERSION, names: tuple[str, ...] = PLUGINS) -> Path:
    """Write what this module takes for the plugin library."""
    path.write_text("\n".join(f"{name} {version} {NAMESPACE}" for name in names), encoding="utf-8")
    return path


def as_tensorrt(folder: Path, output: Path) -> Path:
    """An engine folder for TensorRT of one that was built for onnx, whose graphs compute in it."""
    manifest = Manifest.load(folder)
    shutil.copytree(folder, output, ignore=shutil.ignore_patterns("*.onnx", "*.weights"))
    steps = {
        name: Step(
            graph=step.graph,
            files=(
                artifact(
                    write_engine(output / f"{name}.engine", step.graph, folder / step.files[0].name)
                ),
            ),
        )
        for name, step in (("target", manifest.target[0]), ("draft", manifest.draft))
        if step
    }
    draft = steps.get("draft")
    manifest.model_copy(
        update={"backend": "tensorrt", "target": (steps["target"],), "draft": draft}
    ).save(output)
    return output


@contextmanager
def installed(folder: Path) -> Iterator[World]:
    """TensorRT, a plugin library and a GPU for sessions on `torch.device("cpu")`.

    Parameters
    ----------
    folder : where the plugin library is put, unless there is one
    """
    global WORLD
    before, WORLD = WORLD, World()
    library = folder / "fake_plugins.so"
    if not library.is_file():
        write_plugins(library)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tensorrt", "tensorrt_rtx"):
            patch.setitem(sys.modules, module, sys.modules[__name__])
        patch.setenv(PLUGINS_VARIABLE, str(library))
        patch.setattr(tensorrt, "Gpu", FakeGpu)
        for module in (tensorrt, tensorrt_device):
            patch.setattr(module, "check_device", lambda *_: None)
        patch.setattr(compiled.EngineFolder, "device", lambda *_: CPU)
        tensorrt_runtime.runtime.cache_clear()
        try:
            yield WORLD
            assert guards_hold()
        finally:
            tensorrt_runtime.runtime.cache_clear()
            WORLD = before


# ---- what computes -----------------------------------------------------------------------------

Execution = Callable[[Phase, Mapping[str, Tensor]], dict[str, Tensor]]


def arithmetic(graph: StepGraph) -> Execution:
    """Outputs that depend on every number of every input, and on the phase; caches are written."""

    def run(phase: Phase, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes: dict[int | str, int] = {}
        total = 100.0 * PHASES.index(phase)
        for weight, (name, kind) in enumerate(graph.inputs.items(), 1):
            x = inputs[name]
            sizes |= zip(kind.shape, x.shape, strict=True)
            if name != "read_bound":  # whose numbers nobody reads
                places = torch.arange(1, x.numel() + 1, dtype=torch.float64)
                total += weight * float((places * x.double().flatten()).sum() % 97)
        outputs = {}
        for weight, (name, (dtype, shape)) in enumerate(graph.outputs.items(), 1):
            if "." in name:
                inputs[name.removeprefix("new_")][0] += 1
                continue
            size = [sizes.get(s, s) for s in shape]
            steps = torch.arange(torch.Size(size).numel(), dtype=torch.float64).view(size)
            outputs[name] = (total % 89 + weight + steps).to(getattr(torch, dtype))
        return outputs

    return run


def _execution(content: dict[str, Any]) -> Execution:
    graph = StepGraph.model_validate(content["graph"])
    if content["onnx"] is None:
        return arithmetic(graph)
    from dustin_trt.engines.onnx_session import OnnxSession

    return OnnxSession(Path(content["onnx"]), graph).run


# ---- the API -----------------------------------------------------------------------------------


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def __init__(self) -> None:
        self.ready = True


class DataType(enum.Enum):
    FLOAT = torch.float32
    HALF = torch.float16
    BF16 = torch.bfloat16
    INT32 = torch.int32
    BOOL = torch.bool


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class SeekPosition(enum.Enum):
    SET = 0
    CUR = 1
    END = 2


class IStreamReaderV2:
    def __init__(self) -> None:
        self.ready = True


class Registry:
    def load_library(self, plugin_path: str) -> object | None:
        try:
            lines = Path(plugin_path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            WORLD.complain(f"Unable to load library: {plugin_path}: {error}")
            return None
        found = {tuple(line.split()) for line in lines}
        if found & WORLD.creators:
            WORLD.complain("Attempt to register a plugin that is registered already")
            return None
        WORLD.creators |= found
        return object()

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> object | None:
        if (type, version, plugin_namespace) in WORLD.creators:
            return object()
        WORLD.complain(f"Cannot find plugin: {type}, version: {version}")
        return None


def get_plugin_registry() -> Registry:
    return Registry()


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        assert logger.ready, "ILogger.__init__ was not called"
        WORLD.log = logger
        if not WORLD.starts:
            WORLD.complain("CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def deserialize_cuda_engine(self, reader: Any) -> Engine | None:
        assert reader.ready, "IStreamReaderV2.__init__ was not called"
        # TensorRT looks at the header first, goes back, and reads in large pieces.
        head = _read(reader, len(MAGIC))
        if head != MAGIC:
            WORLD.complain("Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.")
            return None
        if not reader.seek(0, SeekPosition.SET) or not reader.seek(len(MAGIC), SeekPosition.CUR):
            return None
        digest, body = _read(reader, 65)[:-1], b""
        while not body.endswith(b"\n"):
            part = _read(reader, 1)
            if not part:
                WORLD.complain("Unexpected end of the stream")
                return None
            body += part
        if hashlib.sha256(body[:-1]).hexdigest().encode() != digest:
            WORLD.complain("Checksum of the engine does not match")
            WORLD.complain("Cuda Runtime (a consequence)")
            return None
        content = json.loads(body)
        if content["version"] != __version__:
            WORLD.complain(
                "The engine plan file is not compatible with this version of TensorRT, expecting "
                f"library version {__version__} got {content['version']}, please rebuild."
            )
            return None
        if content["capability"] != WORLD.capability:
            WORLD.complain(
                "The engine plan file is generated on an incompatible device, expecting compute "
                f"{WORLD.capability} got compute {content['capability']}, please rebuild."
            )
            return None
        weights = 0
        while part := _read(reader, 1 << 30):
            weights += len(part)
        if weights > WORLD.free:
            WORLD.complain("Error Code 2: OutOfMemory (Requested size was too much)")
            return None
        missing = {(name, VERSION, NAMESPACE) for name in PLUGINS} - WORLD.creators
        if missing:
            WORLD.complain("getPluginCreator could not find plugin")
            return None
        WORLD.free -= weights
        return Engine(content)


def _read(reader: Any, size: int) -> bytes:
    """As the binding does: again and again, until there is enough or nothing."""
    found = b""
    while len(found) < size:
        part = reader.read(size - len(found), WORLD.stream)
        if not part:
            break
        WORLD.reads.append(len(part))
        found += part
    return found


class Engine:
    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.tensors: dict[str, dict[str, Any]] = content["tensors"]
        self.names = list(self.tensors)
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = content.get("num_profiles", len(PHASES))
        self.execution = _execution(content)
        self.contexts = 0

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name]["mode"]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(getattr(torch, self.tensors[name]["dtype"]))

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation[self.tensors[name]["location"]]

    def get_tensor_shape(self, name: str) -> list[int]:
        return self.tensors[name]["shape"]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        return self.tensors[name]["profiles"][profile_index]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self.content["activations"][profile_index]

    def create_execution_context(
        self,
        strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC,
    ) -> Context | None:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED, strategy
        if self.content.get("no_context"):
            WORLD.complain("Error Code 2: OutOfMemory (Requested size was too much)")
            return None
        self.contexts += 1
        return Context(self, self.contexts)


class Context:
    def __init__(self, engine: Engine, number: int) -> None:
        self.engine, self.number = engine, number
        self.profile = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory: tuple[int, int] | None = None
        self.settled = False
        """Whether a pass has run since the shapes or the profile changed."""
        self.captured: Tape | None = None

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._touched()
        WORLD.calls.append(("set_optimization_profile_async", profile_index))
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            WORLD.complain("Profile index out of range")
            raise RuntimeError("Error in set optimization profile async.")
        WORLD.unsynchronized.add(id(self))
        self.profile, self.shapes, self.settled = profile_index, {}, False
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._touched()
        self.memory = (memory, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...] | list[int]) -> bool:
        self._touched()
        assert isinstance(shape, (tuple, list)) and type(shape) in (tuple, list), type(shape)
        WORLD.calls.append(("set_input_shape", (name, tuple(shape))))
        tensor = self.engine.tensors.get(name)
        if tensor is None or tensor["mode"] != "INPUT":
            WORLD.complain(f"Given invalid tensor name: {name}")
            return False
        low, _, high = tensor["profiles"][self.profile]
        if len(shape) != len(low) or not all(
            a <= size <= b for a, size, b in zip(low, shape, high, strict=True)
        ):
            WORLD.complain(f"Static or profile dimension mismatch while setting shape of {name}")
            return False
        if self.shapes.get(name) != tuple(shape):
            self.shapes[name] = tuple(shape)
            self.settled = False
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        tensor = self.engine.tensors[name]
        if tensor["mode"] == "INPUT":
            return self.shapes.get(name, tuple(tensor["shape"]))
        known: dict[str, int] = {}
        for other, shape in self.shapes.items():
            names = self.engine.tensors[other]["names"]
            known |= {n: size for n, size in zip(names, shape, strict=True) if n}
        pairs = zip(tensor["names"], tensor["shape"], strict=True)
        return tuple(known.get(n, -1) if n else size for n, size in pairs)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._touched()
        WORLD.calls.append(("set_tensor_address", (name, memory)))
        if name not in self.engine.tensors:
            WORLD.complain(f"Given invalid tensor name: {name}")
            return False
        if memory % WORLD.alignment:
            WORLD.complain(f"Address of {name} is not aligned")
            return False
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        self._touched()
        assert stream_handle == WORLD.stream, "another stream than torch's current one"
        assert id(self) not in WORLD.unsynchronized, "the profile may not be set yet"
        tensors = self.engine.tensors
        problem = None
        inputs = [name for name, tensor in tensors.items() if tensor["mode"] == "INPUT"]
        needed = self.engine.content["activations"][self.profile]
        if self.engine.content.get("fails"):
            problem = "Error Code 1: Cuda Runtime (an illegal memory access was encountered)"
        for name in tensors:
            if name in inputs and name not in self.shapes:
                problem = f"The shape of {name} was not set"
            elif not self.addresses.get(name):
                problem = f"The address of {name} was not set"
            elif "." in name and self.addresses[name] != self.addresses.get(
                name.removeprefix("new_")
            ):
                problem = f"{name} does not alias its input"
        if self.memory is None or self.memory[1] < needed:
            problem = "User-managed device memory is too small"
        if WORLD.tape is not None and not self.settled:
            problem = "operation not permitted when stream is capturing (shapes have changed)"
        if problem:
            WORLD.complain(problem)
            return False
        phase = PHASES[self.profile]
        # What is queued, or captured; the numbers are those that lie there when it runs.
        memory = {
            name: _tensor(self.addresses[name], self.get_tensor_shape(name), tensor["dtype"])
            for name, tensor in tensors.items()
        }
        assert self.memory is not None
        scratch = _tensor(self.memory[0], (needed,), "uint8")

        def run() -> None:
            scratch.fill_(0xEE)
            outputs = self.engine.execution(phase, {name: memory[name] for name in inputs})
            for name, x in outputs.items():
                memory[name].copy_(x)
            first = next(iter(inputs))
            WORLD.passes.append((self.number, phase, tuple(memory[first].shape)))

        if WORLD.tape is None:
            run()
        else:
            self.captured = WORLD.tape
            WORLD.tape.steps.append((run, (), {}, []))
        self.settled = True
        return True

    def _touched(self) -> None:
        assert self.captured in (None, WORLD.tape), "this context belongs to a captured graph"


def _tensor(address: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """The memory at an address."""
    kind = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=kind).view(shape)


class Recorder(TapeRecorder):
    """Records torch's ops, and what contexts queue between them."""

    def record(self, body: Callable[[], Outputs]) -> Tape:
        WORLD.tape = tape = Tape(pool=self.tapes)
        looking = _Looking()
        try:
            with looking, _Recording(tape, self._known, self.frozen, looking):
                tape.outputs = body()
        finally:
            WORLD.tape = None
        self.tapes.append(tape)
        return tape

"""Parts of a step recorded once as CUDA graphs and replayed over new inputs.

A step of decoding is thousands of small launches; at a few rows, queueing them one by one takes
longer than they run. A graph queues them all at once. What it replays are the launches, not the
Python that made them: sizes, numbers and addresses stay as they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, ...]
Body = Callable[..., Outputs]
"""A part of a step: named input tensors in, outputs out.

To be recorded it must not look at what its tensors hold (`int`, `tolist`, boolean masks, …) nor
make tensors of Python numbers, and running it twice must be the same as once: it runs to warm up,
and then again. Tensors that it reaches past its inputs (weights, caches) stay where they are.
"""


class Recording(Protocol):
    """A recorded body."""

    @property
    def outputs(self) -> Outputs:
        """What the body returned, in memory that every replay writes."""
        ...

    def replay(self) -> None:
        """Run what was recorded."""
        ...


class Recorder(Protocol):
    """What records: CUDA, or a test's imitation."""

    def warm_up(self, body: Callable[[], Outputs]) -> None:
        """Run `body` for whatever happens at a first run only."""
        ...

    def record(self, body: Callable[[], Outputs]) -> Recording:
        """Record `body` without running it."""
        ...


class Graphs(Protocol):
    """How an engine runs the parts of its steps.

    fixed : whether parts are recorded, and must be bodies as `Body` says. Otherwise they may look
        at the data to do less, which is faster where looking costs nothing, on a CPU.
    """

    fixed: bool

    def run(self, key: Hashable, body: Body, inputs: Mapping[str, Tensor]) -> Outputs:
        """`body(**inputs)`; `key` is all that shapes the body but its inputs' shapes and types."""
        ...


class NoGraphs:
    """Run everything as it comes."""

    fixed = False

    def run(self, key: Hashable, body: Body, inputs: Mapping[str, Tensor]) -> Outputs:
        """See `Graphs.run`."""
        return body(**inputs)


@dataclass(frozen=True)
class _Graph:
    inputs: dict[str, Tensor]
    recording: Recording


class StepGraphs:
    """Record a body at its first run, replay it at every later one.

    A body that runs others inside has them recorded as parts of it. There is one graph for every
    key and shape: batches shrink as rows finish, so at most `max_batch_size` of each kind.

    Parameters
    ----------
    recorder : what records; the engines of one decoder share one, for the sake of its memory
    """

    fixed = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._graphs: dict[Hashable, _Graph] = {}
        self._recording = False

    @property
    def recordings(self) -> list[Recording]:
        """What was recorded so far."""
        return [graph.recording for graph in self._graphs.values()]

    @torch.inference_mode()
    def run(self, key: Hashable, body: Body, inputs: Mapping[str, Tensor]) -> Outputs:
        """See `Graphs.run`."""
        if self._recording:
            return body(**inputs)
        key = (key, *((name, x.shape, x.dtype) for name, x in inputs.items()))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._record(body, inputs)
        for name, x in inputs.items():
            graph.inputs[name].copy_(x)
        graph.recording.replay()
        # The next replay writes the same memory, and so may that of any other graph: they share a
        # pool. What the caller keeps, history queries or an index list, must not change with it.
        return tuple(x if x is None else x.clone() for x in graph.recording.outputs)

    def _record(self, body: Body, inputs: Mapping[str, Tensor]) -> _Graph:
        static = {
            name: x.clone(memory_format=torch.contiguous_format) for name, x in inputs.items()
        }
        self._recording = True
        try:
            self._recorder.warm_up(lambda: body(**static))
            recording = self._recorder.record(lambda: body(**static))
        finally:
            self._recording = False
        return _Graph(static, recording)


class CudaRecorder:
    """Records with torch's own CUDA graphs.

    They and not those of `cuda-python`: torch's allocator must know that memory handed out while
    recording belongs to the graph for good.

    Parameters
    ----------
    device : a CUDA device
    count_launches : keep what `CudaRecording.kernels` counts, at the cost of some memory
    """

    def __init__(self, device: torch.device, *, count_launches: bool = False) -> None:
        self._device = device
        self._count_launches = count_launches
        self._stream = torch.cuda.Stream(device)
        # One pool for all: what one graph no longer needs inside serves the next. Each graph's
        # outputs may be overwritten by any other's replay, hence the clones in `StepGraphs.run`.
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, body: Callable[[], Outputs]) -> None:
        """See `Recorder.warm_up`; on a stream aside, as torch asks."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                body()
            current.wait_stream(self._stream)

    def record(self, body: Callable[[], Outputs]) -> CudaRecording:
        """See `Recorder.record`."""
        options = {"keep_graph": True} if self._count_launches else {}
        graph = torch.cuda.CUDAGraph(**options)
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
        ):
            outputs = body()
        return CudaRecording(graph, outputs)


@dataclass(frozen=True)
class CudaRecording:
    """See `Recording`."""

    graph: torch.cuda.CUDAGraph
    outputs: Outputs

    def replay(self) -> None:
        """See `Recording.replay`."""
        self.graph.replay()

    def kernels(self) -> int:
        """Kernels that a replay launches, counted through `cuda-python`.

        Raises
        ------
        ImportError
            Without `cuda-python`.
        RuntimeError
            Recorded without `count_launches`, or refused by the CUDA runtime.
        """
        from cuda.bindings import runtime

        raw = runtime.cudaGraph_t(init_value=self.graph.raw_cuda_graph())

        def asked(answer: tuple) -> tuple:
            if answer[0] != runtime.cudaError_t.cudaSuccess:
                raise RuntimeError(f"counting a graph's kernels: {answer[0]}")
            return answer[1:]

        _, count = asked(runtime.cudaGraphGetNodes(raw))
        nodes, _ = asked(runtime.cudaGraphGetNodes(raw, count))
        kinds = [asked(runtime.cudaGraphNodeGetType(node))[0] for node in nodes or ()]
        return kinds.count(runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel)

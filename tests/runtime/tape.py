"""CUDA graphs imitated on a CPU: ops on a tape, run again without the Python around them.

What holds of CUDA holds here:

- recording runs nothing: what would be computed reads as 0, nothing is written past it;
- what would wait for the GPU, or copy from the host, is refused while recording;
- a replay uses the very memory that was recorded: the inputs' places, the caches, and outputs that
  are overwritten, by this graph's next replay and by any other's, which share its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dustin_trt import ops
from dustin_trt.engines.graphs import Outputs
from dustin_trt.models import _glue
from dustin_trt.runtime import llm

aten = torch.ops.aten


class RefusedError(RuntimeError):
    """What a CUDA graph could not have recorded."""


_LOOKS = {
    aten._local_scalar_dense, aten.nonzero, aten.nonzero_static, aten.masked_select, aten.equal,
    aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.is_nonzero,
    aten.bincount, aten.argwhere,
}  # fmt: skip
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}
_TO_HOST = {"tolist", "numpy", "cpu", "__array__", "item", "__dlpack__"}


def _tensors(*trees: Any) -> list[Tensor]:
    """Every tensor but weights in oneDNN's layout, which have no storage and never change."""
    leaves = (leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if not leaf.is_mkldnn]


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _shaped(func: Any, args: tuple, kwargs: dict) -> Any:
    """Zeros where an op would return something."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = tree_map(lambda x: mode.from_tensor(x) if torch.is_tensor(x) else x, args)
        result = func(*fakes, **kwargs)
    return tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype), result)


@dataclass
class Tape:
    """One recorded graph.

    steps : (op, arguments, keyword arguments, tensors that it writes anew)
    made : places of memory that the graph itself owns
    """

    steps: list[tuple[Any, tuple, dict, list[Tensor]]] = field(default_factory=list)
    outputs: Outputs = ()
    made: set[int] = field(default_factory=set)
    pool: list[Tape] = field(default_factory=list)
    replays: int = 0

    @torch.inference_mode()
    def replay(self) -> None:
        for tape in self.pool:
            for x in tape.outputs:
                if x is not None and _place(x) in tape.made:
                    x.fill_(torch.nan if x.is_floating_point() else 77)
        self.replays += 1
        for op, arguments, named, written in self.steps:
            result = op(*arguments, **named)
            for place, new in zip(written, _tensors(result), strict=bool(written)):
                place.copy_(new)


class TapeRecorder:
    """A `Recorder` whose graphs are tapes.

    Parameters
    ----------
    frozen : tensors to record as they are now in place of their memory, to see a test notice it
    """

    def __init__(self, frozen: Callable[[Tensor], bool] = lambda _: False) -> None:
        self.frozen = frozen
        self.tapes: list[Tape] = []
        self._known: dict[int, Tensor] = {}

    def warm_up(self, body: Callable[[], Outputs]) -> None:
        with _Watching(self._known):
            body()

    def record(self, body: Callable[[], Outputs]) -> Tape:
        tape = Tape(pool=self.tapes)
        looking = _Looking()
        with looking, _Recording(tape, self._known, self.frozen, looking):
            tape.outputs = body()
        self.tapes.append(tape)
        return tape


class _Watching(TorchDispatchMode):
    """Remembers the tensors that ops find, and did not make."""

    def __init__(self, known: dict[int, Tensor]) -> None:
        super().__init__()
        self.known = known
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for x in _tensors(args, kwargs):
            if _place(x) not in self._made:
                self.known[_place(x)] = x
        result = func(*args, **kwargs)
        for x in _tensors(result):
            if _place(x) not in self.known:
                self._made[_place(x)] = x
        return result


class _Looking(TorchFunctionMode):
    """Refuses what reads a tensor's numbers into Python."""

    inside = False  # of an op, which may: it is what would run on the GPU

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.inside and getattr(func, "__name__", "") in _TO_HOST:
            raise RefusedError(f"{func.__name__} while recording")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    def __init__(self, tape, known, frozen, looking) -> None:
        super().__init__()
        self._tape, self._known, self._frozen, self._looking = tape, known, frozen, looking
        self._copies: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        self._refuse(func, args, kwargs)
        writes = [
            i for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]  # fmt: skip
        self._looking.inside = True
        try:
            return self._step(func, args, kwargs, writes)
        finally:
            self._looking.inside = False

    def _step(self, func, args, kwargs, writes):
        recorded = tree_map(self._as_recorded, (args, kwargs))
        if writes:  # nothing runs: what is written is what there is
            self._tape.steps.append((func, *recorded, []))
            written = [args[i] if i < len(args) else kwargs[func._schema.arguments[i].name]
                       for i in writes]  # fmt: skip
            returned = len(func._schema.returns)
            return None if returned == 0 else written[0] if returned == 1 else tuple(written)
        if func.namespace == "dustin":  # which would check its arguments' numbers
            result = _shaped(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        read = {_place(x) for x in _tensors(args, kwargs)}
        outputs = _tensors(result)
        fresh = [x for x in outputs if _place(x) not in read]
        self._kept += outputs
        if not fresh:  # views
            return result
        assert len(fresh) == len(outputs), f"{func} returns views and copies"
        for x in fresh:
            x.zero_()
            self._tape.made.add(_place(x))
        self._tape.steps.append((func, *recorded, fresh))
        return result

    def _as_recorded(self, x):
        if not isinstance(x, Tensor) or not self._frozen(x):
            return x
        return self._copies.setdefault(x.data_ptr(), x.clone())

    def _refuse(self, func, args, kwargs) -> None:
        if func.overloadpacket in _LOOKS:
            raise RefusedError(f"{func} waits for the GPU")
        if func.overloadpacket in _INDEXED and any(
            x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1])
        ):
            raise RefusedError(f"{func} by a mask waits for the GPU")
        for x in _tensors(args, kwargs):
            if x.numel() and _place(x) not in self._tape.made and _place(x) not in self._known:
                raise RefusedError(f"{func} reads a tensor made of Python numbers: {x}")


@contextmanager
def visible_ops() -> Iterator[None]:
    """Every op through torch's dispatcher, where a tape sees it; plain torch between products."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ops.__all__:
            patch.setattr(ops, name, getattr(torch.ops.dustin, name))
        patch.setattr(_glue, "_native", lambda x: False)
        yield


@contextmanager
def recording(recorder: TapeRecorder) -> Iterator[TapeRecorder]:
    """Every `LLM` made meanwhile records its steps on tapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "make_recorder", lambda target, draft: recorder)
        yield recorder

"""A graph run by ONNX's reference evaluator on any CPU: to check exports, not for speed.

Every node is computed by NumPy as the standard says, the five ops by `dustin_trt.ops` on the
arrays' own memory. So what TensorRT is given can be run, token by token, where no TensorRT is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dustin_trt import ops
from dustin_trt.engines.step_graph import Phase, StepGraph, check_inputs

try:
    import ml_dtypes
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun
except ImportError as error:
    raise ImportError(
        f"graphs need onnx ({error}): pip install 'dustin-trt[export]'", name=error.name
    ) from error


def to_torch(array: np.ndarray) -> Tensor:
    """The array's own memory as a tensor; NumPy knows bfloat16 by `ml_dtypes` only."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory as an array."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


class _Op(OpRun):
    op_domain = "dustin"

    def _run(self, *inputs: np.ndarray, **fields: Any) -> tuple[np.ndarray, ...]:
        for name in ("plugin_version", "plugin_namespace"):
            fields.pop(name)
        # Arrays of an evaluator may be views with any strides; the kernels want dense rows.
        tensors = [to_torch(np.ascontiguousarray(x)) for x in inputs[: self.copied]]
        tensors += [to_torch(x) for x in inputs[self.copied :]]
        return tuple(to_numpy(x) for x in self.compute(*tensors, **fields))

    copied: int
    """Inputs at the front that may be copied; behind them are caches, written in place."""

    @staticmethod
    def compute(*inputs: Tensor, **fields: Any) -> Sequence[Tensor]:
        raise NotImplementedError


class DustinKvAppend(_Op):
    """k, v, k_cache, v_cache, page_table, lengths → the caches."""

    copied = 2

    @staticmethod
    def compute(*inputs: Tensor, **fields: Any) -> Sequence[Tensor]:
        k, v, k_cache, v_cache, page_table, lengths = inputs
        ops.kv_append(k, v, k_cache, v_cache, page_table, lengths)
        return k_cache, v_cache


class DustinSrhScore(_Op):
    """queries, page_table, lengths, scores to add to where `accumulate`, key caches → scores."""

    copied = 1

    @staticmethod
    def compute(*inputs: Tensor, **fields: Any) -> Sequence[Tensor]:
        queries, page_table, lengths, *caches = inputs
        if fields.get("accumulate"):
            scores = caches.pop(0).clone()
        else:
            width = page_table.shape[1] * caches[0].shape[2]
            scores = torch.zeros(len(lengths), width)
        kv_heads, first = list(fields["kv_heads"]), 0
        for cache, count in zip(caches, fields["heads_per_cache"], strict=True):
            last = first + count
            asked, read = queries[:, :, first:last], kv_heads[first:last]
            ops.srh_score(asked, read, cache, page_table, lengths, fields["scale"], scores)
            first = last
        assert first == len(kv_heads)
        return (scores,)


class DustinSelectTokens(_Op):
    """lengths, scores and draft's scores where there are any → indices, counts."""

    copied = 3

    @staticmethod
    def compute(*inputs: Tensor, **fields: Any) -> Sequence[Tensor]:
        lengths, scores, draft_scores = (*inputs, None, None)[:3]
        sizes = [fields[name] for name in ("budget", "lookahead", "sink", "window")]
        return ops.select_tokens(scores, draft_scores, lengths, *sizes)


class DustinSparseAttention(_Op):
    """q, k_cache, v_cache, page_table, lengths, indices, counts, read_bound → out."""

    copied = 1

    @staticmethod
    def compute(*inputs: Tensor, **fields: Any) -> Sequence[Tensor]:
        *where, read_bound = inputs
        return ops.sparse_attention(*where, fields["scale"], len(read_bound))[:1]


class DustinDenseAttention(_Op):
    """q, k_cache, v_cache, page_table, lengths → out."""

    copied = 1

    @staticmethod
    def compute(*inputs: Tensor, **fields: Any) -> Sequence[Tensor]:
        return ops.dense_attention(*inputs, fields["scale"])[:1]


OPS = (
    DustinKvAppend, DustinSrhScore, DustinSelectTokens, DustinSparseAttention, DustinDenseAttention
)  # fmt: skip


class OnnxSession:
    """See `Session`.

    Parameters
    ----------
    path : ONNX file, its weights beside it
    graph : what is in it
    collectives : classes of `OpRun` for a shard's AllReduce and AllGather

    Raises
    ------
    FileNotFoundError, ValueError
        No such file, or one that is damaged.
    """

    device = torch.device("cpu")

    def __init__(
        self, path: Path, graph: StepGraph, collectives: Sequence[type[OpRun]] = ()
    ) -> None:
        self._graph = graph
        if not path.is_file():
            raise FileNotFoundError(f"there is no graph {path}: build it again")
        try:
            model = onnx.load(path)
        except Exception as error:  # protobuf, onnx and the file system raise what they like
            raise ValueError(f"{path} cannot be read, build it again: {error}") from error
        self._evaluator = ReferenceEvaluator(model, new_ops=[*OPS, *collectives])
        self._wanted = [name for name in graph.outputs if not name.startswith("new_k_cache.")]
        self._wanted = [name for name in self._wanted if not name.startswith("new_v_cache.")]

    def run(self, phase: Phase, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Session.run`."""
        check_inputs(self._graph, phase, inputs)
        arrays = {name: to_numpy(x) for name, x in inputs.items()}
        outputs = self._evaluator.run(self._wanted, arrays)
        return {
            name: to_torch(np.ascontiguousarray(x))
            for name, x in zip(self._wanted, outputs, strict=True)
        }

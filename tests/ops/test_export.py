from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dustin_trt import ops
from tests.ops.paged import paged, queries

LENGTHS, W, HEADS, KV_HEADS, DIM = [9, 0, 4], 3, 6, 2, 16


def _inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    cache = paged([n + W for n in LENGTHS], KV_HEADS, DIM, page_size=5, dtype=dtype)
    return {
        "q": queries(3, W, HEADS, DIM, dtype=dtype),
        "k": queries(3, W, KV_HEADS, DIM, dtype=dtype, seed=2),
        "v": queries(3, W, KV_HEADS, DIM, dtype=dtype, seed=3),
        "k_cache": cache.k_cache.nan_to_num(),
        "v_cache": cache.v_cache.nan_to_num(),
        "page_table": cache.page_table,
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
    }


def _arguments(name: str, dtype: torch.dtype) -> tuple:
    x = _inputs(dtype)
    where = (x["k_cache"], x["v_cache"], x["page_table"], x["lengths"])
    scores = torch.rand(2, 3, 12, generator=torch.Generator().manual_seed(4))
    indices = torch.tensor([[0, 3, 7], [-1, -1, -1], [0, 2, -1]], dtype=torch.int32)
    counts = torch.tensor([3, 0, 2], dtype=torch.int32)
    return {
        "kv_append": (x["k"], x["v"], *where),
        "srh_score": (x["q"], [h // 3 for h in range(HEADS)], x["k_cache"], x["page_table"],
                      x["lengths"], 0.25, scores[0]),
        "select_tokens": (*scores, x["lengths"], 5, 2, 1, 1),
        "sparse_attention": (x["q"], *where, indices, counts, 0.25),
        "dense_attention": (x["q"], *where, 0.25),
    }[name]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ops.__all__)
def test_schema_and_shape_function_tell_the_truth(name, dtype):
    torch.library.opcheck(
        getattr(torch.ops.dustin, name).default,
        _arguments(name, dtype),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("present", ["target", "draft", "neither"])
def test_select_tokens_takes_missing_scores(present):
    scores = torch.rand(3, 12, generator=torch.Generator().manual_seed(4))
    torch.library.opcheck(
        torch.ops.dustin.select_tokens.default,
        (
            scores if present == "target" else None,
            scores if present == "draft" else None,
            torch.tensor(LENGTHS, dtype=torch.int32), 5, 2, 1, 1,
        ),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


class Layer(nn.Module):
    """A whole step: append, score, select, read sparsely, and densely beside it."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
        page_table: Tensor, lengths: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        where = (k_cache, v_cache, page_table, lengths)
        ops.kv_append(k, v, *where)
        scores = q.new_zeros((q.shape[0], 12), dtype=torch.float32)
        ops.srh_score(q[:, -1:, :2], [0, 0], k_cache, page_table, lengths, 0.25, scores)
        indices, counts = ops.select_tokens(scores, None, lengths, 5, 0, 1, 1)
        sparse, lse = ops.sparse_attention(q, *where, indices, counts, 0.25)
        dense, _ = ops.dense_attention(q, *where, 0.25)
        return sparse, lse, dense, scores, indices, counts


def _export(dynamic: bool, *, strict: bool = False) -> torch.export.ExportedProgram:
    shapes = None
    if dynamic:
        rows = torch.export.Dim("rows", min=2, max=64)
        shapes = {name: None if name.endswith("cache") else {0: rows} for name in _inputs()}
    return torch.export.export(
        Layer(), tuple(_inputs().values()), dynamic_shapes=shapes, strict=strict
    )


def _called(program: torch.export.ExportedProgram) -> list[str]:
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    return [t.split(".")[1] for t in targets if t.startswith("dustin.")]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic batch"])
def test_exported_graph_keeps_the_ops_and_their_results(dynamic):
    program = _export(dynamic)
    assert _called(program) == [
        "kv_append", "srh_score", "select_tokens", "sparse_attention", "dense_attention",
    ]  # fmt: skip
    eager, exported = _inputs(), _inputs()
    expected = Layer()(*eager.values())
    actual = program.module()(*exported.values())
    for right, result in zip(expected, actual, strict=True):
        assert torch.equal(right, result)
    assert torch.equal(eager["k_cache"], exported["k_cache"])
    assert not torch.equal(eager["k_cache"], _inputs()["k_cache"])


def test_dynamo_keeps_the_ops():
    """It traces through what plain tensors take as a shortcut."""
    assert len(_called(_export(False, strict=True))) == len(ops.__all__)


def test_exported_graph_runs_another_batch_size():
    inputs = {name: x if name.endswith("cache") else x[:2] for name, x in _inputs().items()}
    expected = Layer()(*(x.clone() for x in inputs.values()))
    for right, result in zip(expected, _export(True).module()(*inputs.values()), strict=True):
        assert torch.equal(right, result)

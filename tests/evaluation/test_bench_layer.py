"""`bench attention` and `bench overhead`, on shapes so small that nothing can be timed."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from dustin_trt import ops
from dustin_trt.evaluation import machine
from dustin_trt.evaluation.bench import bandwidth, plots, shapes
from dustin_trt.evaluation.bench.attention import LayerSettings, run_attention
from dustin_trt.evaluation.bench.baselines import causal_mask, gather_sdpa, sdpa
from dustin_trt.evaluation.bench.caches import CacheRing
from dustin_trt.evaluation.bench.layer import Scoring
from dustin_trt.evaluation.bench.overhead import ESTIMATIONS, run_overhead
from dustin_trt.evaluation.bench.report import BenchmarkError
from dustin_trt.evaluation.bench.tables import print_report
from dustin_trt.evaluation.bench.timing import Spread, take_turns
from tests.ops.paged import queries

TINY = shapes.Shape("tiny", "llama", 5, 4, 2, 64, 256, 512, 128, 1024, 1e4, True)
TINIER = shapes.Shape("tinier", "llama", 3, 2, 1, 64, 128, 256, 128, 1024, 1e4, True)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Small shapes, and a processor whose cache is small too."""
    monkeypatch.setattr(machine, "last_level_cache", lambda: 2**16)
    for shape in (TINY, TINIER):
        monkeypatch.setitem(shapes.SHAPES, shape.name, shape)


def settings(**changes):
    given = {
        "shapes": ("tiny",), "contexts": (96, 192), "batches": (2,), "budgets": (32, 64),
        "dtype": "float32", "target": Scoring(4, 2), "draft": Scoring(2, 3), "rounds": 3,
    }  # fmt: skip
    return LayerSettings(**{**given, **changes})


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


@pytest.mark.parametrize("draft_shape", [None, "tinier"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_rows_carry_what_is_promised(console, draft_shape, dtype, tmp_path):
    report = run_attention(settings(draft_shape=draft_shape, dtype=dtype), console)
    file = report.write_json(tmp_path)
    assert file.name == f"{report.label}.json" and machine.slug() in file.name
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["machine"]["torch"] == torch.__version__ and record["machine"]["kernels"]
    rows = record["rows"]
    where = [(row["context"], row["batch"], row["budget"]) for row in rows]
    assert where == [(96, 2, 32), (96, 2, 64), (192, 2, 32), (192, 2, 64)]
    calls = {"sdpa", "dense", "history", "select", "sparse", "gather", "stream", "random"}
    calls |= {"lookahead"} if draft_shape else set()
    derived = {"estimation_per_layer", "selection_per_layer", "dustin"}
    for row in rows:
        assert set(row["median_ms"]) == set(row["quartiles_ms"]) == calls | derived
        assert set(row["gb_per_s"]) == calls - {"select"}
        assert set(row["share_of_roofline"]) == calls - {"select", "stream", "random"}
        low, high = row["speedup_quartiles"]
        assert low <= row["speedup"] <= high
        assert row["speedup_bound"] == pytest.approx(row["context"] / row["budget"])
        median = row["median_ms"]
        assert row["baseline"] == min(("sdpa", "dense"), key=median.__getitem__)
        assert row["sparse_over_gather"] > 0


def test_a_layer_bears_its_share_of_what_happens_once_a_step(console):
    (row,) = run_attention(
        settings(contexts=(96,), budgets=(32,), draft_shape="tinier"), console
    ).rows
    median, layers = row["median_ms"], TINY.num_layers
    scored = median["history"] + median["lookahead"]
    assert median["estimation_per_layer"] == pytest.approx(scored / layers, rel=0.5)
    assert median["selection_per_layer"] == pytest.approx(median["select"] / layers)


def test_overhead_rows_carry_what_is_promised(console):
    report = run_overhead(settings(draft_shape="tinier", budgets=(32,)), console)
    assert [(row["context"], row["batch"]) for row in report.rows] == [(96, 2), (192, 2)]
    for row in report.rows:
        assert set(row["share"]) == {*ESTIMATIONS, "select"}
        assert set(row["median_ms"]) == {"full", *ESTIMATIONS, "select"}
        assert row["speedup"] > 0 and row["baseline"] in ("sdpa", "dense")


@pytest.mark.parametrize("run", [run_attention, run_overhead])
def test_table_and_picture(console, run, tmp_path):
    report = run(settings(draft_shape="tinier"), console)
    print_report(report, console)
    printed = console.file.getvalue()
    assert "tiny, batch 2" in printed and "192" in printed and "Machine:" in printed
    assert plots.draw(report, tmp_path / "plot").read_bytes().startswith(b"\x89PNG")


def _wrong(op):
    """The op, a tenth off."""

    def wrong(*args):
        result = op(*args)
        if result is None:  # it writes into its last argument
            args[-1][:] *= 1.1
            return None
        return (result[0] * 1.1, result[1])

    return wrong


@pytest.mark.parametrize("name", ["dense_attention", "sparse_attention", "srh_score"])
@pytest.mark.parametrize("run", [run_attention, run_overhead])
def test_a_wrong_op_ends_the_benchmark(console, monkeypatch, run, name):
    monkeypatch.setattr(ops, name, _wrong(getattr(ops, name)))
    with pytest.raises(BenchmarkError, match=rf"{name}.*differs from the reference by \d+\.\d%"):
        run(settings(draft_shape="tinier"), console)


def test_a_wrong_selection_ends_the_benchmark(console, monkeypatch):
    def wrong(*args):
        indices, counts = select(*args)
        indices[-1, 5] -= 1
        return indices, counts

    select = ops.select_tokens
    monkeypatch.setattr(ops, "select_tokens", wrong)
    with pytest.raises(BenchmarkError, match="select_tokens differs"):
        run_attention(settings(), console)


def test_a_wrong_baseline_ends_the_benchmark(console, monkeypatch):
    from dustin_trt.evaluation.bench import layer

    monkeypatch.setattr(layer, "sdpa", lambda *args: sdpa(*args) * float("nan"))
    with pytest.raises(BenchmarkError, match="torch SDPA differs"):
        run_attention(settings(), console)


def test_what_finds_no_memory_is_left_out(console, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 1_000_000)
    report = run_attention(settings(contexts=(96, 960)), console)
    assert {row["context"] for row in report.rows} == {96}
    assert "left out: tiny with --context 960 --batch 2" in console.file.getvalue()
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(MemoryError, match="--context 192 --batch 2"):
        run_attention(settings(), console)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"budgets": (20,)}, "--budget 20"),
        ({"budgets": (96,)}, "--budget 96 reads all of --context 96"),
        ({"target": Scoring(5, 1)}, "--heads 5"),
        ({"target": Scoring(4, 6)}, "--layers 6"),
        ({"draft_shape": "tinier", "draft": Scoring(3, 1)}, "--draft-heads 3"),
    ],
)
def test_settings_that_mean_nothing_are_refused(console, changes, flag):
    with pytest.raises(ValueError, match=flag):
        run_attention(settings(**changes), console)


def test_baselines_are_the_reference():
    k, v = (queries(2, 2, 45, 64, seed=seed) for seed in (2, 3))
    q = queries(2, 5, 4, 64)
    pages, lengths = torch.tensor([[0], [1]]).int(), torch.tensor([40, 40]).int()
    whole = ops.dense_attention(q, k, v, pages, lengths, 0.125)[0]
    torch.testing.assert_close(sdpa(q, k, v, causal_mask(2, 5, 45, q.dtype), 0.125), whole)
    chosen = torch.tensor([[0, 3, 20], [1, 2, 39]]).int()
    counts = torch.tensor([3, 3]).int()
    part = ops.sparse_attention(q, k, v, pages, lengths, chosen, counts, 0.125)[0]
    mask = causal_mask(2, 5, 8, q.dtype)
    torch.testing.assert_close(gather_sdpa(q, k, v, mask, 0.125, chosen), part)


def test_the_ring_is_larger_than_the_cache_and_has_no_equal_rows():
    ring = CacheRing(TINY, 96, 2, 5, torch.bfloat16)
    first = ring.turn()
    assert sum(x.nbytes for x in (*ring.k, *ring.v)) >= 4 * machine.last_level_cache()
    assert len({x.data_ptr() for x in (*ring.k, *ring.v)}) == 2 * len(ring.k)
    assert first[0].shape == (2, 2, 101, 64) and ring.turn()[0] is not first[0]
    rows = torch.cat([x.view(-1, 64) for x in (*ring.k, *ring.v)])
    assert len(rows.unique(dim=0)) == len(rows)
    assert abs(float(rows.float().std()) - 1) < 0.05


def test_random_rows_are_distinct_tokens_of_every_head():
    rows = bandwidth.random_rows(context=50, batch=2, kv_heads=3, capacity=55, count=10)
    tokens = rows.view(2, 3, 10) - 55 * torch.arange(6).view(2, 3, 1)
    assert (tokens == tokens[:, :1]).all()
    assert (tokens >= 0).all() and (tokens < 50).all() and (tokens.diff() > 0).all()


def test_turns_are_taken_and_the_warm_up_is_not_timed():
    calls = []
    groups = [
        {"a": lambda: calls.append("a")},
        {"b": lambda: calls.append("b"), "c": lambda: calls.append("c")},
    ]
    rounds = []
    seconds = take_turns(groups, 2, after_round=lambda: rounds.append(1))
    assert calls == ["b", "c", "a", "a", "b", "c", "b", "c", "a"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2, "c": 2}
    assert len(rounds) == 3


def test_quartiles():
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3, 2, 4)
    assert Spread.of([2.0]) == Spread(2, 2, 2)


def test_shapes_have_the_parameters_of_their_names():
    billions = {name: shape.parameters / 1e9 for name, shape in shapes.SHAPES.items()}
    for name, expected in (
        ("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.62), ("qwen2.5-14b", 14.8),
        ("qwen2.5-32b", 32.8), ("qwen2.5-72b", 72.7), ("llama-3.x-1b", 1.24),
        ("llama-3.x-8b", 8.03), ("llama-3.x-70b", 70.6), ("smollm2-135m", 0.1345),
    ):  # fmt: skip
        assert billions[name] == pytest.approx(expected, rel=0.01), name
    assert shapes.SHAPES["qwen2.5-72b"].spread_heads(4) == [0, 16, 32, 48]
    assert shapes.small_draft(shapes.SHAPES["smollm2-135m"]) is None
    assert shapes.small_draft(shapes.SHAPES["qwen2.5-7b"]).name == "qwen2.5-0.5b"

"""`bench decode` on tiny models: what it checks, what it writes, what the coin does."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from dustin_trt import ops, sampling
from dustin_trt.evaluation import assets, machine
from dustin_trt.evaluation.bench import bandwidth, decode_checks, plots, shapes
from dustin_trt.evaluation.bench.decode import DecodeSettings, run_decode
from dustin_trt.evaluation.bench.floors import step_bytes
from dustin_trt.evaluation.bench.random_model import CoinAcceptance, random_model
from dustin_trt.evaluation.bench.report import BenchmarkError
from dustin_trt.evaluation.bench.tables import print_report
from dustin_trt.evaluation.bench.timing import Spread
from dustin_trt.evaluation.side_by_side import PARTS
from dustin_trt.ops import native
from dustin_trt.runtime.llm import LLM
from tests import tiny
from tests import tokenizer as tiny_tokenizer
from tests.evaluation.test_bench_layer import TINIER, TINY
from tests.evaluation.test_passkey import TEXT


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiny shapes, short checks, and a memory bandwidth that takes no gigabyte to measure."""
    for shape in (TINY, TINIER):
        monkeypatch.setitem(shapes.SHAPES, shape.name, shape)
    monkeypatch.setattr(decode_checks, "SHORT_CONTEXT", 48)
    monkeypatch.setattr(bandwidth, "stream_bandwidth", lambda: Spread(1e10, 9e9, 2e10))


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    book = tmp_path / "book.txt"
    book.write_text(TEXT * 9, encoding="utf-8")
    monkeypatch.setattr(assets, "books", lambda: {"a": book, "b": book})
    return tiny_tokenizer.save(tmp_path / "model", num_hidden_layers=4)


def settings(**changes):
    given = {
        "draft": "skip:1", "dtype": "float32", "context": 120, "batch": 3, "gamma": 2,
        "budget": 40, "draft_window": 32, "new_tokens": 9, "rounds": 2,
    }  # fmt: skip
    return DecodeSettings(**{**given, **changes})


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


def figures(console, tmp_path, **changes):
    report = run_decode(settings(**changes), console)
    record = json.loads(report.write_json(tmp_path / "f.json").read_text(encoding="utf-8"))
    return report, record["rows"]


def vanillas():
    return 1 if native.isa() == native.REFERENCE else 2


def test_a_checkpoint(console, checkpoint, tmp_path):
    report, rows = figures(console, tmp_path, model=checkpoint)
    assert report.settings["models"] == ["model"] and report.settings["acceptance"] is None
    assert str(tmp_path) not in json.dumps(report.settings)
    names = [row["method"] for row in rows]
    assert names[0] == "vanilla (SDPA)" and len(names) == vanillas() + 3
    assert names[-3:] == ["classic", "MagicDec 32", "Dustin 40"]
    for row in rows:
        assert (row["context"], row["batch"]) == (120, 3)
        for key in ("median_ms", "range_ms", "floor_ms", "read_mb"):
            assert tuple(row[key]) == PARTS
        assert len(row["tokens_per_second_by_round"]) == 2
        assert 0 <= row["bookkeeping_share"] < 1
    (baseline,) = [row for row in rows if row["is_baseline"]]
    assert baseline["speedup"] == 1 and baseline["method"].startswith("vanilla")
    assert baseline["tokens_per_second"] == max(
        row["tokens_per_second"] for row in rows[: vanillas()]
    )
    *lossless, dustin = rows
    for row in lossless:  # fp32
        assert row["first_difference"] == [None] * 3 and row["kv_read_share"] == 1
    assert dustin["kv_read_share"] < 0.4 and dustin["scoring_share"] > 0
    assert any("gives vanilla's 12 tokens exactly (float32)" in note for note in report.notes)


def test_random_weights_are_labelled_simulated(console, tmp_path):
    report, rows = figures(
        console, tmp_path, shape="tiny", draft="tinier", acceptance=1.0, new_tokens=10
    )
    assert report.settings["models"] == ["tiny-random"] and report.settings["acceptance"] == 1
    for row in rows[-3:]:  # every draft is accepted: 9 tokens after the first in 3 steps of 3
        assert row["tau"] == 3 and row["acceptance_rate"] == 1
    assert rows[-1]["kv_read_share"] < 0.4
    assert report.notes[0].startswith("SIMULATED") and "SIMULATED" in str(tables(report))
    assert plots.draw(report, tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_method_meets_the_same_coins(console, tmp_path):
    _, rows = figures(
        console, tmp_path, shape="tiny", draft="skip:1", acceptance=0.5, batch=2, new_tokens=30
    )
    assert len({row["tau"] for row in rows[-3:]}) == 1 and 1 < rows[-1]["tau"] < 3


def tables(report):
    console = Console(file=io.StringIO(), width=80)
    print_report(report, console)
    return console.file.getvalue()


def test_the_table_fits_a_terminal(console, checkpoint, tmp_path):
    report, _ = figures(console, tmp_path, model=checkpoint)
    printed = tables(report)
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed
    for word in ("tokens/s", "× vanilla*", "draft", "verify", "Machine:"):
        assert word in printed
    assert plots.draw(report, tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["dense_attention", "sparse_attention"])
def test_a_wrong_op_ends_the_benchmark(console, checkpoint, monkeypatch, name):
    op = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *args: (1.5 * op(*args)[0], op(*args)[1]))
    with pytest.raises(BenchmarkError, match="differ from the reference's"):
        run_decode(settings(model=checkpoint), console)


def test_a_lossy_lossless_method_ends_the_benchmark(console, checkpoint, monkeypatch):
    def generous(*args):
        accepted, following = accept(*args)
        return torch.full_like(accepted, args[1].shape[1]), following

    accept = sampling.accept
    monkeypatch.setattr(sampling, "accept", generous)
    with pytest.raises(BenchmarkError, match="classic differs from vanilla at new token"):
        run_decode(settings(model=checkpoint), console)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"budget": 20}, "--budget 20"),
        ({"budget": 120}, "--budget 120 reads all of --context 120"),
        ({"acceptance": 0.5, "shape": None}, "--acceptance"),
        ({"model": "somewhere"}, "--model and --shape"),
        ({"draft_window": 4}, "--draft-window 4"),
        ({"gamma": 17}, "--gamma 17"),
        ({"draft": "somewhere"}, "--draft somewhere"),
    ],
)
def test_what_cannot_run_is_refused_before_the_work(console, changes, flag):
    with pytest.raises(ValueError, match=flag):
        run_decode(settings(**{"shape": "tiny", **changes}), console)


def test_a_context_beyond_the_positions_is_refused(console, checkpoint):
    with pytest.raises(ValueError, match=r"--context 600 and --new-tokens 9 .* 512 pos"):
        run_decode(settings(model=checkpoint, context=600), console)


def test_a_shape_beyond_the_memory_is_refused(console, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 10**6)
    with pytest.raises(MemoryError, match="--shape tiny with --context 120 --batch 3"):
        run_decode(settings(shape="tiny"), console)


def test_the_coin_keeps_its_rate():
    rows, gamma, rate = 4000, 4, 0.7
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, gamma + 1, 5, generator=generator)
    drafts = torch.zeros(rows, gamma, dtype=torch.long)
    counts = torch.full((rows,), gamma)
    counts[0] = 0
    uniforms = torch.rand(rows, gamma + 1, generator=generator, dtype=torch.float64)
    greedy = sampling.SamplingBatch(torch.zeros(rows), torch.zeros(rows).long(), torch.ones(rows))
    accepted, following = CoinAcceptance(rate)(logits, drafts, counts, None, uniforms, greedy)
    expected = sum(rate**i for i in range(1, gamma + 1))
    assert float(accepted.float().mean()) == pytest.approx(expected, abs=0.08)
    assert accepted[0] == 0
    assert (following == logits[torch.arange(rows), accepted].argmax(-1)).all()


def test_random_models_compute():
    for shape in (TINY, shapes.Shape("q", "qwen2", 2, 4, 2, 32, 64, 96, 50, 64, 1e6, False)):
        model = random_model(shape, torch.float32, positions=100)
        assert model.config.max_position_embeddings == max(100, shape.max_positions)
        with torch.no_grad():
            logits = model(torch.arange(1, 20)[None]).logits
        assert torch.isfinite(logits).all() and float(logits.std()) > 0.001
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == shape.tied


def test_a_step_reads_weights_keys_values_and_scores():
    model = tiny.make("llama")
    llm = LLM(model, draft="skip:1", gamma=3, draft_window=10, budget=30, max_batch_size=2)
    weights = 4 * (sum(p.numel() for p in model.parameters()) - model.lm_head.weight.numel())
    spec = llm.decoder.target.spec
    kv = 4 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    read = step_bytes(llm, rows=2, history=100, read=30)
    assert read["verify"] == weights + 2 * 30 * kv
    layer = sum(p.numel() for p in model.model.layers[1].parameters())
    assert read["draft"] == 3 * (weights - 4 * layer + 2 * 10 * kv * 2 / 3)
    assert read["score"] == pytest.approx(llm.scoring_share * kv * 2 * 100)
    assert read["select"] == 4 * 2 * 100 * 2
    assert read["accept"] == 4 * 2 * 4 * spec.vocab_size
    plain = step_bytes(llm.variant(draft="none", policy="dense"), rows=2, history=100, read=100)
    assert (plain["draft"], plain["score"], plain["select"]) == (0, 0, 0)

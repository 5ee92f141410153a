"""The floors of `benchmarks/model.py`, against values worked by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import model
from benchmarks.model import Ceilings, Work
from dustin_trt.evaluation.bench.shapes import SHAPES, Shape

ROUND = Ceilings(bandwidth=1e12, rate=1e14, launch=1e-6)
"""A megabyte a microsecond, and as long for a hundred million operations or one launch."""
TINY = Shape("tiny", "qwen2", 2, 4, 2, 8, 32, 64, 100, 4096, 1e6, False)
TIED = Shape("tied", "qwen2", 3, 2, 1, 8, 16, 32, 100, 4096, 1e6, True)
BIG, SMALL, TARGET = SHAPES["qwen2.5-72b"], SHAPES["qwen2.5-0.5b"], SHAPES["qwen2.5-7b"]


def test_a_floor_is_the_largest_of_the_three():
    close = pytest.approx
    assert Work(memory=3e6).seconds(ROUND) == close(3e-6)
    assert Work(memory=3e6, operations=1e9).seconds(ROUND) == close(1e-5)
    assert Work(memory=3e6, operations=1e9, launches=20).seconds(ROUND) == close(2e-5)
    assert [
        Work(memory=m, operations=o, launches=n).bound(ROUND)
        for m, o, n in ((3e6, 0, 1), (3e6, 1e9, 1), (3e6, 1e9, 20))
    ] == ["bytes", "products", "launches"]


def test_works_add_and_multiply():
    assert Work(1, 2, 3, 4) + Work(10, 20, 30, 40) == Work(11, 22, 33, 44)
    assert Work(1, 2, 3, 4).times(3) == Work(3, 6, 9, 12)


def test_kv_append():
    # 2 rows of 3 tokens, 4 heads of 8: 192 elements, keys and values, 2 bytes.
    work = model.kv_append(batch=2, w=3, kv_heads=4, head_dim=8)
    assert work == Work(memory=768, near=768)


def test_srh_score():
    # Keys 2 * 100 * 3 * 8 * 2 bytes, scores 2 * 100 * 4; queries 2 * 5 * 6 * 8 * 2.
    work = model.srh_score(
        batch=2, history=100, kv_heads=3, query_heads=6, rows=5, head_dim=8
    )  # fmt: skip
    assert work.memory == 9600 + 800
    assert work.near == 800 + 960
    assert work.operations == 2 * 2 * 5 * 6 * 8 * 100


@pytest.mark.parametrize("signals", [1, 2])
def test_select_tokens(signals):
    work = model.select_tokens(batch=16, history=32768, budget=512, signals=signals)
    assert work.memory == signals * 2_097_152
    assert work.near == 32_768


def test_dense_attention():
    # One row, two new tokens after three: the first sees four keys, the second five.
    work = model.dense_attention(batch=1, history=3, w=2, heads=4, kv_heads=2, head_dim=8)
    assert work.memory == 2 * 3 * 2 * 8 * 2
    assert work.operations == 4 * 4 * 8 * (4 + 5)
    assert work.near == 2 * 2 * (2 + 4) * 8 * 2 + 4 * 2 * 4


def test_sparse_attention_of_the_issue():
    """32K, batch 16, 8 KV heads, D=128, k=512, w=5, bf16: about 7.8 µs."""
    work = model.sparse_attention(
        batch=16, budget=512, w=5, heads=64, kv_heads=8, head_dim=128
    )  # fmt: skip
    assert work.memory == 33_554_432
    assert 1e6 * work.seconds(model.H200_COPY) == pytest.approx(7.80, abs=0.01)
    assert 1e6 * work.seconds(model.H200_DATASHEET) == pytest.approx(6.99, abs=0.01)


@pytest.mark.parametrize(
    ("context", "batch", "micros"), [(16384, 8, 124.9), (32768, 16, 499.4)]
)  # fmt: skip
def test_full_attention_of_the_issue(context, batch, micros):
    work = model.layer_attention(BIG, batch, context, 5)
    assert 1e6 * work.seconds(model.H200_COPY) == pytest.approx(micros, abs=0.1)
    assert work.bound(model.H200_COPY) == "bytes"


def test_a_long_chunk_is_bound_by_products():
    work = model.layer_attention(BIG, 1, 16384, 2048)
    assert work.bound(model.H200_COPY) == "products"
    # 4 * 64 * 128 * (2048 * 16384 + 2048 * 2049 / 2) = 1.168e12
    assert work.operations == pytest.approx(1.168e12, rel=1e-3)


def test_estimation_reads_as_many_kv_heads_as_its_heads_spread_over():
    spread = model.HISTORY.work(BIG, 16, 32768)
    assert spread.memory == 16 * 32768 * (4 * 128 * 2 + 4)
    packed = model.Estimation(1, 4, 1, kv_heads=1).work(BIG, 16, 32768)
    assert packed.memory == 16 * 32768 * (128 * 2 + 4)
    ahead = model.LOOKAHEAD.work(SMALL, 16, 32768)  # 14 heads on 2 KV heads, three layers
    assert ahead.memory == 3 * 16 * 32768 * (2 * 64 * 2 + 4)


def test_pass_weights():
    # A layer: 32 * (2 * 4 * 8 + 2 * 2 * 8 + 3 * 64) = 9216; output matrix 100 * 32.
    assert model.pass_weights(TINY) == 2 * (2 * 9216 + 3200)
    # A layer: 16 * (2 * 2 * 8 + 2 * 1 * 8 + 3 * 32) = 2304; the embedding is the output matrix.
    assert model.pass_weights(TIED) == 2 * (3 * 2304 + 1600)
    assert model.pass_weights(TARGET) == pytest.approx(14.1e9, rel=0.01)


def test_a_vanilla_step():
    limits = Ceilings(bandwidth=1e6, rate=1e30, launch=0.0)  # a byte a microsecond
    step = model.vanilla_step(TINY, limits, batch=3, history=10)
    assert step.seconds["weights"] == pytest.approx(43_264e-6)
    # 2 layers of 3 rows: 2 * 10 * 2 * 8 * 2 bytes read, 2 * 2 * 8 * 2 appended.
    assert step.seconds["attention"] == pytest.approx(2 * 3 * (640 + 64) * 1e-6)
    assert step.seconds["glue"] == 0
    assert step.tokens_per_second == pytest.approx(3 / step.total)


def test_a_dustin_step():
    limits = Ceilings(bandwidth=1e6, rate=1e30, launch=0.0)
    step = model.dustin_step(
        TINY, TIED, limits, batch=3, history=100, tau=2.0, budget=20, gamma=2, draft_window=10,
        scored=model.Estimation(1, 2, 1), lookahead=model.Estimation(2, 2, 2),
    )  # fmt: skip
    draft_cache = 3 * 3 * (2 * 10 * 1 * 8 * 2 + 2 * 1 * 8 * 2)
    assert step.seconds["draft"] == pytest.approx(2 * (17_024 + draft_cache) * 1e-6)
    history, ahead = 3 * 100 * (2 * 8 * 2 + 4), 2 * 3 * 100 * (1 * 8 * 2 + 4)
    assert step.seconds["score"] == pytest.approx((history + ahead) * 1e-6)
    assert step.seconds["select"] == pytest.approx(2 * 4 * 3 * 100 * 1e-6)
    assert step.seconds["verify weights"] == pytest.approx(43_264e-6)
    # Twice a layer: 20 tokens read and 3 appended by each of 3 rows.
    assert step.seconds["verify attention"] == pytest.approx(2 * 3 * (1280 + 192) * 1e-6)
    assert step.tokens == 6


def test_launches_count_where_bytes_are_few():
    limits = Ceilings(bandwidth=1e30, rate=1e30, launch=1.0)
    step = model.vanilla_step(TINY, limits, batch=1, history=10)
    # Two layers: four products and the output matrix; append and attention; glue and the last norm.
    assert step.seconds == {"weights": 9, "attention": 4, "glue": 9}


def test_bounds_of_verification():
    speedup, share = model.verification_speedup(
        BIG, SMALL, model.H200_COPY, batch=16, history=32768
    )
    assert speedup == pytest.approx(47.2, abs=0.2) and speedup < 32768 / 512
    # Four spread heads and the lookahead read more than half a per cent of the keys and values.
    assert share == pytest.approx(0.0055, abs=1e-4)


def test_bounds_of_decoding():
    size = {"batch": 16, "history": 32768}
    vanilla = model.vanilla_step(TARGET, model.H200_COPY, **size)
    ours = model.dustin_step(TARGET, SMALL, model.H200_COPY, tau=2.5, **size)
    assert ours.tokens_per_second / vanilla.tokens_per_second == pytest.approx(5.0, abs=0.1)


def test_help_teaches_and_the_table_is_printed(capsys):
    with pytest.raises(SystemExit) as left:
        model.main(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert "max(bytes / bandwidth" in text and "python benchmarks/model.py --shape" in text
    assert model.main(["--shape", "qwen2.5-72b", "--context", "32768", "--batch", "16"]) == 0
    table = capsys.readouterr().out
    assert "Nothing here is measured" in table
    assert "sparse_attention" in table and " 7.8 " in table and "at most 47.2×" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--batch", "0"], "'0' is not a whole number"), (["--bandwidth", "-1"], "not a positive"),
     (["--w", "1"], "at least one draft"), (["--shape", "gpt"], "invalid choice")],
)  # fmt: skip
def test_mistakes_are_said(capsys, arguments, message):
    with pytest.raises(SystemExit):
        model.main(arguments)
    assert message in capsys.readouterr().err


def test_it_is_a_script_that_needs_no_torch():
    script = Path(model.__file__)
    code = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = ['model.py', '--help']; runpy.run_path({str(script)!r}, run_name='__main__')"  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=script.parents[1],
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "usage" in done.stdout


def test_the_documentation_has_these_floors():
    page = (Path(model.__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    sizes = ((16384, 8), (32768, 16))
    works = [
        model.op_works(BIG, SMALL, batch=batch, history=history, budget=512, w=5, chunk=2048)
        for history, batch in sizes
    ]
    for name in works[0]:
        if name == "dense_attention, w=1":
            continue
        here, there = (f"{1e6 * work[name].seconds(model.H200_COPY):.1f}" for work in works)
        assert f"| {here} | {there} | {works[1][name].bound(model.H200_COPY)} |" in page
    for shape, (history, batch) in ((TARGET, sizes[1]), (BIG, sizes[0]), (BIG, sizes[1])):
        size = {"batch": batch, "history": history}
        vanilla = model.vanilla_step(shape, model.H200_COPY, **size)
        ours = model.dustin_step(shape, SMALL, model.H200_COPY, tau=2.5, **size)
        ratio = ours.tokens_per_second / vanilla.tokens_per_second
        assert f"| {1e3 * vanilla.total:.2f} | {1e3 * ours.total:.2f} | {ratio:.1f}× |" in page

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from dustin_trt.calibration import figures_style
from dustin_trt.calibration.figures import FIGURES
from dustin_trt.calibration.report import write_report
from dustin_trt.calibration.report_results import (
    best_guard,
    find,
    guard_curve,
    guard_point,
    guarded_share,
    pareto_front,
    share_of_oracle,
)
from dustin_trt.calibration.report_summary import arr_share, grade, key_share, tiles, verdict
from dustin_trt.calibration.report_tables import configuration, flat, seconds
from dustin_trt.calibration.report_words import number, percent

BUDGETS = [64, 128, 256, 512, 1024]
CONTEXTS = [4096, 8000]
# Windowed ARR of the oracle at these budgets, and what the others keep of it.
ORACLE = {4096: [0.66, 0.72, 0.78, 0.84, 0.9], 8000: [0.7, 0.76, 0.82, 0.88, 0.92]}
OF_ORACLE = {
    "chosen": [0.965, 0.974, 0.981, 0.99, 0.995],
    "history": [0.93, 0.95, 0.966, 0.98, 0.99],
    "lookahead": [0.945, 0.96, 0.972, 0.983, 0.99],
    "all heads": [0.972, 0.979, 0.987, 0.992, 0.996],
    "all heads, history": [0.94, 0.958, 0.971, 0.984, 0.992],
    "all heads, lookahead": [0.955, 0.968, 0.978, 0.987, 0.993],
    "sink + window": [0.7, 0.73, 0.76, 0.79, 0.83],
}


def synthetic_results() -> dict[str, Any]:
    """Results of the size and the values of a calibration of SmolLM2; plain JSON."""
    rng = np.random.default_rng(0)
    shape = {"num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    target_kv = [(12, 1), (7, 2), (19, 0), (12, 2), (22, 1), (3, 2), (15, 0)]
    draft_kv = [(5, 1), (2, 0)]
    target_heads = [[layer, 3 * kv + i] for layer, kv in target_kv for i in range(3)]
    draft_heads = [[layer, 3 * kv + i] for layer, kv in draft_kv for i in range(3)]
    scores = {
        "target": _scores(rng, 30, 9, target_heads),
        "draft": _scores(rng, 12, 9, draft_heads),
    }
    return {
        "name": "smollm2",
        "created": "2026-12-01T11:00:00Z",
        "machine": {
            "processor": "Intel(R) Xeon(R) Processor (avx2, avx512f, avx512_bf16, amx_bf16)",
            "cores": 2, "threads": 1, "memory_gib": 24, "kernels": "native amx, own pool",
            "gpu": "none", "python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0",
        },
        "versions": {"dustin_trt": "0.1.0", "optuna": "4.9.0"},
        "recipe": {
            "name": "smollm2", "target": "SmolLM2-135M-Instruct", "draft": "smollm2-draft",
            "seed": 1, "texts": {"profile": ["emma", "persuasion"], "check": ["lady susan"]},
            "lengths": {"search": [2048, 4096], "check": CONTEXTS},
            "search": {"max_target": 8, "max_draft": 4, "trials": 60},
        },
        "seconds": {"scores": 61.2, "profile": 120.0, "search": 40.1, "tune": 30.2, "check": 200.0},
        "pair": {
            "target": "SmolLM2-135M-Instruct", "draft": "smollm2-draft", "target_shape": shape,
            "draft_shape": {**shape, "num_layers": 12, "num_kv_heads": 3},
        },
        "head_scores": scores,
        "chosen": {
            "target_heads": target_heads, "draft_heads": draft_heads, "target_kv_heads": 7,
            "draft_kv_heads": 2, "all_target_kv_heads": 90, "all_draft_kv_heads": 36,
            "bytes_share": 0.0512, "join": "sum", "lookahead_weight": 0.4, "lookahead": 123,
            "sink": 4, "window": 16, "gamma": 4, "budget": 512, "guard": 0.83, "draft_window": 0,
        },
        "greedy": _greedy(target_kv, draft_kv),
        "trials": _trials(rng),
        "check": {
            "contexts": CONTEXTS,
            "budgets": BUDGETS,
            "arr": {str(context): _arr(context) for context in CONTEXTS},
            "age": {
                str(context): {
                    str(age): [
                        bound * (share - drop) for bound, share in zip(
                            ORACLE[context], OF_ORACLE["all heads, history"], strict=True
                        )
                    ]
                    for age, drop in ((1, 0), (4, 0.03), (16, 0.065), (64, 0.11))
                }
                for context in CONTEXTS
            },
            "by_layer": {"budget": 512, "context": 8000, **_by_layer(rng)},
            "fidelity": _fidelity(rng),
            "pass_keys": {
                "length": 4096, "count": 20, "full": 19,
                "found": {
                    "chosen": {"128": 16, "256": 18, "512": 18},
                    "history": {"128": 11, "256": 15, "512": 17},
                    "lookahead": {"128": 13, "256": 16, "512": 17},
                    "all heads": {"128": 18, "256": 19, "512": 19},
                    "sink + window": {"128": 0, "256": 0, "512": 0},
                },
            },
            "acceptance": {
                "rate": 0.55, "tau": 2.4, "by_position": [0.72, 0.61, 0.5, 0.41],
                "tau_by_gamma": {"1": 1.72, "2": 2.1, "3": 2.31, "4": 2.4, "6": 2.46},
            },
            "guard": _guarded_windows(rng),
        },
    }  # fmt: skip


def _scores(rng: Any, layers: int, heads: int, chosen: list[list[int]]) -> list[list[float]]:
    scores = rng.gamma(1.0, 0.025, (layers, heads))
    for layer, head in chosen:
        scores[layer, head] += rng.uniform(0.05, 0.45)
    return scores.round(4).tolist()


def _arr(context: int) -> dict[str, list[float]]:
    best = ORACLE[context]
    kept = {
        policy: [bound * share for bound, share in zip(best, shares, strict=True)]
        for policy, shares in OF_ORACLE.items()
    }
    return {"oracle": best, **kept}


def _by_layer(rng: Any) -> dict[str, list[float]]:
    depth = np.linspace(0, 1, 30)
    oracle = 0.86 + 0.08 * np.sin(5 * depth) + rng.normal(0, 0.012, 30)
    shares = {
        "oracle": 1 + 0 * depth, "history": 0.955 + 0.04 * depth, "lookahead": 0.995 - 0.04 * depth,
        "chosen": 0.987 + 0.004 * depth,
    }  # fmt: skip
    return {policy: (oracle * share).round(4).tolist() for policy, share in shares.items()}


def _fidelity(rng: Any) -> list[dict[str, Any]]:
    rows = []
    for context in CONTEXTS:
        for policy, values in _arr(context).items():
            for budget, arr in zip(BUDGETS, values, strict=True):
                kl = 1.6 * (1 - arr) ** 1.9 * (1 + 0.08 * rng.normal())
                rows.append(
                    {"context": context, "budget": budget, "policy": policy, "kl": float(kl),
                     "agreement": 0.9, "arr": arr}
                )  # fmt: skip
    return rows


def _greedy(target_kv: list[Any], draft_kv: list[Any]) -> list[dict[str, Any]]:
    path = []
    for count, (layer, kv_head) in enumerate([*target_kv, *draft_kv], start=1):
        gain = 1 - 0.12 * 0.62**count + (0.003 if count > 7 else 0) - 0.012
        path.append(
            {"role": "target" if count <= 7 else "draft", "layer": layer, "kv_head": kv_head,
             "heads": [3 * kv_head + i for i in range(3)], "kv_heads_read": count,
             "bytes": count * 128 * 4096, "arr": 0.84 * (gain - (0.002 if count == 6 else 0)),
             "oracle": 0.84, "recall": 1 - 0.6 * 0.6**count, "value": gain}
        )  # fmt: skip
    return path


def _trials(rng: Any) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = []
    for tried in range(60):
        gamma = int(rng.integers(1, 7))
        speed = 1.2 + 0.22 * gamma + rng.normal(0, 0.18) - (gamma > 4) * 0.3
        fidelity = 0.985 - 0.004 * gamma - 0.02 * rng.random() ** 2 - (tried < 12) * 0.008
        trials.append(
            {"number": tried, "join": ["sum", "split"][tried % 2], "share": 0.3, "sink": 4,
             "window": 16, "gamma": gamma, "arr": 0.83, "recall": 1.0, "fidelity": fidelity,
             "speed": speed, "on_front": False, "chosen": False}
        )  # fmt: skip
    front = pareto_front([-t["speed"] for t in trials], [t["fidelity"] for t in trials])
    for place in front:
        trials[place]["on_front"] = True
    trials[front[len(front) // 2]]["chosen"] = True
    return trials


def _guarded_windows(rng: Any) -> dict[str, Any]:
    coverage = np.clip(rng.beta(14, 1.6, 160), 0.5, 0.999)
    kl = 0.9 * (1 - coverage) ** 1.6 * rng.lognormal(0, 0.7, 160)
    return {"threshold": 0.83, "coverage": coverage.tolist(), "kl": kl.tolist()}


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(json.dumps(synthetic_results()))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, str]:
    """A report made from a file, as a person would who draws it again."""
    output = tmp_path_factory.mktemp("report")
    (output / "results.json").write_text(json.dumps(synthetic_results()))
    write_report(json.loads((output / "results.json").read_text()), output)
    return output, (output / "report.html").read_text("utf-8")


class Page(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else(written):
    page = Page(written[1])
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert "url(" not in written[1] and "@import" not in written[1]
    assert not re.search("https?://", written[1])
    assert len([tag for tag, _ in page.tags if tag == "img"]) == len(FIGURES)
    assert all(attributes["alt"] for tag, attributes in page.tags if tag == "img")
    assert "not measured" not in page.text


def test_every_figure_is_a_file_too_and_shows_something(written):
    from matplotlib.image import imread

    files = sorted((written[0] / "figures").iterdir())
    assert [file.stem for file in files] == sorted(figure.name for figure in FIGURES)
    for file in files:
        head = file.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", head[16:24])
        assert width == 1540 and 400 < height < 1400  # 11 inches of 140 dots
        pixels = (255 * imread(file)[::2, ::2, :3]).astype(int) @ [1, 256, 65536]
        inked = (pixels != 0xFFFFFF).mean()
        assert 0.02 < inked < 0.8 and len(np.unique(pixels)) > 50, file.name


def test_the_page_says_the_rule_and_how_it_was_made(written):
    text = " ".join(Page(written[1]).text.split())
    assert "at least 98.5 % of the oracle’s in every context" in text
    assert "at least 90 % of the pass keys" in text
    assert "at least 97 % and 70 %" in text
    for figure in FIGURES:
        assert figure.title in text and " ".join(figure.caption.split()) in text
        assert figure.caption.endswith(".") and figure.caption.count(". ") <= 1  # one sentence
    for made in ("2026-12-01T11:00:00Z", "lady susan", "native amx", "optuna", "search.trials"):
        assert made in text


def test_tiles_show_the_numbers_of_the_results(results):
    arr, keys, kl, heads, tau, guard = tiles(results)
    assert arr.value == "99.0\u00a0%" and arr.grade == "good"
    assert arr.notes == ("at budget 512", "4,096 tokens: 99.0\u00a0%", "8,000 tokens: 99.0\u00a0%")
    assert keys.value == "18 of 20" and keys.notes[0] == "full verification finds 19"
    rows = {
        (row["policy"], row["context"]): row["kl"]
        for row in results["check"]["fidelity"]
        if row["budget"] == 512
    }
    ours, all_heads = rows["chosen", 4096], rows["all heads, history", 4096]
    assert kl.value == f"{max(ours, rows['chosen', 8000]):.3f}"
    assert kl.notes[1] == f"4,096 tokens: {ours:.3f}; all heads’ history {all_heads:.3f}"
    assert heads.value == "9 of 126"
    assert heads.notes[0] == "target: 7 of 90, draft: 2 of 36"
    assert heads.notes[1] == "bytes read, of full attention’s: 5.1\u00a0%"
    assert tau.value == "2.40"
    assert tau.notes == ("drafts accepted: 55.0\u00a0%", "draft tokens a step: 4")
    below = sum(coverage < 0.83 for coverage in results["check"]["guard"]["coverage"])
    assert guard.value == percent(below / 160)


def test_tiles_are_on_the_page(written, results):
    text = Page(written[1]).text
    for tile in tiles(results):
        assert tile.value in text and tile.label in text
        assert all(note in text for note in tile.notes)


def _judged(results: dict[str, Any], arr: list[float], found: int, full: int = 20) -> str | None:
    """The verdict with these shares of the oracle's ARR, a context each, and these pass keys."""
    for context, share in zip(CONTEXTS, arr, strict=True):
        of = results["check"]["arr"][str(context)]
        of["chosen"][3] = share * of["oracle"][3]
    results["check"]["pass_keys"].update(full=full)
    results["check"]["pass_keys"]["found"]["chosen"]["512"] = found
    return verdict(results).grade


@pytest.mark.parametrize(
    ("arr", "found", "expected"),
    [
        ([0.985, 0.985], 18, "good"),
        ([0.985, 0.9849], 18, "usable"),  # every context counts
        ([0.9849, 0.999], 20, "usable"),
        ([0.999, 0.999], 17, "usable"),
        ([0.97, 0.99], 14, "usable"),
        ([0.97, 0.99], 13, "poor"),
        ([0.9699, 0.99], 20, "poor"),
        ([1.0, 1.0], 0, "poor"),
    ],
)
def test_the_verdict_at_its_borders(results, arr, found, expected):
    assert _judged(results, arr, found) == expected
    assert verdict(results).headline == f"A {expected} pair"


def test_pass_keys_are_judged_by_what_full_verification_finds(results):
    assert _judged(results, [0.99, 0.99], found=9, full=10) == "good"
    assert _judged(results, [0.99, 0.99], found=12, full=10) == "good"
    assert key_share(results) == 1.2
    assert _judged(results, [0.99, 0.99], found=0, full=0) == "good"
    assert verdict(results).headline == "A good pair, judged by ARR alone"
    assert "Full verification finds no pass key" in " ".join(verdict(results).reasons)


def test_a_verdict_without_pass_keys_says_so(results):
    del results["check"]["pass_keys"]
    assert verdict(results).headline == "A good pair, judged by ARR alone"
    assert "Pass keys: not measured." in verdict(results).reasons


def test_a_verdict_needs_every_context_and_the_configured_budget(results):
    del results["check"]["arr"]["8000"]["chosen"]
    assert arr_share(results) is None
    assert verdict(results).headline == "A good pair, judged by pass keys alone"
    results = synthetic_results()
    results["chosen"]["budget"] = 300
    assert arr_share(results) is None and key_share(results) is None
    assert verdict(results).headline == "Not measured" and verdict(results).grade is None
    assert [tile.value for tile in tiles(results)[:3]] == ["not measured"] * 3


def test_grades_do_not_hang_on_the_last_bit():
    assert 0.29 + 0.695 < 0.985 and 0.1 * 7 > 0.7
    assert grade(0.29 + 0.695, 0.985, 0.97) == "good"
    assert grade(0.9849, 0.985, 0.97) == "usable"
    assert grade(None, 0.985, 0.97) is None


@pytest.mark.parametrize(
    "missing",
    [
        ("head_scores",), ("chosen",), ("greedy",), ("trials",), ("check",), ("pair",),
        ("seconds",), ("machine",), ("versions",), ("recipe",), ("name",), ("created",),
        ("head_scores", "draft"), ("check", "contexts"), ("check", "budgets"), ("check", "arr"),
        ("check", "age"), ("check", "by_layer"), ("check", "fidelity"), ("check", "pass_keys"),
        ("check", "acceptance"), ("check", "guard"), ("check", "guard", "threshold"),
        ("check", "acceptance", "by_position"), ("check", "acceptance", "tau_by_gamma"),
        ("check", "arr", "4096"), ("check", "arr", "4096", "oracle"),
        ("check", "arr", "4096", "chosen"), ("check", "age", "8000"),
        ("check", "pass_keys", "full"), ("check", "pass_keys", "found", "chosen"),
        ("chosen", "guard"), ("chosen", "bytes_share"), ("chosen", "all_draft_kv_heads"),
    ],
    ids=".".join,
)  # fmt: skip
def test_nothing_breaks_where_something_is_missing(results, missing):
    *path, last = missing
    section = find(results, *path) if path else results
    for make_absent in (section.pop, lambda key: section.update({key: None})):
        make_absent(last)
        tiles(results), verdict(results), configuration(results)
        for figure in FIGURES:
            figure.draw(results)


@pytest.mark.parametrize(
    ("missing", "figure"),
    [
        ("head_scores", "head_scores"), ("greedy", "cost_against_arr"), ("trials", "trials"),
        ("check.arr", "arr_by_budget"), ("check.age", "arr_by_age"), ("check.guard", "guard"),
        ("check.by_layer", "arr_by_layer"), ("check.fidelity", "arr_against_kl"),
        ("check.pass_keys", "pass_keys"), ("check.acceptance", "acceptance"),
    ],
)  # fmt: skip
def test_only_the_figure_of_a_missing_section_is_missing(results, missing, figure):
    *path, last = missing.split(".")
    del find(results, *path)[last]
    assert [other.name for other in FIGURES if other.draw(results) is None] == [figure]


def test_an_empty_calibration_is_a_page_without_figures_or_numbers(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "guard.png").write_bytes(b"of an older report")
    write_report({}, tmp_path)
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert list((tmp_path / "figures").iterdir()) == []
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert {tile.value for tile in tiles({})} == {"not measured"}
    assert page.text.count("not measured") >= len(FIGURES) + 6
    assert verdict({}).headline == "Not measured"


def test_missing_sections_are_named_on_the_page(results, tmp_path):
    del results["check"]["pass_keys"], results["trials"]
    write_report(results, tmp_path)
    source = (tmp_path / "report.html").read_text("utf-8")
    for name in ("pass_keys", "trials"):
        figure = source.partition(f'<figure id="{name}">')[2].partition("</figure>")[0]
        assert "not measured" in figure and "<img" not in figure
        assert not (tmp_path / "figures" / f"{name}.png").exists()
    assert '<figure id="guard">' in source


def test_names_are_text(results, tmp_path):
    evil = "<script>alert('$x^$')</script>&amp;"
    results["name"] = results["pair"]["target"] = results["recipe"]["texts"][evil] = evil
    results["machine"]["processor"] = evil
    for heavy in ("head_scores", "greedy", "trials", "check"):
        del results[heavy]
    write_report(results, tmp_path)
    source = (tmp_path / "report.html").read_text("utf-8")
    assert "<script" not in source
    assert Page(source).text.count("<script>alert('$x^$')</script>&amp;") >= 4


def test_the_guard_curve_by_hand():
    coverage, kl = [0.9, 0.5, 0.8, 0.8], [0.1, 0.8, 0.2, 0.1]
    curve = guard_curve(coverage, kl)
    assert [point.threshold for point in curve] == [0.5, 0.8, 0.9, float("inf")]
    # Nothing is below .5; one window is below .8; the two of .8 go together; at last, all.
    assert [point.dense for point in curve] == pytest.approx([0, 0.25, 0.75, 1])
    assert [point.kl for point in curve] == pytest.approx([1.2 / 4, 0.4 / 4, 0.1 / 4, 0])
    assert guard_point(coverage, kl, 0.85)[1:] == pytest.approx((0.75, 0.025))
    best = [(0, 0.3), (0.25, 0.1), (0.5, 0.05), (0.75, 0.025), (1, 0)]
    assert np.array(best_guard(kl)) == pytest.approx(np.array(best))
    with pytest.raises(ValueError):
        guard_point([0.9], [0.1, 0.2], 0.5)


def test_the_share_guarded_by_hand():
    check = {"guard": {"threshold": 0.8, "coverage": [0.9, 0.5, 0.8, 0.8], "kl": [0.1] * 4}}
    assert guarded_share({"check": check}) == 0.25
    check["guard"]["threshold"] = None
    assert guarded_share({"check": check}) is None
    assert guarded_share({"check": check, "chosen": {"guard": 0.85}}) == 0.75


def test_the_pareto_front_by_hand():
    costs = [1, 2, 3, 3, 4, 5]
    values = [0.5, 0.4, 0.7, 0.8, 0.8, 0.9]
    assert pareto_front(costs, values) == [0, 3, 5]
    assert pareto_front([2, 1, 1], [0.5, 0.5, 0.5]) == [1]
    assert pareto_front([], []) == []


def test_share_of_the_oracle_by_hand():
    arr = {"4096": {"oracle": [0.8, 0.5, 0.5], "chosen": [0.6, 0.5, 0]}}
    assert share_of_oracle({"check": {"arr": arr}}, "chosen", 4096) == pytest.approx([0.75, 1, 0])
    assert share_of_oracle({"check": {"arr": arr}}, "history", 4096) is None


def test_what_is_not_a_number_is_not_measured(results, tmp_path):
    """Python's JSON may hold NaN; a mean over no windows is one."""
    results["check"]["arr"]["8000"]["chosen"][3] = float("nan")
    results["check"]["arr"]["8000"]["history"][0] = None
    for row in results["check"]["fidelity"]:
        row["kl"] = float("nan") if row["context"] == 4096 else row["kl"]
    assert arr_share(results) is None
    assert [tiles(results)[place].value for place in (0, 2)] == ["not measured"] * 2
    figures = {figure.name: figure for figure in FIGURES}
    for name in ("arr_by_budget", "arr_against_kl", "cost_against_arr"):
        assert figures[name].draw(results)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.98499, "98.4"), (0.985, "98.5"), (0.788 / 0.8, "98.5"), (0.812 / 0.8, "101.5"),
        (1, "100.0"), (0, "0.0"), (0.0046, "0.46"),
    ],
)  # fmt: skip
def test_shares_are_cut_so_that_they_never_look_better(share, words):
    assert percent(share) == f"{words}\u00a0%"


def test_numbers_in_words():
    assert (number(0.0432), number(0.00012), number(12.3)) == ("0.043", "0.00012", "12")
    assert percent(None) == number(None) == "not measured"


def test_tables(results):
    table = dict(configuration(results))
    assert table["join"] == "sum: the lookahead weighs 0.4"
    assert table["draft heads"] == "layer 2: 0, 1, 2; layer 5: 3, 4, 5"
    assert table["draft cache"] == "the whole history"
    results["chosen"].update(join="split", draft_window=2048, guard=None, draft_heads=[])
    table = dict(configuration(results))
    assert table["join"] == "split: 123 tokens by lookahead, the rest by history"
    assert table["draft cache"] == "sink and the last 2,048 tokens"
    assert table["guard"] == table["draft heads"] == "none"
    assert seconds(results)[-1] == ("in all", "451.5 s (7.5 min)")
    nested = {"a": {"b": [1, 2]}, "c": [{"d": "x" * 400}]}
    assert flat(nested) == [("a.b", "1, 2"), ("c[0].d", "x" * 300 + "…")]


def test_the_same_results_give_the_same_page(written, results, tmp_path):
    write_report(results, tmp_path)
    assert (tmp_path / "report.html").read_text("utf-8") == written[1]


def test_without_matplotlib_it_says_what_to_install(results, tmp_path, monkeypatch):
    find_spec = figures_style.importlib.util.find_spec
    monkeypatch.setattr(
        figures_style.importlib.util, "find_spec",
        lambda name: None if name == "matplotlib" else find_spec(name),
    )  # fmt: skip
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'dustin-trt\[calibr"):
        write_report(results, tmp_path)
    assert list(tmp_path.iterdir()) == []

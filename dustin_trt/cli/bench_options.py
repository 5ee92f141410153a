"""What `dustin-trt bench` takes. Imports nothing slow."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dustin_trt.evaluation.bench.shapes import SHAPES

_BENCH = """\
Measure on this machine. Every benchmark first holds its results against the reference, lets the
variants take turns, and gives medians with their spread and what they were measured on.

  attention   one layer's verification attention: the whole cache against Dustin, part by part
  overhead    what estimating the tokens that matter costs, against full attention
  decode      tokens/s end to end: vanilla, classic speculative, MagicDec, Dustin
"""

_FILES = """\
  --json and --plot take a file, or a folder that exists: the file's name there carries the model,
  the dtype and the machine.
"""

_ATTENTION = """\
One layer's verification attention of gamma + 1 tokens (Figure 7 of the paper). The baseline is the
faster of torch SDPA and our own dense kernel. Dustin is sparse attention plus the estimation and
selection before it; those happen once a step, so a layer bears its share of them. Needs no weights:
caches are filled with random numbers, and no call finds its data in the processor's cache.
"""

_ATTENTION_EXAMPLES = f"""\
examples:
  dustin-trt bench attention --shape qwen2.5-72b --context 16384 32768 --batch 4 --budget 512 \\
      --dtype bfloat16 --json attention.json --plot attention.png
  # two models, the lookahead of a 0.5B draft scored too, files named after the machine
  dustin-trt bench attention --shape qwen2.5-7b qwen2.5-72b --context 4096 16384 65536 \\
      --draft-shape qwen2.5-0.5b --json benchmarks/results --plot benchmarks/results

{_FILES}"""

_OVERHEAD = """\
The cost of scoring the history in one step, as a share of full verification attention in all layers
(Figure 8 of the paper): by every head of target and draft, by the target's few retrieval heads
(history), by the draft's (lookahead), and by both (hybrid).
"""

_OVERHEAD_EXAMPLES = f"""\
example:
  dustin-trt bench overhead --shape qwen2.5-72b --draft-shape qwen2.5-0.5b \\
      --context 1024 4096 16384 32768 --json overhead.json --plot overhead.png

{_FILES}"""

_DECODE = """\
Tokens/s of vanilla decoding (torch SDPA and our dense kernel; the faster is the baseline), classic
speculative decoding, MagicDec (sink + window draft, dense verification) and Dustin, on the same
prompts, with the time of every part of a step and the least that the memory's bandwidth allows.

On a checkpoint (default: SmolLM2-135M-Instruct on plays, fetched once) acceptance is what happens.
With --shape the weights are random and acceptance means nothing: a coin of the stated rate accepts
each draft, every other part of the work is done, and all figures are labelled SIMULATED.
"""

_DECODE_EXAMPLES = f"""\
examples:
  dustin-trt bench decode --draft skip:14,17 --context 8000 --batch 8 --budget 512 \\
      --json decode.json --plot decode.png
  dustin-trt bench decode --model Qwen2.5-7B-Instruct --draft Qwen2.5-0.5B-Instruct \\
      --context 16384 --batch 4
  # random weights, history of random keys and values, 70 % of the drafts accepted by a coin
  dustin-trt bench decode --shape qwen2.5-7b --draft qwen2.5-0.5b --acceptance 0.7 --batch 2

{_FILES}"""


def add_bench(commands: Any) -> list[argparse.ArgumentParser]:
    """Add `bench` and return its three commands; their namespaces have `benchmark`."""
    bench = commands.add_parser(
        "bench",
        help="how fast it is here: attention, estimation, decoding",
        description=_BENCH,
        epilog="  dustin-trt bench attention --help   and so on",
    )
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    return [_add_attention(benchmarks), _add_overhead(benchmarks), _add_decode(benchmarks)]


def _add_attention(benchmarks: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = benchmarks.add_parser(
        "attention",
        help="one layer's verification attention, full cache against Dustin",
        description=_ATTENTION,
        epilog=_ATTENTION_EXAMPLES,
    )
    _add_layer(command, contexts=[4096, 8192, 16384, 32768])
    add = command.add_argument
    add(
        "--budget",
        nargs="+",
        type=_positive,
        default=[512],
        metavar="K",
        help="history tokens read, sink and window included (default 512)",
    )
    add(
        "--draft-shape",
        choices=list(SHAPES),
        metavar="NAME",
        help="score the lookahead of such a draft too (default: history only)",
    )
    _add_files(command)
    return command


def _add_overhead(benchmarks: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = benchmarks.add_parser(
        "overhead",
        help="cost of estimation against full attention",
        description=_OVERHEAD,
        epilog=_OVERHEAD_EXAMPLES,
    )
    _add_layer(command, contexts=[1024, 2048, 4096, 8192, 16384, 32768])
    command.add_argument(
        "--draft-shape",
        choices=list(SHAPES),
        default="qwen2.5-0.5b",
        metavar="NAME",
        help="the draft (default qwen2.5-0.5b)",
    )
    _add_files(command)
    return command


def _add_layer(command: argparse.ArgumentParser, contexts: list[int]) -> None:
    """Options of the benchmarks of one layer."""
    add = command.add_argument
    add(
        "--shape",
        nargs="+",
        choices=list(SHAPES),
        default=["qwen2.5-72b"],
        metavar="NAME",
        help=f"models whose layer to measure (default qwen2.5-72b): {', '.join(SHAPES)}",
    )
    add(
        "--context",
        nargs="+",
        type=_positive,
        default=contexts,
        metavar="N",
        help=f"tokens of history (default {' '.join(map(str, contexts))})",
    )
    add("--batch", nargs="+", type=_positive, default=[4], metavar="B", help="rows (default 4)")
    add("--gamma", type=_positive, default=4, metavar="G", help="draft tokens a step (default 4)")
    _add_dtype(command, "bfloat16")
    add(
        "--heads",
        type=_positive,
        default=4,
        metavar="H",
        help="query heads that score, in each scoring layer of the target (default 4, as the "
        "paper's search found for Qwen2.5-72B)",
    )
    add(
        "--layers",
        type=_positive,
        default=1,
        metavar="L",
        help="layers of the target that score (default 1)",
    )
    add(
        "--draft-heads",
        type=_positive,
        default=4,
        metavar="H",
        help="query heads that score, in each scoring layer of the draft (default 4)",
    )
    add(
        "--draft-layers",
        type=_positive,
        default=3,
        metavar="L",
        help="layers of the draft that score (default 3)",
    )
    add("--rounds", type=_rounds, default=15, metavar="R", help="timed calls (default 15)")


def _add_decode(benchmarks: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = benchmarks.add_parser(
        "decode",
        help="tokens/s end to end, four methods side by side",
        description=_DECODE,
        epilog=_DECODE_EXAMPLES,
    )
    add = command.add_argument_group("models").add_argument
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder of a Hugging Face checkpoint (default: SmolLM2-135M-Instruct)",
    )
    add(
        "--shape",
        choices=list(SHAPES),
        metavar="NAME",
        help=f"random weights of this shape instead: {', '.join(SHAPES)}",
    )
    add(
        "--draft",
        metavar="DRAFT",
        help="skip:LAYERS, or a folder; with --shape, skip:LAYERS or a shape (default: skip:14,17 "
        "for SmolLM2, the family's smallest shape for others)",
    )
    add(
        "--acceptance",
        type=_rate,
        metavar="P",
        help="with --shape: chance that a draft token is accepted, SIMULATED (default 0.7)",
    )
    add("--config", type=Path, metavar="FILE", help="calibrated dustin.json for Dustin")
    _add_dtype(command, "auto")

    add = command.add_argument_group("work").add_argument
    add("--context", type=_positive, default=8000, metavar="N", help="prompt tokens (default 8000)")
    add("--batch", type=_positive, default=8, metavar="B", help="prompts at a time (default 8)")
    add("--gamma", type=_positive, default=4, metavar="G", help="draft tokens a step (default 4)")
    add("--budget", type=_positive, default=512, metavar="K", help="for Dustin (default 512)")
    add(
        "--draft-window",
        type=_positive,
        default=512,
        metavar="N",
        help="history tokens that the draft of MagicDec and Dustin reads (default 512)",
    )
    add("--new-tokens", type=_new, default=64, metavar="N", help="a prompt (default 64)")
    add("--rounds", type=_positive, default=3, metavar="R", help="timed rounds (default 3)")
    _add_files(command)
    return command


def _add_dtype(command: argparse.ArgumentParser, default: str) -> None:
    names = ["bfloat16", "float32", "float16"]
    if default == "auto":
        names.insert(0, "auto")
    command.add_argument(
        "--dtype",
        choices=names,
        default=default,
        metavar="DTYPE",
        help=f"{', '.join(names)} (default {default})",
    )


def _add_files(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("output (besides the table)").add_argument
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--plot", type=Path, metavar="FILE", help="draw them (PNG)")


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _rounds(text: str) -> int:
    return _at_least(text, 3)  # fewer have no quartiles worth the name


def _new(text: str) -> int:
    return _at_least(text, 2)  # the first one comes from prefill


def _at_least(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate from 0 to 1")
    return rate

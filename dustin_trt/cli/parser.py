"""What the command line takes, and what `--help` teaches. Imports nothing slow."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from dustin_trt import __version__
from dustin_trt.cli.bench_options import add_bench
from dustin_trt.cli.build_options import add_build
from dustin_trt.cli.calibrate_options import add_calibrate
from dustin_trt.cli.distill_options import add_distill

_ABOUT = """\
Long-context decoding by draft-then-sparse-verify: a cheap draft proposes a few tokens, and the
model checks them in one pass that reads only the part of its KV cache that matters (Dustin,
arXiv 2606.24957).
"""

_FIRST_STEPS = """\
first steps:
  dustin-trt doctor              what works on this machine, and what to install for the rest
  dustin-trt demo                a small real model on long plays, three ways side by side
  dustin-trt generate --help     your own model on your own file of prompts
  dustin-trt bench --help        how fast it is here
"""

_GENERATE = """\
Generate for every prompt of a JSONL file. Lines are appended to the output as requests finish. The
same command started again after a stop or a crash goes on where it was.

  draft    who proposes tokens: a small model, the target without some layers, or n-gram lookup
  policy   what a verification pass may read of the history: everything, or a chosen part
  budget   how many history tokens that part has (k); the cache keeps everything, nothing is evicted
"""

_EXAMPLES = """\
examples:
  # a model that drafts for itself by leaving layers out, reading 512 history tokens a step
  dustin-trt generate --target SmolLM2-135M-Instruct --draft skip:14,16,17,26 \\
      --budget 512 --input prompts.jsonl --output out.jsonl

  # a separate draft model and a calibrated configuration, sampled and repeatable
  dustin-trt generate --target Qwen2.5-7B-Instruct --draft Qwen2.5-0.5B-Instruct \\
      --config dustin.json --temperature 0.7 --top-p 0.9 --seed 1 \\
      --input prompts.jsonl --output out.jsonl

  # engines that dustin-trt build made
  dustin-trt generate --engine-dir engines --input prompts.jsonl --output out.jsonl

  # lossless for comparison: n-gram lookup with full verification, then plain decoding
  dustin-trt generate --target DIR --draft lookup --policy dense --input IN --output OUT
  dustin-trt generate --target DIR --draft none --input IN --output OUT

input, one JSON object a line:
  {"id": "a", "prompt": "Once upon a time", "max_tokens": 64}
  {"id": 7, "prompt_token_ids": [504, 2340, 6012], "temperature": 0.8, "seed": 3}
  id (default: the line's number), prompt or prompt_token_ids, and optionally temperature, top_p,
  top_k, max_tokens, seed, stop, stop_token_ids, ignore_eos in place of the command's.
  --seed is mixed with the id, so equal prompts differ; a line's own seed is used as it is.

output, one JSON object a line, in the order of finishing:
  {"id": "a", "text": "…", "token_ids": […], "finish_reason": "stop" or "length", "stats": {…}}
  {"id": 7, "error": "what is wrong with this line"}
  Lines of the output are not done again, error lines included: delete those to retry them.

exit code: 0 all served, 1 some lines became error lines, 2 could not start or go on, 130 Ctrl-C
"""


class UsageError(ValueError):
    """The command line is wrong."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `dustin-trt`; its namespace has `command`, `debug` and the command's options.

    Its errors are raised as UsageError.
    """
    parser = _Parser(prog="dustin-trt", description=_ABOUT, epilog=_FIRST_STEPS)
    parser.add_argument("--version", action="version", version=f"dustin-trt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_doctor(commands)
    _add_demo(commands)
    _add_debug(add_build(commands))
    _add_debug(add_calibrate(commands))
    _add_debug(add_distill(commands))
    for benchmark in add_bench(commands):
        _add_debug(benchmark)
    return parser


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="generate for a JSONL file of prompts",
        description=_GENERATE,
        epilog=_EXAMPLES,
    )
    add = command.add_argument_group("files").add_argument
    add("--input", required=True, type=Path, metavar="FILE", help="JSONL of prompts")
    add("--output", required=True, type=Path, metavar="FILE", help="JSONL of texts, appended to")

    models = command.add_argument_group("models")
    add = models.add_mutually_exclusive_group(required=True).add_argument
    add(
        "--target",
        type=Path,
        metavar="DIR",
        help="folder of a Hugging Face checkpoint (Llama, Qwen2/2.5, Qwen3, Mistral)",
    )
    add(
        "--engine-dir",
        type=Path,
        metavar="DIR",
        help="folder that dustin-trt build made: target, draft and configuration in one",
    )
    add = models.add_argument
    add(
        "--draft",
        metavar="DRAFT",
        help="folder of a smaller model with the same tokenizer; skip:14,17 (the target without "
        "these layers); lookup or lookup:N (n-grams of the prompt); none (default with --target; "
        "with --engine-dir its own)",
    )
    add(
        "--draft-window",
        type=_window,
        metavar="N|full",
        help="history tokens a draft model itself reads (default: --config's or 512)",
    )
    add(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="auto (the checkpoint's, default), float32, bfloat16, float16",
    )
    add(
        "--device",
        metavar="DEVICE",
        help="cpu (default with --target), cuda (default with compiled engines), cuda:1, …",
    )
    add(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_false",
        help="queue every launch of a step anew; by default a GPU replays recorded steps",
    )

    add = command.add_argument_group("verification").add_argument
    add(
        "--policy",
        metavar="NAME",
        help="dustin (chosen by attention; default with a draft or --config), dense (everything; "
        "default otherwise), streaming (first and last tokens), oracle (peeks; for measuring only)",
    )
    add("--config", metavar="FILE", help="calibrated dustin.json; without it, default heads score")
    add(
        "--budget",
        type=int,
        metavar="K",
        help="history tokens read in a pass, sink and window included (default: --config's or 512)",
    )
    add("--gamma", type=int, metavar="G", help="draft tokens a step (default: --config's or 4)")
    add(
        "--signal",
        metavar="NAME",
        help="what dustin scores with: hybrid (default), history (the target's last query), "
        "lookahead (the draft's attention)",
    )
    add(
        "--join",
        metavar="NAME",
        help="how hybrid joins them: split (part of the budget each, default) or sum",
    )
    add("--heads", metavar="all", help="all: score with every head, slow but thorough")
    add(
        "--guard",
        type=float,
        metavar="T",
        help="a step that would read less than this share (0–1) of the attention scored reads "
        "everything; 0 is off (default: --config's or off)",
    )

    add = command.add_argument_group("sampling (a line can bring its own)").add_argument
    add("--max-new-tokens", default=128, type=int, metavar="N", help="default 128")
    add(
        "--temperature",
        default=0.0,
        type=float,
        metavar="T",
        help="0 takes the most likely token (default)",
    )
    add("--top-p", default=1.0, type=float, metavar="P", help="default 1")
    add("--top-k", default=0, type=int, metavar="K", help="0 means all (default)")
    add("--seed", type=int, metavar="S", help="makes sampling repeatable")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="STR",
        help="ends the text; may be given several times",
    )

    add = command.add_argument_group("running").add_argument
    add(
        "--batch-size",
        type=int,
        metavar="B",
        help="requests decoded at a time (default 8; with --engine-dir what it was built for)",
    )
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="prompt and generated tokens of a request at most (default: the model's positions)",
    )
    add("--quiet", action="store_true", help="no progress and no summary, only errors")
    _add_debug(command)


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="what works on this machine",
        description="Try every backend and say which work here; for the others, why not and what "
        "to do.\nExit code 0 if at least one can generate.",
    )
    command.add_argument("--json", action="store_true", help="for programs")
    _add_debug(command)


def _add_demo(commands: Any) -> None:
    command = commands.add_parser(
        "demo",
        help="a small real model on long texts, three ways side by side",
        description="Fetch SmolLM2-135M-Instruct and public-domain books, then decode long prompts "
        "plainly, with\nclassic speculative decoding and with Dustin. Ends with a table and a "
        "picture, also written to files.",
    )
    add = command.add_argument
    add(
        "--output",
        default=Path("demo_output"),
        type=Path,
        metavar="DIR",
        help="folder for table and picture (default demo_output)",
    )
    # What is not given here is the demo's own to choose.
    add("--dtype", default=argparse.SUPPRESS, metavar="DTYPE", help="auto, float32, bfloat16")
    add(
        "--max-new-tokens",
        default=argparse.SUPPRESS,
        type=int,
        metavar="N",
        help="new tokens a prompt",
    )
    add("--budget", default=argparse.SUPPRESS, type=int, metavar="K", help="for Dustin")
    _add_debug(command)


def _add_debug(command: argparse.ArgumentParser) -> None:
    command.add_argument("--debug", action="store_true", help="show where an error was raised")


def _window(text: str) -> int:
    if text == "full":
        return 0
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'full'") from None

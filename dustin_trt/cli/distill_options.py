"""What `dustin-trt distill` takes. Imports nothing slow."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_DISTILL = """\
Make a draft for a target that has no smaller sibling: some of its layers between its own embeddings
and output rows, trained on texts to say what the target would. The draft shares the embeddings with
its target, so that its folder holds the layers alone.
"""

_EXAMPLES = """\
texts: files, folders of *.txt, books:NAME and austen:NAME (what the demo fetches), books:* for all
  of them. What is held out is not trained on, even where a wildcard names it.

examples:
  dustin-trt distill --target ~/models/Llama-3.1-8B-Instruct --output draft --num-layers 4 \\
      --text corpus/ --held-out judge.txt --vocabulary 32000 --device cuda
  dustin-trt distill --target … --output draft --text corpus/ --held-out judge.txt --resume
  dustin-trt generate --target … --draft draft --input prompts.jsonl --output out.jsonl

  --output gets the draft, distill.json (how it was made), acceptance.png, and work/, from which a
  run that was stopped or killed goes on with --resume to the same weights; work/ may be deleted
  afterwards. The draft is complete after every checkpoint. Ctrl-C ends the run after the step that
  is under way, with a checkpoint; a second one stops at once.

exit code: 0 done, 2 could not start or go on, 130 Ctrl-C
"""


def add_distill(commands: Any) -> argparse.ArgumentParser:
    """Add `distill` and return it."""
    command: argparse.ArgumentParser = commands.add_parser(
        "distill",
        help="a shallow draft for a target that has none",
        description=_DISTILL,
        epilog=_EXAMPLES,
    )
    add = command.add_argument_group("models").add_argument
    add("--target", required=True, type=Path, metavar="DIR", help="checkpoint folder")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for the draft")
    add(
        "--layers",
        type=_layers,
        metavar="0,15,29",
        help="target layers it starts from; the last one matters most",
    )
    add(
        "--num-layers",
        type=int,
        default=3,
        metavar="N",
        help="without --layers: so many, evenly spread, first and last among them (default 3)",
    )
    add(
        "--vocabulary",
        type=int,
        default=8192,
        metavar="N",
        help="tokens it can propose, the most frequent of the texts; 0 means all (default 8192)",
    )
    add(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="the target's, and of products: auto (the checkpoint's, default), float32, bfloat16",
    )
    add(
        "--save-dtype",
        default="bfloat16",
        metavar="DTYPE",
        help="the draft's weights on disk (default bfloat16)",
    )
    add("--device", default="cpu", metavar="DEVICE", help="cpu (default), cuda, cuda:1, …")
    add(
        "--licence",
        metavar="TEXT",
        help="of the draft, noted in distill.json (default: what the target's folder says)",
    )

    add = command.add_argument_group("texts").add_argument
    add("--text", required=True, nargs="+", metavar="TEXT", help="what to train on")
    add("--held-out", required=True, nargs="+", metavar="TEXT", help="what to judge by")
    add("--exclude", nargs="+", default=[], metavar="TEXT", help="not trained on either")
    add("--context", type=int, default=1024, metavar="N", help="tokens a sequence (default 1024)")
    add(
        "--retrieval-share",
        type=float,
        default=0.08,
        metavar="S",
        help="share of sequences that hide a pass key in the texts and ask for it, so that the "
        "draft looks far back (default 0.08; needs a chat template)",
    )
    add(
        "--held-out-sequences",
        type=int,
        default=8,
        metavar="N",
        help="sequences the curve is measured on (default 8)",
    )

    add = command.add_argument_group("training").add_argument
    add("--steps", type=int, default=1000, metavar="N", help="optimiser steps (default 1000)")
    add("--batch", type=int, default=4, metavar="N", help="sequences a step (default 4)")
    add(
        "--learning-rate",
        type=float,
        default=1e-3,
        metavar="R",
        help="peak of a cosine (default 1e-3)",
    )
    add("--warmup", type=int, default=50, metavar="N", help="steps up to the peak (default 50)")
    add(
        "--hard",
        type=float,
        default=0.3,
        metavar="W",
        help="weight of the target's likeliest token against its distribution (default 0.3)",
    )
    add(
        "--evaluate-every",
        type=int,
        default=50,
        metavar="N",
        help="steps from one point of the curve to the next (default 50)",
    )
    add(
        "--checkpoint-every",
        type=int,
        default=50,
        metavar="N",
        help="steps from one checkpoint to the next (default 50)",
    )
    add("--seed", type=int, default=0, metavar="S", help="order of the sequences (default 0)")
    add("--resume", action="store_true", help="go on with what --output holds")
    add("--quiet", action="store_true", help="no progress and no summary, only errors")
    return command


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(layer) for layer in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write layers like 0,15,29") from None

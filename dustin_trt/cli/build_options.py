"""What `dustin-trt build` takes. Imports nothing slow."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_BUILD = """\
Compile a target, and a draft, with their calibrated configuration into a folder of engines, for
generate --engine-dir and LLM(engine_dir=...).

  export    each model's step as one ONNX graph: scoring, selection and sparse attention inside
  compile   by TensorRT, with the Dustin plugins; two profiles (prefill, generation), one copy of
            the weights
  manifest  what was built from what, for which GPU; checked whenever the folder is loaded

backends:
  tensorrt      NVIDIA GPUs, with a TensorRT installation; built on the GPU it will run on
  tensorrt-rtx  RTX GPUs; also built where no GPU is (--compute-capability)
  onnx          the graphs alone, run on any CPU by ONNX's reference evaluator: to check an export
                token by token, far too slow to serve
"""

_EXAMPLES = """\
examples:
  dustin-trt build --target Qwen2.5-7B-Instruct --draft Qwen2.5-0.5B-Instruct \\
      --config dustin.json --max-batch 8 --max-context 32768 --output engines
  dustin-trt generate --engine-dir engines --input prompts.jsonl --output out.jsonl

  # without a GPU or TensorRT: export, and run the graphs on a short prompt
  dustin-trt build --target DIR --draft DIR --config dustin.json --backend onnx --output graphs

  # one graph a rank, with the collectives named, for a target that one GPU cannot hold
  dustin-trt build --target Llama-3.3-70B --backend onnx --dtype bfloat16 --tensor-parallel 4 \\
      --output shards

The folder appears when all of it is done: a run that fails or is stopped leaves nothing.
docs/tensorrt.md says what was run where, and how to build in a container.

exit code: 0 done, 2 could not build, 130 Ctrl-C
"""


def add_build(commands: Any) -> argparse.ArgumentParser:
    """Add `build` and return it."""
    command: argparse.ArgumentParser = commands.add_parser(
        "build",
        help="compile a pair into engines",
        description=_BUILD,
        epilog=_EXAMPLES,
    )
    add_build_arguments(command)
    return command


def add_build_arguments(command: argparse.ArgumentParser) -> None:
    """Add what `build.build.build_engines` takes, and --quiet."""
    add = command.add_argument_group("what").add_argument
    add("--target", required=True, type=Path, metavar="DIR", help="folder of a checkpoint")
    add("--draft", type=Path, metavar="DIR", help="folder of a draft model (default: none)")
    add("--config", type=Path, metavar="FILE", help="calibrated dustin.json (default: some heads)")
    add("--output", required=True, type=Path, metavar="DIR", help="folder to make; must not exist")

    add = command.add_argument_group("how").add_argument
    add(
        "--backend",
        default="tensorrt",
        metavar="NAME",
        help="tensorrt (default), tensorrt-rtx or onnx",
    )
    add(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="bfloat16, float16, for onnx also float32; auto is the checkpoint's (default)",
    )
    add(
        "--signal",
        metavar="NAME",
        help="what chooses: hybrid (default with draft heads), history or lookahead",
    )
    add(
        "--compute-capability",
        metavar="X.Y",
        help="for tensorrt-rtx, of the GPU to build for (default: this machine's)",
    )
    add("--plugins", type=Path, metavar="FILE", help="plugin library (default: the package's own)")
    add(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="where TensorRT keeps what it measured, so that a second build is faster",
    )
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="with onnx: cut the target into N graphs by KV head (default 1)",
    )
    add("--keep-graphs", action="store_true", help="leave the ONNX files beside the engines")

    add = command.add_argument_group("sizes").add_argument
    add("--max-batch", type=int, default=8, metavar="B", help="rows decoded at a time (default 8)")
    add(
        "--max-context",
        type=int,
        metavar="N",
        help="prompt and generated tokens of a request (default: the models' positions)",
    )
    add("--gamma", type=int, metavar="G", help="longest draft (default: --config's)")
    add("--chunk", type=int, default=512, metavar="N", help="prompt tokens a pass (default 512)")
    add("--page-size", type=int, default=64, metavar="N", help="tokens a cache page (default 64)")
    command.add_argument("--quiet", action="store_true", help="no progress, no summary")

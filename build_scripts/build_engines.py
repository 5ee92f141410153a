#!/usr/bin/env python3
"""`dustin-trt build` step by step, each perhaps in another place.

The steps of a build ask for different machines: exporting reads checkpoints and needs no GPU,
compiling needs TensorRT and the GPU that will serve. What one leaves in the folder the next finds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dustin_trt.build.build import (
    CompiledSteps,
    Options,
    Plan,
    build_engines,
    compile_graphs,
    export_graphs,
    new_folder,
    plan,
    write_manifest,
)
from dustin_trt.cli.build import Steps
from dustin_trt.cli.build_options import add_build_arguments
from dustin_trt.cli.progress import silence_transformers
from dustin_trt.files import write_whole
from dustin_trt.fingerprint import weights_fingerprint

_DESCRIPTION = """\
Build an engine folder as dustin-trt build does, one step at a time:

  export    write each model's step as ONNX into a new --output         any machine
  compile   compile the graphs there; needs the plugin library          the GPU that will serve
  manifest  add tokenizer and manifest: now it is an engine folder      any machine
  all       the three in one

Give every step the same options: each checks them against the checkpoints, and a step that finds
another plan than the one before is refused. The first two can be repeated.
"""

_EXAMPLES = """\
examples, with models and engines on a disk that both machines see:
  pair="--target models/target --draft models/draft --config dustin.json --output engines"
  python build_scripts/build_engines.py export $pair
  docker run --rm --gpus all -v "$PWD:/work" -w /work IMAGE \\
      python build_scripts/build_engines.py compile $pair --timing-cache timing.cache
  python build_scripts/build_engines.py manifest $pair

docs/tensorrt.md describes the image, and what was run where.
"""

_NOTES = "build.json"
"""Of the steps, in the folder until its manifest is there."""


def main() -> int:
    """Run a step; the exit code."""
    values = vars(_parser().parse_args())
    step, quiet, debug = (values.pop(name) for name in ("step", "quiet", "debug"))
    silence_transformers()
    try:
        with Steps(Console(stderr=True), quiet=quiet) as steps:
            _run(step, steps, **values)
    except KeyboardInterrupt:
        print("build_engines.py: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        print(f"build_engines.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _run(
    step: str,
    steps: Steps,
    *,
    target: Path,
    draft: Path | None,
    config: Path | None,
    output: Path,
    **options: Any,
) -> None:
    built = Options(**options)
    if step == "all":
        build_engines(target, draft, config, output, built, steps.at)
        return
    # Compiling leaves the graphs, for another machine's turn.
    with plan(target, draft, config, replace(built, keep_graphs=True)) as work:
        if step == "export":
            if (output / _NOTES).is_file():  # of this script
                shutil.rmtree(output)
            with new_folder(output) as folder:
                export_graphs(work, folder, steps.at)
                _note(work, folder)
            return
        compiled = _check(work, output)
        if step == "compile":
            _note(work, output, compile_graphs(work, output, steps.at))
            return
        if compiled is None:
            raise ValueError(f"{output} holds graphs alone: run compile first")
        write_manifest(work, output, compiled)
    (output / _NOTES).unlink()
    if built.backend != "onnx" and not built.keep_graphs:
        for graph in output.glob("*.onnx"):
            graph.unlink()
            graph.with_suffix(".weights").unlink()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("step", choices=("export", "compile", "manifest", "all"))
    add_build_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")
    return parser


def _note(work: Plan, folder: Path, compiled: CompiledSteps | None = None) -> None:
    notes: dict[str, Any] = {"plan": _plan(work), "compiled": None}
    if compiled:
        # Names alone: another machine sees the folder under another path.
        files = {name: [path.name for path in paths] for name, paths in compiled.files.items()}
        notes["compiled"] = {**asdict(compiled), "files": files}
    write_whole(folder / _NOTES, json.dumps(notes))


def _check(work: Plan, folder: Path) -> CompiledSteps | None:
    """What was compiled of this plan, if it was."""
    try:
        notes = json.loads((folder / _NOTES).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} has no exported graphs: run export first") from None
    if notes["plan"] != _plan(work):
        raise ValueError(
            f"{folder} was exported with other options or checkpoints: give the same, or run "
            "export again"
        )
    if (compiled := notes["compiled"]) is None:
        return None
    files = {name: [folder / file for file in names] for name, names in compiled["files"].items()}
    return CompiledSteps(**{**compiled, "files": files})


def _plan(work: Plan) -> Any:
    found = {
        "steps": [[name, step.model_dump(mode="json")] for name, _, step in work.steps],
        "config": work.config.model_dump(mode="json"),
        "backend": work.options.backend,
        "max_context": work.max_context,
        "signal": work.signal,
        "weights": [weights_fingerprint(each.folder) for _, each, _ in work.steps],
    }
    return json.loads(json.dumps(found))  # as it is read again: lists where there were tuples


if __name__ == "__main__":
    sys.exit(main())

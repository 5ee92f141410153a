"""What `dustin-trt calibrate` takes. Imports nothing slow."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_CALIBRATE = """\
Find, for one (target, draft) pair, which few heads choose the tokens that verification reads, and
how; write it as dustin.json.

  head scores   which heads of both models look at an answer while it is told
  profile       where heads look at windows of long texts and questions, teacher-forced
  search        heads that gain most attention and most answers per byte of keys read
  tune          how the signals join, sink, window and gamma (Optuna)
  check         on texts the search never saw: attention recovered, KL divergence, pass keys found
  report        report.html: whether the pair is good and what it costs, with the paper's figures
"""

_EXAMPLES = """\
  --output gets dustin.json (for --config of generate), report.html with figures/, results.json, and
  work/, from which a run that was stopped goes on with --resume; it may be deleted afterwards.

examples:
  dustin-trt calibrate --recipe calibration/recipes/smollm2.yaml --output smollm2
  dustin-trt calibrate --recipe calibration/recipes/smollm2.yaml --output smollm2 --resume
  dustin-trt generate --config smollm2/dustin.json --target … --draft … --input … --output …

exit code: 0 done, 2 could not start or go on, 130 Ctrl-C
"""


def add_calibrate(commands: Any) -> argparse.ArgumentParser:
    """Add `calibrate` and return it."""
    command: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        help="from a model pair to a dustin.json",
        description=_CALIBRATE,
        epilog=_EXAMPLES,
    )
    add = command.add_argument
    add(
        "--recipe",
        required=True,
        type=Path,
        metavar="FILE",
        help="YAML: the pair, texts, lengths, seed, limits; see calibration/recipes",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="folder for the results")
    add("--resume", action="store_true", help="go on with what --output holds")
    add("--quiet", action="store_true", help="no progress and no summary, only errors")
    return command

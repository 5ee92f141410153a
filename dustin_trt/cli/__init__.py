"""The command `dustin-trt`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from dustin_trt.cli.parser import build_parser

OK, ERROR_LINES, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: all served; some lines became error lines; nothing done; stopped by Ctrl-C."""

_EXPECTED = (ValueError, OSError, MemoryError, ImportError)
"""What wrong input raises, besides our own exceptions; anything else is a bug of ours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    An error is one line on stderr; `--debug` shows where it was raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(build_parser().parse_args(arguments))
    except SystemExit as exit:  # argparse after --help and --version
        return int(exit.code or 0)
    except KeyboardInterrupt:
        return _tell("stopped", INTERRUPTED)
    except Exception as error:
        if "--debug" in arguments:
            raise
        expected = isinstance(error, _EXPECTED) or type(error).__module__.startswith("dustin_trt")
        return _tell(error if expected else f"{error!r} was not foreseen: --debug shows where")


def _run(options: argparse.Namespace) -> int:
    values = vars(options)
    command = importlib.import_module(f"dustin_trt.cli.{values.pop('command')}")
    values.pop("debug")
    run: Any = command.run  # imported only now: torch takes seconds, and --help needs none of it
    return int(run(**values))


def _tell(problem: object, code: int = USER_ERROR) -> int:
    line = " ".join(str(problem).split()) or type(problem).__name__
    print(f"dustin-trt: error: {line}", file=sys.stderr)
    return code

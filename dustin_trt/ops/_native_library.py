"""Where the shared library of the native CPU kernels lies."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "DUSTIN_CPU_LIBRARY"


def find_library() -> Path | None:
    """The library that `DUSTIN_CPU_LIBRARY` names, else the one built with this package, else None.

    A build in the source tree and an installed wheel keep it in the same place: `dustin_trt/lib`.

    Raises
    ------
    FileNotFoundError
        When `DUSTIN_CPU_LIBRARY` names what is not a file.
    """
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise FileNotFoundError(f"{VARIABLE} names {named}, which is not a file: correct it")
        return Path(named).resolve()
    built = Path(__file__).parents[1] / "lib" / "libdustin_cpu.so"
    return built if built.is_file() else None

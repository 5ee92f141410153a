"""The shared libraries of the native kernels: where they lie, and what their C ABI says."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

ABI_VERSION = 2

CPU_LIBRARY = "cpu"
CUDA_LIBRARY = "cuda"

_ERRORS = {1: ValueError, 2: NotImplementedError, 3: MemoryError, 4: RuntimeError}
"""By `DustinStatus`."""


def variable(kind: str) -> str:
    """The environment variable that names a library, like `DUSTIN_CPU_LIBRARY`."""
    return f"DUSTIN_{kind.upper()}_LIBRARY"


def find_library(kind: str) -> Path | None:
    """The library that `variable(kind)` names, else the one built with this package, else None.

    A build in the source tree and an installed wheel keep it in the same place: `dustin_trt/lib`.

    Parameters
    ----------
    kind : `CPU_LIBRARY` or `CUDA_LIBRARY`

    Raises
    ------
    FileNotFoundError
        When the variable names what is not a file.
    """
    if named := os.environ.get(variable(kind)):
        if not Path(named).is_file():
            raise FileNotFoundError(
                f"{variable(kind)} names {named}, which is not a file: correct it"
            )
        return Path(named).resolve()
    built = Path(__file__).parents[1] / "lib" / f"libdustin_{kind}.so"
    return built if built.is_file() else None


def abi_problem(library: ctypes.CDLL, path: Path) -> str | None:
    """Why a library does not go with this package; None where it does."""
    version = library.dustin_abi_version()
    if version != ABI_VERSION:
        return (
            f"{path} has ABI version {version}, this package needs {ABI_VERSION}: "
            "install dustin-trt again"
        )
    return None


def error_of(library: ctypes.CDLL, status: int, op: str) -> Exception:
    """What a call that returned `status` raises; the library's message says why."""
    library.dustin_last_error.restype = ctypes.c_char_p
    message = library.dustin_last_error().decode(errors="replace")
    return _ERRORS[status](f"{op}: {message}")

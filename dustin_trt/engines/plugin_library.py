"""The library of the TensorRT plugins: where it is, and whether an engine was built with it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

VARIABLE = "DUSTIN_TRT_PLUGINS"
"""The environment variable that names another library."""

NAMESPACE, VERSION = "dustin", "1"
PLUGINS = (
    "DustinKvAppend", "DustinSrhScore", "DustinSelectTokens", "DustinSparseAttention",
    "DustinDenseAttention",
)  # fmt: skip
"""What the library registers with TensorRT."""


def plugin_library() -> Path | None:
    """The library that `DUSTIN_TRT_PLUGINS` names, else the one built with this package, else None.

    Raises
    ------
    FileNotFoundError
        When the variable names what is not a file.
    """
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise FileNotFoundError(f"{VARIABLE} names {named}, which is not a file: correct it")
        return Path(named).resolve()
    built = Path(__file__).parents[1] / "lib" / "libdustin_trt_plugins.so"
    return built if built.is_file() else None


def fingerprint(path: Path) -> str:
    """The first 16 hexadecimal digits of the file's SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:16]


def require_plugins(built_with: str | None = None) -> Path:
    """The library for engines that were built with the one of this fingerprint; None for any.

    Another build of the library is refused: an engine keeps the scratch memory that its builder was
    told, and a kernel that needs more would write past it.

    Raises
    ------
    FileNotFoundError
        There is no library, or none where the variable says.
    ValueError
        It is another one.
    """
    path = plugin_library()
    if path is None:
        raise FileNotFoundError(
            f"the TensorRT plugins were not built: make plugins builds them, or {VARIABLE} names "
            "their library"
        )
    if built_with is not None and (found := fingerprint(path)) != built_with:
        raise ValueError(
            f"the engines were built with plugins {built_with}, {path} is {found}: build the "
            f"engines again, or let {VARIABLE} name the library they were built with"
        )
    return path

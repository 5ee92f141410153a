"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file beside its place first, then rename: no half file is ever left there.

    Raises
    ------
    OSError
        A full disk, for one; what was at `path` stays.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)

"""The output file of a batch job: what is in it already, and how lines get into it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from dustin_trt.runtime.batch_input import BatchError, Id

_BEGINNING = b'{"id": '


def check_files(input_path: Path, output_path: Path) -> None:
    """Refuse files that cannot be used, before any model is loaded. Writes nothing.

    Raises
    ------
    BatchError
        The input is missing or unreadable, the output cannot be written, or both are one file.
    """
    if not input_path.exists():
        raise BatchError(f"there is no input file {input_path}")
    if input_path.is_dir() or not os.access(input_path, os.R_OK):
        raise BatchError(f"the input {input_path} is not a file that can be read")
    folder = output_path.absolute().parent
    if not folder.is_dir():
        raise BatchError(f"there is no folder {folder} for the output: create it")
    if output_path.exists():
        if not output_path.is_file():
            raise BatchError(f"the output {output_path} is not a regular file: name another")
        if output_path.samefile(input_path):
            raise BatchError("input and output are the same file: name another output")
        writable = os.access(output_path, os.W_OK)
    else:
        writable = os.access(folder, os.W_OK | os.X_OK)
    if not writable:
        raise BatchError(f"the output {output_path} cannot be written: name another")


class OutputFile:
    """An output file that is only ever whole lines.

    Opening it cuts off a line torn by a killed job. Each line is written and flushed to the disk
    before `append` returns; one that cannot be is taken back.

    Parameters
    ----------
    path : created where it does not exist

    Attributes
    ----------
    complete : ids that have a line, and whether that is an error line

    Raises
    ------
    BatchError
        The file cannot be written, holds something else than the output of a job, or is being
        written by another job.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complete: dict[Id, bool] = {}
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BatchError(f"the output {path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._end = self._read()
            if os.fstat(self._fd).st_size > self._end:
                os.ftruncate(self._fd, self._end)
        except OSError as error:
            os.close(self._fd)
            raise BatchError(f"the output {path} cannot be used: {error.strerror}") from error
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def append(self, line: dict[str, Any]) -> None:
        """Write a line that begins with its id.

        Raises
        ------
        BatchError
            The disk is full or gone; the file then still ends with the line before.
        """
        data = memoryview(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        end = self._end + len(data)
        try:
            while self._end < end:
                self._end += os.pwrite(self._fd, data[self._end - end :], self._end)
            os.fsync(self._fd)
        except BaseException as error:  # KeyboardInterrupt too
            self._end = end - len(data)
            os.ftruncate(self._fd, self._end)
            if not isinstance(error, OSError):
                raise
            raise BatchError(
                f"cannot write {self.path}: {error.strerror}; every finished line is saved: cure "
                "that and start the same job again to go on"
            ) from error
        self.complete[line["id"]] = "error" in line

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"another job is writing {self.path}: wait for it") from None
        except OSError:
            pass  # some network file systems have no locks; that is no reason not to run there

    def _read(self) -> int:
        """Note what is complete; the length of the part that is whole lines."""
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, raw in enumerate(file, 1):
                torn = not raw.endswith(b"\n")
                # Another program's file may lack its last newline too, and must not lose that line.
                if torn and _is_beginning(raw):
                    break
                id, failed = self._parse(raw, number)
                if torn:
                    break
                self.complete[id] = failed
                end += len(raw)
        return end

    def _parse(self, raw: bytes, number: int) -> tuple[Id, bool]:
        try:
            line = json.loads(raw)
            id, failed = line["id"], "error" in line
            if isinstance(id, str | int) and (failed or "token_ids" in line):
                return id, failed
        except (ValueError, TypeError, KeyError):
            pass
        raise BatchError(
            f"{self.path} holds something else than the output of a batch job (line {number}): "
            "name another output"
        )


def _is_beginning(raw: bytes) -> bool:
    """Whether this is a part of a line as `append` writes them."""
    try:
        json.loads(raw)
    except ValueError:
        return raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)
    return False  # a whole line, which may be someone else's

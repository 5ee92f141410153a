"""What a calibration has done so far, on disk, so that a killed one goes on where it was."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from filelock import FileLock, Timeout

from dustin_trt.calibration.samples import Samples
from dustin_trt.calibration.sequences import Passage
from dustin_trt.config import ConfigError
from dustin_trt.files import write_whole

T = TypeVar("T")


class CalibrationError(RuntimeError):
    """A calibration that cannot start or go on; the message is one line and says what to do."""


class TimeLimitError(CalibrationError):
    """The recipe's minutes are over; everything done is saved."""


class Progress(Protocol):
    """What watches a calibration."""

    def begin(self, step: str, total: int) -> None:
        """A step of so many units begins."""
        ...

    def advance(self, units: int) -> None:
        """So many units of it were done."""
        ...


class Quiet:
    """Nothing is shown."""

    def begin(self, step: str, total: int) -> None:
        """See `Progress.begin`."""

    def advance(self, units: int) -> None:
        """See `Progress.advance`."""


@dataclass
class Work:
    """The folder `work` of a calibration's output.

    folder : made if it does not exist
    made_with : what decides the results; other results in the folder are refused
    resume : go on with what is there
    minutes : of this run
    progress : told what happens
    """

    folder: Path
    made_with: dict[str, Any]
    resume: bool
    minutes: float | None = None
    progress: Progress = field(default_factory=Quiet)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        note = self.folder / "made_with.json"
        if note.exists():
            if not self.resume:
                raise CalibrationError(
                    f"{self.folder.parent} holds a calibration already: --resume goes on with it, "
                    "another --output starts anew"
                )
            there = json.loads(note.read_text(encoding="utf-8"))
            if changed := [
                name for name in self.made_with if there.get(name) != self.made_with[name]
            ]:
                raise ConfigError(
                    f"{self.folder.parent} was begun with another {', '.join(changed)}: use that, "
                    "or another --output"
                )

    def begin(self) -> None:
        """Take the folder: what would be refused has been.

        Raises
        ------
        CalibrationError
            Another run is using it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise CalibrationError(f"another run is using {self.folder.parent}") from None
        write_json(self.folder / "made_with.json", self.made_with)

    def once(self, name: str, make: Callable[[], T], step: str) -> T:
        """A JSON result by its name: read where it is there, else made and written."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            with self.timed(step):
                made = make()
            with told_of_full_disk(file):
                write_json(file, made)
        result: T = json.loads(file.read_text(encoding="utf-8"))
        return result

    def samples(
        self, name: str, look: Callable[[Passage], Samples], passage: Passage, step: str
    ) -> Samples:
        """Samples of a passage: read where they are there, else made and written."""
        file = self.folder / f"{name}.npz"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            with self.timed(step):
                seen = look(passage)
            with told_of_full_disk(file):
                seen.save(file)
        return Samples.load(file)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add what happens inside to a step's seconds, over all runs."""
        started = time.monotonic()
        yield
        seconds = self.seconds()
        seconds[step] = round(seconds.get(step, 0.0) + time.monotonic() - started, 1)
        write_json(self.folder / "seconds.json", seconds)

    def seconds(self) -> dict[str, float]:
        """Seconds by step so far, over all runs."""
        file = self.folder / "seconds.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def tell(self, units: int) -> None:
        """Units of the current step were done; stops where the recipe's minutes are over.

        Raises
        ------
        TimeLimitError
            See above.
        """
        self.progress.advance(units)
        if self.minutes and time.monotonic() - self._started > 60 * self.minutes:
            raise TimeLimitError(
                f"the recipe's limit of {self.minutes:g} minutes is reached; what was finished is "
                "saved: --resume goes on, limits.minutes in the recipe gives more"
            )


def write_json(file: Path, content: Any) -> None:
    """Write a whole JSON file or none."""
    write_whole(file, json.dumps(content, indent=1) + "\n")


@contextmanager
def told_of_full_disk(file: Path) -> Iterator[None]:
    """Turn a failed write into a line that says how to go on."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(file.parent).free / 2**30
        raise CalibrationError(
            f"cannot write {file} ({error.strerror or error}; {free:.1f} GiB free there): make "
            "room and run again with --resume"
        ) from error

"""TensorRT itself: imported, given our plugins, made to load engines, and asked what went wrong."""

from __future__ import annotations

import importlib
import mmap
from functools import cache
from pathlib import Path
from typing import Any

from dustin_trt.engines.plugin_library import NAMESPACE, PLUGINS, VERSION
from dustin_trt.engines.tensorrt_device import TensorRTError

_INSTALL = {
    "tensorrt": "install TensorRT 10.14 with its Python package from NVIDIA",
    "tensorrt_rtx": "pip install tensorrt-rtx",
}
_CHUNK = 32 << 20
"""Bytes of an engine file in host memory at a time."""
_OUT_OF_MEMORY = ("OutOfMemory", "out of memory")


@cache
def runtime(module: str, plugins: Path) -> Runtime:
    """The one runtime of a process: TensorRT has one registry and one log in each, too."""
    return Runtime(module, plugins)


class Runtime:
    """TensorRT with our plugins.

    Parameters
    ----------
    module : "tensorrt" or "tensorrt_rtx"
    plugins : their library

    Attributes
    ----------
    trt : the module

    Raises
    ------
    ImportError
        The module is missing, or a library that it needs.
    TensorRTError
        TensorRT does not start, or cannot load the plugins.
    ValueError
        The library holds other plugins, or others of another version.
    """

    def __init__(self, module: str, plugins: Path) -> None:
        self.trt = import_tensorrt(module)
        self._log = _make_log(self.trt)
        try:
            self._runtime = self.trt.Runtime(self._log)
        except (TypeError, RuntimeError) as error:  # how the binding says that it got a null
            why = self._log.first_error() or str(error)
            raise TensorRTError(f"{module} does not start: {why}") from error
        self._load(plugins)

    def _load(self, plugins: Path) -> None:
        registry = self.trt.get_plugin_registry()
        if self._missing(registry):  # whoever built engines in this process has loaded them
            self.forget_errors()
            if not plugins.is_file():
                raise TensorRTError(f"there is no plugin library {plugins}: make plugins builds it")
            if registry.load_library(str(plugins)) is None:
                raise TensorRTError(
                    f"the plugin library {plugins} cannot be loaded: {self.first_error()}; "
                    "build it again with make plugins"
                )
        if missing := self._missing(registry):
            raise ValueError(
                f"{plugins} has no {missing[0]}, version {VERSION}, in namespace {NAMESPACE}: it "
                "belongs to another version of dustin-trt; build it again with make plugins"
            )
        self.forget_errors()

    def _missing(self, registry: Any) -> list[str]:
        return [n for n in PLUGINS if registry.get_creator(n, VERSION, NAMESPACE) is None]

    def deserialize(self, path: Path) -> Any:
        """Load an engine; its weights go to the current device.

        Returns
        -------
        TensorRT's `ICudaEngine`

        Raises
        ------
        OSError
            The file cannot be read.
        MemoryError
            The GPU has not enough of it.
        ValueError
            TensorRT does not take the file: it is damaged, or for another TensorRT or GPU.
        """
        self.forget_errors()
        if hasattr(self.trt, "IStreamReaderV2"):
            reader = _make_reader(self.trt, path)
            engine = self._runtime.deserialize_cuda_engine(reader)
            reader.close()
            if reader.problem is not None:
                raise reader.problem
        else:
            # The file's own pages: TensorRT copies out of them, and nothing is copied before.
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
            ):
                engine = self._runtime.deserialize_cuda_engine(whole)
        if engine is None:
            why = self.first_error()
            if self.out_of_memory():
                raise MemoryError(f"the GPU has no memory left for {path}: {why}")
            raise ValueError(
                f"{path} cannot be loaded by TensorRT {self.trt.__version__}; it has to be built "
                f"with this TensorRT on such a GPU. TensorRT says: {why}"
            )
        return engine

    def forget_errors(self) -> None:
        """What TensorRT logs from now on is what counts."""
        self._log.errors.clear()

    def first_error(self) -> str:
        """The first error that TensorRT logged; those after it are mostly its consequences."""
        return self._log.first_error() or "nothing"

    def out_of_memory(self) -> bool:
        """Whether TensorRT has complained of that."""
        return any(sign in line for line in self._log.errors for sign in _OUT_OF_MEMORY)


def import_tensorrt(module: str) -> Any:
    """The module.

    Raises
    ------
    ImportError
        It, or a library that it needs, is missing.
    """
    install = _INSTALL.get(module, f"install {module}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(f"there is no Python module {module}: {install}", name=module) from error
    except (ImportError, OSError) as error:
        raise ImportError(
            f"{module} cannot be imported ({error}): {install}", name=module
        ) from error


def _make_log(trt: Any) -> Any:
    class Log(trt.ILogger):
        """Keeps errors, for whoever finds that something failed."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(" ".join(msg.split()))
                del self.errors[50:]

        def first_error(self) -> str:
            return self.errors[0][:500] if self.errors else ""

    return Log()


def _make_reader(trt: Any, path: Path) -> Any:
    class Reader(trt.IStreamReaderV2):
        """Hands a file to TensorRT piece by piece.

        An exception would be lost in the binding, so a problem is kept, and the file seems to end.
        """

        def __init__(self) -> None:
            trt.IStreamReaderV2.__init__(self)
            self.problem: OSError | None = None
            self._file = path.open("rb", buffering=0)
            self._whence = {
                trt.SeekPosition.SET: 0, trt.SeekPosition.CUR: 1, trt.SeekPosition.END: 2
            }  # fmt: skip

        def read(self, num_bytes: int, stream: int) -> bytes:
            try:
                return self._file.read(min(num_bytes, _CHUNK))
            except OSError as error:
                self.problem = error
                return b""

        def seek(self, offset: int, where: Any) -> bool:
            try:
                self._file.seek(offset, self._whence[where])
            except OSError as error:
                self.problem = error
                return False
            return True

        def close(self) -> None:
            self._file.close()

    try:
        return Reader()
    except RuntimeError as error:
        raise TensorRTError(f"TensorRT cannot read {path}: {error}") from error

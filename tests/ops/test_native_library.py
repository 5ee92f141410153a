import pytest

from dustin_trt.ops import _native_library, native
from dustin_trt.ops._native_library import CPU_LIBRARY, find_library, variable

VARIABLE = variable(CPU_LIBRARY)


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(_native_library, "__file__", str(tmp_path / "ops" / "_native_library.py"))
    return tmp_path


def test_a_package_without_a_library(package):
    assert find_library(CPU_LIBRARY) is None


def test_the_library_of_the_package(package):
    (package / "lib").mkdir()
    (package / "lib" / "libdustin_cpu.so").touch()
    assert find_library(CPU_LIBRARY) == package / "lib" / "libdustin_cpu.so"


def test_the_variable_comes_first(package, monkeypatch):
    other = package / "sanitized.so"
    other.touch()
    monkeypatch.setenv(VARIABLE, str(other))
    assert find_library(CPU_LIBRARY) == other


def test_a_variable_that_names_nothing(package, monkeypatch):
    monkeypatch.setenv(VARIABLE, "missing.so")
    with pytest.raises(FileNotFoundError, match=f"{VARIABLE} names missing.so"):
        find_library(CPU_LIBRARY)


def test_torch_in_a_folder_with_spaces(monkeypatch):
    maps = "7f00-7f01 r-xp 00000000 08:01 42      /a folder/torch/lib/libgomp-a34b.so.1\n"
    opened = []
    monkeypatch.setattr(native.Path, "read_text", lambda *_, **__: maps)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: opened.append(path))
    assert native._openmp_of_torch() is None
    assert opened == ["/a folder/torch/lib/libgomp-a34b.so.1"]

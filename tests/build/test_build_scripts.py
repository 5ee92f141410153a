"""The build scripts: step by step they make what `dustin-trt build` makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dustin_trt.engines.manifest import Manifest
from tests.build.pair import SIZES, build, configuration, save_pair

SCRIPTS = Path(__file__).parents[2] / "build_scripts"
BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def step(tmp_path, pair, monkeypatch, capsys):
    """A step of `build_engines.py` on the pair: its exit code and what it said."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("build_engines", SCRIPTS / "build_engines.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "dustin.json").write_text(configuration(*pair).model_dump_json())
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]

    def run(name: str, *options: str) -> tuple[int, str]:
        command = [
            "build_engines.py", name, "--target", str(pair[0]), "--draft", str(pair[1]),
            "--config", str(tmp_path / "dustin.json"), "--backend", "onnx", "--dtype", "float32",
            "--output", str(tmp_path / "made"), *sizes, *options,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", command)
        return script.main(), capsys.readouterr().err

    return run


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_step_by_step_is_all_at_once(tmp_path, pair, step):
    for name in ("export", "compile", "manifest"):
        code, said = step(name)
        assert code == 0, said
        with_manifest = (tmp_path / "made" / "manifest.json").is_file()
        assert with_manifest == (name == "manifest")
    whole = build(*pair, tmp_path / "whole")
    assert Manifest.load(tmp_path / "made") == Manifest.load(whole)
    assert names(tmp_path / "made") == names(whole)


def test_all(tmp_path, pair, step):
    assert step("all")[0] == 0
    assert Manifest.load(tmp_path / "made") == Manifest.load(build(*pair, tmp_path / "whole"))


def test_steps_can_be_repeated_and_moved(tmp_path, step):
    assert step("export")[0] == step("export")[0] == 0
    assert step("compile")[0] == step("compile")[0] == 0
    (tmp_path / "made").rename(tmp_path / "moved")  # as another machine sees it
    assert step("manifest", "--output", str(tmp_path / "moved"))[0] == 0
    Manifest.load(tmp_path / "moved")


def test_a_step_out_of_turn(step):
    code, said = step("compile")
    assert code == 2 and "no exported graphs: run export first" in said
    step("export")
    code, said = step("manifest")
    assert code == 2 and "holds graphs alone: run compile first" in said


@pytest.mark.parametrize("other", ["--max-batch=2", "--signal=history", "--gamma=2"])
def test_another_plan_is_refused(step, other):
    step("export")
    code, said = step("compile", other)
    assert code == 2 and "other options or checkpoints" in said


def test_a_finished_folder_is_kept(tmp_path, step):
    for name in ("export", "compile", "manifest"):
        step(name)
    code, said = step("export")
    assert code == 2 and "exists already" in said
    Manifest.load(tmp_path / "made")


def plugins_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [BASH, SCRIPTS / "build_plugins.sh", *arguments],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.skipif(BASH is None, reason="needs bash")
class TestBuildPlugins:
    def test_help(self):
        shown = plugins_script("--help")
        assert shown.returncode == 0 and "--architectures LIST" in shown.stdout

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--speed"], "unknown option --speed (--help)"),
            (["--jobs"], "--jobs needs a value"),
            (["--jobs", "many"], "--jobs is a number of 1 or more, not 'many'"),
            (["--tensorrt", "/nowhere"], "there is no folder /nowhere"),
            (["--output", "/nowhere"], "there is no folder /nowhere"),
        ],
    )
    def test_wrong_options_are_named(self, arguments, said):
        shown = plugins_script(*arguments)
        assert shown.returncode == 2 and said in shown.stderr

    def test_without_nvcc(self, tmp_path):
        if Path("/usr/local/cuda/bin/nvcc").exists():
            pytest.skip("CUDA is where it is found without PATH")
        for tool in ("nproc", "cmake", "dirname", "cat"):
            (tmp_path / tool).symlink_to(shutil.which(tool) or "/bin/true")
        shown = plugins_script(PATH=str(tmp_path))
        assert shown.returncode == 2 and "nvcc is not on PATH" in shown.stderr

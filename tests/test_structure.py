from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")

ROOT = Path(__file__).parents[1]
LINT = "import sys, importlinter.cli as c; sys.exit(c.lint_imports(no_cache=True, no_logo=True))"


def _lint(project: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT], cwd=project, capture_output=True, text=True, check=False
    )


def test_imports_go_down_only():
    result = _lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "upward"),
    [
        ("kv_cache", "models.decoder_layers"),
        ("models/causal_lm", "engines.base"),
        ("engines/torch_engine", "policies.dense"),
        ("drafting/lookup", "runtime.decoder"),
    ],
)
def test_an_upward_import_is_found(tmp_path, module, upward):
    shutil.copytree(ROOT / "dustin_trt", tmp_path / "dustin_trt")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "dustin_trt" / f"{module}.py"
    source.write_text(f"{source.read_text()}\nimport dustin_trt.{upward}\n")
    result = _lint(tmp_path)
    assert result.returncode == 1
    broken = f"dustin_trt.{module.replace('/', '.')} -> dustin_trt.{upward}"
    assert broken in " ".join(result.stdout.split()), result.stdout + result.stderr

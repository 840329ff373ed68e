"""Compiled kernels on disk, so that a second start compiles nothing.

An entry is the SHA-256 of what it holds followed by that. Its name is a hash of everything that
decides what it holds, so entries never go stale; the folder may be deleted at any time.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tilert import nvrtc

__all__ = ["cubin", "cubin_name", "folder", "hashed", "read", "write"]

_log = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """Where entries are: `kernels` in $GROUT_CACHE, $XDG_CACHE_HOME/grout or ~/.cache/grout."""
    if chosen := os.environ.get("GROUT_CACHE"):
        return Path(chosen) / "kernels"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "grout" / "kernels"
    return Path.home() / ".cache" / "grout" / "kernels"


def hashed(*parts: str) -> str:
    """A name for what is decided by the parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cubin_name(text: str, entry: str, arch: str) -> str:
    """The name of a cubin's entry."""
    return hashed(text, entry, arch, nvrtc.version(), *nvrtc.OPTIONS) + ".cubin"


def cubin(
    text: str, entry: str, arch: str, compiler: Callable[[str, str, str], bytes] = nvrtc.compile
) -> bytes:
    """The cubin of a kernel, from disk if it has been compiled before.

    A corrupt entry is compiled again. A folder that cannot be read or written costs the cache,
    never the kernel.

    Raises:
        CompileError: if the source does not compile.
    """
    name = cubin_name(text, entry, arch)
    found = read(name)
    if found is None:
        found = compiler(text, entry, arch)
        write(name, found)
    return found


def read(name: str) -> bytes | None:
    """What an entry holds, None if there is none that can be used."""
    try:
        path = folder() / name
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        _log.warning("cannot read compiled kernel %s: %s", name, error)
        return None
    digest, payload = data[:_DIGEST], data[_DIGEST:]
    if not payload or hashlib.sha256(payload).digest() != digest:
        _log.warning("compiled kernel %s is corrupt and is compiled again", path)
        return None
    return payload


def write(name: str, payload: bytes) -> None:
    """Replace an entry in one step, so that other processes see the old or the new one."""
    temporary = ""
    try:
        path = folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16])
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        _log.warning("cannot keep compiled kernel %s: %s", name, error)
        if temporary:
            Path(temporary).unlink(missing_ok=True)

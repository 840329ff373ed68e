"""NVRTC's version without NVRTC, which takes a tenth of a second to load.

A process that has loaded it leaves a note beside the compiled kernels: the library's file, what
could make another process load another one, and the version. Where a later process finds all of
that as it was, the version is what it was. Names of compiled kernels are made of it. So if it were
wrong for all that, a kernel would be found that the NVRTC before has made of the same text.
"""

import functools
import json
import os
import sys
from typing import Any

from tilert import entries, nvrtc

__all__ = ["version"]

_VARIABLES = ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")


def version() -> str:
    """NVRTC's version, such as "13.0".

    Raises:
        CompileError: if it is not known and NVRTC is missing.
    """
    if nvrtc.is_loaded():
        return nvrtc.version()
    known = _noted()
    if known is None:
        known = nvrtc.version()
        _note(known)
    return known


@functools.cache
def _noted() -> str | None:
    """The version by the note, None where that does not hold, or is no note."""
    try:
        note: Any = json.loads(entries.read(_name()) or "null")
        holds = note is not None and note["seen"] == _seen(note["library"])
        return str(note["version"]) if holds else None
    except (KeyError, TypeError, ValueError):
        return None


def _note(known: str) -> None:
    library = nvrtc.library()
    if library is not None:
        note = {"library": library, "seen": _seen(library), "version": known}
        entries.write(_name(), json.dumps(note).encode())


def _name() -> str:
    return entries.hashed("nvrtc", sys.prefix, sys.version) + ".version"


def _seen(library: str) -> list[Any]:
    """What is here now of what decides which library is loaded, and which version that has.

    Whatever is installed into a folder of packages changes the folder's time.
    """
    packages = [path for path in sys.path if os.path.isdir(os.path.join(path, "nvidia"))]
    variables = [os.environ.get(name) for name in _VARIABLES]
    return [variables, [[path, _state(path)] for path in packages], _state(library)]


def _state(path: str) -> list[int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]

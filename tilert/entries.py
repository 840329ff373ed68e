"""What is kept on disk for later processes, as entries of one folder.

An entry is the SHA-256 of what it holds followed by that. Its name is a hash of everything that
decides what it holds, so entries never go stale; the folder may be deleted at any time.

What a process has used it may leave in one more file, the bundle, that the next one reads at once:
a file each means some calls each that give up the interpreter's lock, and wait for it.
"""

import hashlib
import json
import logging
import os
import tempfile
import threading
from pathlib import Path

__all__ = ["bundle", "folder", "hashed", "read", "write"]

_log = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size
_COUNT = 8
_VARIABLES = ("GROUT_CACHE", "XDG_CACHE_HOME", "HOME")
_BUNDLE = "used.bundle"
_MOST_BYTES = 8 << 20
"""In a bundle, which is read as a whole. The kernels of a model take two megabytes."""


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


def read(name: str) -> bytes | None:
    """What an entry holds, None if there is none that can be used."""
    with _lock:
        known = _known()
        found = known.bundled.get(name)
        if found is None:
            found = _read(name)
        if found is not None:
            known.used[name] = name not in known.bundled
    return found


def write(name: str, payload: bytes) -> None:
    """Replace an entry in one step, so that other processes see the old or the new one."""
    _write(name, payload)
    with _lock:
        known = _known()
        known.bundled.pop(name, None)
        known.used[name] = True


def bundle() -> None:
    """Leave what this process has used to the next ones in one file, if it is not there yet.

    What others have left stays behind it, as long as there is room.
    """
    with _lock:
        known = _known()
        if any(known.used.values()):
            # Another process may have left something meanwhile.
            before = _bundled()
            used = {n: _read(n) if new else before.get(n) for n, new in known.used.items()}
            found = {n: payload for n, payload in used.items() if payload is not None}
            kept = _first(found | {n: p for n, p in before.items() if n not in found})
            if kept != before:
                names = json.dumps([[name, len(payload)] for name, payload in kept.items()])
                head = len(names).to_bytes(_COUNT) + names.encode()
                _write(_BUNDLE, b"".join([head, *kept.values()]))
        # From now on a process needs few, one at a time.
        known.bundled.clear()
        known.used = dict.fromkeys(known.used, False)


def _first(found: dict[str, bytes]) -> dict[str, bytes]:
    """So many of the first entries as there is room for."""
    kept, left = dict[str, bytes](), _MOST_BYTES
    for name, payload in found.items():
        left -= len(payload)
        if left < 0:
            break
        kept[name] = payload
    return kept


class _Known:
    """What is known of the entries of a folder.

    Attributes:
        bundled: what the bundle holds.
        used: entries that this process has used, and whether the bundle has to be told.
    """

    def __init__(self) -> None:
        self.bundled = _bundled()
        self.used: dict[str, bool] = {}


_lock = threading.Lock()
_folders: dict[tuple[str | None, ...], _Known] = {}


def _known() -> _Known:
    # What the folder follows from: paths take longer to make.
    given = tuple([os.environ.get(name) for name in _VARIABLES])
    if given not in _folders:
        _folders[given] = _Known()
    return _folders[given]


def _bundled() -> dict[str, bytes]:
    """The entries of the bundle; none where it is damaged, or was made by another version."""
    data = _read(_BUNDLE)
    if data is None:
        return {}
    found: dict[str, bytes] = {}
    try:
        at = _COUNT + int.from_bytes(data[:_COUNT])
        for name, size in json.loads(data[_COUNT:at]):
            found[name] = data[at : at + size]
            at += size
    except (TypeError, ValueError):
        at = -1
    if at != len(data):
        _log.warning("the compiled kernels in %s are read one by one: another version?", _BUNDLE)
        return {}
    return found


def _read(name: str) -> bytes | None:
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


def _write(name: str, payload: bytes) -> None:
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

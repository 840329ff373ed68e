"""Reading files that people hand over: regular ones only, with errors of one line."""

import json
import re
import reprlib
import stat
from pathlib import Path
from typing import Any

from models.errors import LoadError

_LONGEST_NAME = 200
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60
_brief.maxlevel = 2


def is_file(path: Path, error: type[LoadError] = LoadError) -> bool:
    """Whether a regular file is there; False if nothing is.

    Raises `error`, naming the path, for anything else: a folder, a FIFO or a device (reading
    those may never end), a name that is too long, a folder that may not be searched.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
        raise error(f"{shown_path(path)}: {reason(problem)}") from None
    if stat.S_ISREG(mode):
        return True
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise error(f"{path}: this is {kind}, not a regular file")


def read_text(path: Path, error: type[LoadError] = LoadError) -> str:
    """The UTF-8 text of a regular file. Raises `error` naming the file."""
    if not is_file(path, error):
        raise error(f"{path} is missing")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise error(f"{path}: cannot be read as text: {reason(problem)}") from None


def read_json(path: Path, error: type[LoadError] = LoadError) -> dict[str, Any]:
    """The JSON object in a regular file. Raises `error` naming the file."""
    text = read_text(path, error)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: cannot be read as JSON: {reason(problem)}") from None
    if _SURROGATE_ESCAPE.search(text) and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise error(f"{path}: holds a lone surrogate, half of a character, which is not Unicode")
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object")
    return value


def expand_user(name: str) -> Path:
    """The path with a leading `~` or `~user` replaced. Raises LoadError for an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise LoadError(f"{shown_path(name)}: the home folder is not known") from None


def reason(error: BaseException) -> str:
    """What went wrong in one line, without the name of the file that an OSError repeats."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def shown(value: object) -> str:
    """A value from a file as an error message shows it: one line, and not a long one."""
    return _brief.repr(value)


def shown_path(path: Path | str) -> str:
    """A path as an error message shows it: its middle left out if it is very long."""
    name = str(path)
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME // 2]}...{name[-_LONGEST_NAME // 4 :]}"
    return name if name.isprintable() else repr(name)

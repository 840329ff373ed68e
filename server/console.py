"""Lines for whoever looks at the terminal; a full disk under it must not stop a server."""

import contextlib
import sys
from typing import TextIO

__all__ = ["say"]


def say(text: str, stream: TextIO | None = None) -> None:
    """Write lines to `stream` (stderr), or nothing where that cannot be written to."""
    lines = "".join(f"grout: {line}\n" for line in text.splitlines())
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(lines, end="", file=stream or sys.stderr, flush=True)

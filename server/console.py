"""Lines for whoever looks at the terminal; a full disk under it must not stop a server."""

import contextlib
import os
import sys
from typing import TextIO

__all__ = ["drop_unwritten", "say"]


def say(text: str, stream: TextIO | None = None) -> None:
    """Write lines to `stream` (stderr), or nothing where that cannot be written to."""
    lines = "".join(f"grout: {line}\n" for line in text.splitlines())
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(lines, end="", file=stream or sys.stderr, flush=True)


def drop_unwritten() -> None:
    """Drop what stdout and stderr still hold where that cannot be written to.

    Python would try once more as it ends, and make that the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())

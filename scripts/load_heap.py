"""The Python heap of a server process, seen from outside: `traced/sitecustomize.py` tells it."""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.serving_process import family

__all__ = ["Heap", "traced"]

SNAPSHOT_SECONDS = 120.0
"""How long a process may take to look through its heap."""


@dataclass
class Heap:
    """What to start a server with, and once it has started how its Python objects grow.

    environment: variables for the command. pid: of the process or one it descends from.
    """

    folder: Path
    pid: int | None = None
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        site = str(Path(__file__).parent / "traced")
        path = os.environ.get("PYTHONPATH")
        self.environment = {
            "LOAD_TEST_HEAP": str(self.folder),
            "PYTHONPATH": site if path is None else f"{site}{os.pathsep}{path}",
        }

    def size(self) -> int | None:
        """Bytes of Python objects in all processes; None where none can be asked."""
        replies = self._ask("size")
        return sum(int(reply["bytes"]) for reply in replies) if replies else None

    def begin(self) -> None:
        """Remember what there is, for `grown`."""
        self._ask("begin")

    def grown(self) -> list[str]:
        """Where most of what came since `begin` and is still there was made, most first."""
        return [line for reply in self._ask("end") for line in reply.get("grown", [])]

    def _ask(self, word: str) -> list[dict[str, Any]]:
        found = []
        for pid in [] if self.pid is None else family(self.pid):
            if (self.folder / str(pid)).is_socket():
                with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as to:
                    to.settimeout(SNAPSHOT_SECONDS)
                    to.connect(str(self.folder / str(pid)))
                    to.sendall(word.encode())
                    found.append(json.loads(b"".join(iter(lambda: to.recv(1 << 16), b""))))
        return found


@contextlib.contextmanager
def traced(wanted: bool) -> Iterator[Heap | None]:
    """A heap to start a server with, if it is wanted."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Heap(Path(folder))

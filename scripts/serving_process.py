"""Servers as processes: starting one for a measurement, and what a process uses, from /proc."""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

STOP_SECONDS = 30.0
"""How long a server may take to end after SIGTERM."""

_ENDING = signal.SIGTERM, signal.SIGHUP


class StartError(Exception):
    """A server did not start."""


@contextlib.contextmanager
def started(
    command: str, url: str, seconds: float, variables: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run `command` until the block ends; yields its process id once `url`/health answers 200.

    It is stopped, too, where this process is told to end by a signal.

    variables: of its environment, beside this process's. Its output goes to a temporary file, of
    which `StartError` shows the end.
    """
    if is_healthy(url):
        raise StartError(f"{url} already answers; stop that server first")
    with tempfile.TemporaryFile() as log, _ending():
        try:
            process = subprocess.Popen(
                shlex.split(command),
                env={**os.environ, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"cannot run {command!r}: {error}") from None
        try:
            deadline = time.monotonic() + seconds
            while not is_healthy(url):
                if process.poll() is not None:
                    raise StartError(f"{command!r} ended with {process.returncode}\n{_tail(log)}")
                if time.monotonic() > deadline:
                    raise StartError(f"{url}/health: nothing after {seconds:g} s\n{_tail(log)}")
                time.sleep(0.2)
            yield process.pid
        finally:
            _stop(process)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Signals that would end the process at once raise SystemExit, so that what it started goes
    with it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # Handlers belong to the main thread; those that somebody has set stay.
    ours = threading.current_thread() is threading.main_thread()
    numbers = [n for n in _ENDING if ours and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def is_healthy(url: str) -> bool:
    """Whether `url`/health answers 200 now."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    # The group: a command may be a shell script, or have workers of its own.
    for signal_number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(log: IO[bytes], size: int = 2000) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(end - size, 0))
    return log.read().decode("utf-8", "replace").strip()


def family(pid: int) -> list[int]:
    """`pid` and all that descend from it, of the processes that live."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        one = queue.pop()
        found.append(one)
        queue += children.get(one, [])
    return found


def private_bytes(pid: int) -> int:
    """Memory that a process and its descendants have for themselves, swapped out or not.

    Not what is mapped from files, which comes and goes as the kernel likes. 0 where /proc has none
    of them.
    """
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            for line in Path(f"/proc/{one}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "VmSwap:")):
                    total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pid: int) -> float:
    """CPU time, user and system, of a process and its living descendants."""
    ticks = 0
    for one in family(pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")

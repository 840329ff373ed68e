"""How much memory the host has and can still give."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import resource

__all__ = ["host_memory"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_FILES = ("inactive_file", "active_file", "slab_reclaimable")
"""Of a control group's memory.stat: bytes that it counts as used and gives up when asked."""


def host_memory() -> tuple[int, int]:
    """(bytes that can be had without swapping, bytes in all), within this process's limits.

    Those are what its control groups (containers) and `ulimit` set. Where the system does not say
    what is free, half of all memory is taken to be.
    """
    if sys.platform == "win32":
        return _windows()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _numbers(_PROC / "meminfo").get("MemAvailable:", total // 2048) * 1024
    for left, most in (*_groups(), *_limits()):
        free, total = min(free, left), min(total, most)
    return max(0, free), total


def _numbers(path: Path) -> dict[str, int]:
    """The lines of a file that are a name and a number, perhaps with a unit; none if unreadable."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, number, *_ = [*line.split(), "", ""]
            if number.isdecimal():
                found[name] = int(number)
    return found


def _groups() -> Iterator[tuple[int, int]]:
    """(bytes left, limit) of each control group with a limit that this process is in.

    A limit holds for all groups below it. In a container the path may be that of the host, whose
    folders are not there; its own limit is then that of the root.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, most, used, prefix = _CGROUP, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, prefix = _CGROUP / "memory", "total_"
            most, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # It says "max", or has no such file.
                limit = int((group / most).read_text())
                stat = _numbers(group / "memory.stat")
                kept = sum(stat.get(prefix + name, 0) for name in _FILES)
                yield limit - int((group / used).read_text()) + kept, limit
            if group == root:
                break


def _limits() -> Iterator[tuple[int, int]]:
    """(bytes left, limit) of each `ulimit` of this process's memory."""
    if sys.platform != "win32":
        status = _numbers(_PROC / "self" / "status")
        for which, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
            limit, _ = resource.getrlimit(which)
            if limit != resource.RLIM_INFINITY:
                yield limit - status.get(name, 0) * 1024, limit


if sys.platform == "win32":

    class _MemoryStatus(ctypes.Structure):
        """MEMORYSTATUSEX of the Windows API."""

        _fields_ = (
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            ("total", ctypes.c_uint64),
            ("available", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 5),
        )

    def _windows() -> tuple[int, int]:
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.available, status.total

"""How much memory the host has and can still give."""

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["host_memory"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_memory() -> tuple[int, int]:
    """(bytes that can be had without swapping, bytes in all), within a container's limit.

    Where the system does not say what is free, half of all memory is taken to be.
    """
    if sys.platform == "win32":
        return _windows()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total // 2
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, KeyError, ValueError):
        # Not Linux, or no limit: the file is absent or says "max".
        return free, total
    return max(0, min(free, limit - used)), min(total, limit)


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

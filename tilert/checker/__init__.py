"""The checker (rule O8): kernels interpreted on the cpu with shadow memory.

A cpu device that is made while `TILERT_CHECK=1` is set is checked, and so is that of `checking()`.
"""

import contextlib
from collections.abc import Iterator

from tilert.device import Device, standing_in

__all__ = ["checking"]


@contextlib.contextmanager
def checking() -> Iterator[Device]:
    """Gives a checked cpu device, which `tilert.device("cpu")` gives too until the end.

    Arrays of other cpu devices do not go with it.
    """
    from tilert.cpu_device import CpuDevice

    checked = CpuDevice(check=True)
    with standing_in(checked):
        yield checked

"""The checker (rule O8): kernels interpreted on the cpu with shadow memory, or on a GPU with bounds
checks compiled in.

A device that is made while `TILERT_CHECK=1` is set is checked, and so is that of `checking()`.
"""

import contextlib
from collections.abc import Iterator

from tilert.device import Device, open_device, standing_in

__all__ = ["checking"]


@contextlib.contextmanager
def checking(name: str = "cpu", *, strict: bool = False) -> Iterator[Device]:
    """Gives a checked device, which `tilert.device(name)` gives too until the end.

    Arrays of other devices do not go with it.

    Args:
        name: "cpu", "cuda" or "cuda:<n>".
        strict: whether it is an error too to read outside of an array or a tile, where the language
            gives the fill value.

    Raises:
        DeviceError: if there is no such device.
    """
    checked = open_device("cuda:0" if name == "cuda" else name, "strict" if strict else True)
    with standing_in(checked):
        yield checked

"""Filling an array with bytes that come from elsewhere, such as a file, without a copy between."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tilert.array import Array

__all__ = ["fill_from"]


def fill_from(
    array: Array, read: Callable[[int, np.ndarray[Any, np.dtype[np.uint8]]], None]
) -> None:
    """Overwrite a contiguous array with bytes that `read(start, buffer)` puts into buffers.

    `start` is the place of the buffer's first byte in the array; buffers hold whole elements and
    follow each other. On a GPU they are pinned memory, from which copies run while the next buffer
    is filled. Threads may fill different arrays of a device at the same time.

    What `read` raises passes through; the array's contents are undefined then.

    Raises:
        ValueError: if the array is not contiguous.
        MovedError: if an op holds part of it.
        OwnershipError: if it may not be written.
        LaunchError: during a capture.
    """
    if not array.is_contiguous:
        raise ValueError(f"cannot fill {array!r} from bytes: it is not contiguous")
    array.check_writable("fill_from")
    array.check_free(write=True)
    array.device.refuse_in_capture("a copy from the host")
    if array.size:
        array.device.fill_bytes(array, read)

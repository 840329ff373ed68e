"""Partitions and ops made during a capture, which must let go when the capture is dropped."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tilert.device import Device
    from tilert.ownership import At

__all__ = ["Pending", "note_pending"]


class Pending(Protocol):
    """What may hold an array."""

    def release(self) -> None:
        """Give it back."""


def note_pending(device: "Device", made: Pending, op: "tuple[str, At] | None" = None) -> None:
    """Tell the capture that this thread makes, if any, of a new partition or op.

    Args:
        op: kernel of an op, and where it was made.
    """
    # Another thread's capture has the lock, and is over when this thread gets it.
    with device.lock:
        if device.recorder is not None:
            device.recorder.watch(made, op)

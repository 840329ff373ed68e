"""Streams: queues of a device beside its own, for work that may run at the same time (rule O4)."""

from typing import TYPE_CHECKING

from tilert.errors import LaunchError

if TYPE_CHECKING:
    from tilert.device import Device
    from tilert.event import Event
    from tilert.order import Lane, Ticket

__all__ = ["Stream"]


class Stream:
    """A queue of work of one device, from `Device.stream`. Leave it by `with`, or close it.

    It begins behind everything that is enqueued on the device's own stream at that moment, and when
    it is closed the device's own stream goes on behind it. In between, work on it runs beside work
    on other streams, except where both use the same memory and one of them writes it: then in the
    order in which it was enqueued. Dropping a stream closes it.

    Attributes:
        device: whose queue it is.
    """

    __slots__ = ("__weakref__", "_lane", "_last", "device")

    def __init__(self, device: "Device", lane: "Lane") -> None:
        self.device = device
        self._lane: Lane | None = lane
        self._last: Ticket | None = None

    def __repr__(self) -> str:
        return f"<{'closed ' if self._lane is None else ''}stream of {self.device.name}>"

    @property
    def closed(self) -> bool:
        """Whether it has gone back to the device."""
        return self._lane is None

    @property
    def last(self) -> "Ticket | None":
        """Of the newest work on it, also after it was closed; None where there is no order."""
        return self._last if self._lane is None else self._lane.last

    def lane(self, device: "Device") -> "Lane":
        """What its device, which is to be `device`, knows it by.

        Raises:
            LaunchError: if it is closed, or of another device.
        """
        if self.device is not device:
            raise LaunchError(
                f"O4 in flight: work of {device.name} cannot run on a stream of {self.device.name}"
            )
        if self._lane is None:
            raise LaunchError(
                "O4 in flight: this stream is closed; take another with device.stream()"
            )
        return self._lane

    def record_event(self, timing: bool = False) -> "Event":
        """A mark after all work enqueued on the stream so far.

        Raises:
            LaunchError: if the stream is closed, or during a capture.
        """
        return self.device.record_event(timing, self)

    def synchronize(self) -> None:
        """Wait for all work enqueued on the stream.

        Raises:
            LaunchError: if the stream is closed, or during a capture.
            DeviceError: if some of the work failed.
        """
        self.record_event().wait()

    def close(self) -> None:
        """Give the queue back. Work on it completes; closing it again does nothing."""
        with self.device.lock:
            if self._lane is not None:
                lane, self._lane = self._lane, None
                self._last = lane.last
                self.device.close_lane(lane)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        lane = getattr(self, "_lane", None)
        if lane is not None:
            self.device.drop_lane(lane)

"""Events: marks in a device's queue that the host can ask about or wait for."""

from abc import ABC, abstractmethod

__all__ = ["DoneEvent", "Event"]


class Event(ABC):
    """The moment when everything enqueued before it is complete."""

    def __repr__(self) -> str:
        # Whether it has passed may not be asked everywhere, such as in a capture.
        return "<event>"

    @abstractmethod
    def done(self) -> bool:
        """Whether it has passed; does not wait.

        Raises:
            DeviceError: if earlier work failed.
        """

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until it has passed.

        Raises:
            DeviceError: if earlier work failed.
        """

    @abstractmethod
    def since(self, earlier: "Event") -> float:
        """Seconds of device time between `earlier` and this event, both made with `timing`.

        Raises:
            DeviceError: if one of them has not passed or was made without `timing`.
        """


class DoneEvent(Event):
    """An event of the cpu, where work is complete once it is enqueued."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __repr__(self) -> str:
        return "<event, passed>"

    def done(self) -> bool:
        """See `Event`."""
        return True

    def wait(self) -> None:
        """See `Event`."""

    def since(self, earlier: Event) -> float:
        """See `Event`."""
        if not isinstance(earlier, DoneEvent):
            raise TypeError("the events are of different devices")
        return self._seconds - earlier._seconds

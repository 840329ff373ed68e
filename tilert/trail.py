"""The trail of a device: which ops were enqueued last, for errors that show only later."""

from collections import deque

from tilert.driver import LostError
from tilert.ownership import At, Place

__all__ = ["Trail"]

_MOST = 16


class Trail:
    """The last ops and graph replays enqueued on a device since the host waited for all of it.

    Attributes:
        add: takes an op's kernel and where the op was made, or None and where a graph was captured.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[str | None, At]] = deque(maxlen=_MOST)
        # Nothing but an append: it is on the way of every launch.
        self.add = self._last.append

    def clear(self) -> None:
        """Everything enqueued so far is complete, and was right."""
        self._last.clear()

    def explain(self, error: Exception) -> None:
        """Where the device is lost, say in a note which work may be to blame."""
        if isinstance(error, LostError) and self._last:
            shown = [
                f"op '{kernel}' created at {Place(*at)}"
                if kernel is not None
                else f"a replay of the graph captured at {Place(*at)}"
                for kernel, at in list(self._last)
            ]
            error.add_note(f"enqueued last, the newest at the end: {'; '.join(shown)}")

    def name(self, error: Exception, kernel: str) -> None:
        """Say in a note which ops of a kernel were enqueued."""
        places = {str(Place(*at)): None for one, at in list(self._last) if one == kernel}
        if places:
            error.add_note(f"enqueued as op '{kernel}' created at {' or '.join(places)}")

"""Whether products of one shape are shared out over threads: as measured while they run."""

__all__ = ["Plan"]

# Recent times that count, of either way.
_WINDOW = 4
# Calls until the slower way is tried again: doubled each time, up to the second.
_FIRST_GAP, _LAST_GAP = 8, 128
# Calls of a trial: enough to change the mean.
_TRIAL = 2


def _typical(seconds: list[float]) -> float:
    """The mean without the largest."""
    return (sum(seconds) - max(seconds)) / (len(seconds) - 1)


class Plan:
    """Alone or shared: whichever took less time of late, the other once in a while.

    Two threads may share a memory bus that one can fill, and other processes may want the cores: no
    rule knows. Both ways give the same result.

    Attributes:
        width: columns of a part.
        whole: whether one call for all columns gives the same bits as the parts; None: not known.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.whole: bool | None = None
        self._alone: list[float] = []
        self._shared: list[float] = []
        self._shares = False
        self._calls = 0
        self._gap = _FIRST_GAP

    def shares(self) -> bool:
        """Whether to share the next product."""
        for times, answer in ((self._shared, True), (self._alone, False)):
            if len(times) < _WINDOW:
                return answer
        shares = _typical(self._shared) < _typical(self._alone)
        if shares != self._shares:
            self._shares, self._calls, self._gap = shares, 0, _FIRST_GAP
        self._calls += 1
        if self._calls <= self._gap:
            return shares
        if self._calls >= self._gap + _TRIAL:
            self._calls, self._gap = 0, min(2 * self._gap, _LAST_GAP)
        return not shares

    def note(self, shared: bool, seconds: float) -> None:
        """What the product took."""
        times = self._shared if shared else self._alone
        times.append(seconds)
        if len(times) > _WINDOW:
            del times[0]

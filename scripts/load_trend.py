"""Whether memory grows with the requests served: a slope, and how far it can be trusted."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Sample", "Trend", "trend"]

WINDOWS = 12
"""Parts of a run that each give one point: within one, readings depend on each other."""

STUDENT = 2.23
"""Standard errors to either side of a slope of `WINDOWS` points that hold the true one, 19 times in
20."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment of a run.

    seconds: since its begin. requests: whose outcome was known. memory: bytes that the server had
    for itself, heap: bytes of its Python objects, where known. state: its own metrics.
    """

    seconds: float
    requests: int
    memory: int | None
    heap: int | None
    state: dict[str, float]


@dataclass(frozen=True, slots=True)
class Trend:
    """Bytes over requests: the slope, and how much more or less it may really be."""

    slope: float
    margin: float
    requests: int

    def report(self) -> dict[str, Any]:
        """For people and JSON, in KB of 1024 bytes."""
        return {
            "kb_per_request": round(self.slope / 1024, 2),
            "margin": round(self.margin / 1024, 2),
            "requests": self.requests,
        }


def trend(points: Sequence[tuple[int, int]]) -> Trend | None:
    """The line through (requests, bytes) in order of time; None for too few to tell.

    Each window counts with its median, so that what a few requests hold for a moment does not.
    """
    count = len(points)
    bounds = [count * i // WINDOWS for i in range(WINDOWS + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(bounds)]
    if not all(parts) or points[-1][0] == points[0][0]:
        return None
    x = [statistics.fmean(requests for requests, _ in part) for part in parts]
    y = [statistics.median(size for _, size in part) for part in parts]
    if x[0] == x[-1]:
        return None
    slope, intercept = statistics.linear_regression(x, y)
    rest = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
    middle = statistics.fmean(x)
    spread = sum((a - middle) ** 2 for a in x)
    error = (rest / (WINDOWS - 2) / spread) ** 0.5
    return Trend(slope, STUDENT * error, points[-1][0] - points[0][0])

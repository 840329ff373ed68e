"""What an engine counts and times, for whoever exports it."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

WAIT_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
REQUEST_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120, 300, 600)
"""Upper bounds of histogram buckets, in seconds."""


class Histogram:
    """How often a value fell between two bounds.

    bounds: rising upper bounds, inclusive; a last bucket takes what is above all of them.
    counts: one a bucket, not cumulative. total: the sum of the values. Only the engine's thread
    calls `observe`; a reader on another thread may see a count without its value in the total.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Counters:
    """What has happened since the start.

    prompt_tokens: of admitted requests. prefix_hits: those of them found in the prefix cache.
    device_seconds: from the start of each step to its end, on the device's clock; the device was
    idle, as far as this engine goes, for the rest of the time.
    """

    steps: int = 0
    device_seconds: float = 0.0
    prompt_tokens: int = 0
    prefix_hits: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    requests_timed_out: int = 0


@dataclass(slots=True)
class Histograms:
    """Times in seconds.

    queue_time: arrival to admission. time_to_first_token: arrival to first token.
    inter_token_latency: between two tokens of a request, as the host sees them. request_time:
    arrival to the last token of a request that finished.
    """

    queue_time: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    request_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))


__all__ = ["Counters", "Histogram", "Histograms"]

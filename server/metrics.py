"""Prometheus metrics, named as vLLM's with the prefix `grout:`."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from grout.metrics import Histogram
from server.protocol import ServingEngine

__all__ = ["Metrics", "Timer"]

_LABELS = ("model_name",)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

# Metric, help, and the entry of `Engine.stats` it is taken from.
_GAUGES: Final = (
    ("num_requests_running", "Requests in the batch.", "running"),
    ("num_requests_waiting", "Requests waiting to be scheduled.", "waiting"),
    ("num_free_rows", "Requests that there is still room for in the batch.", "rows_free"),
)
_COUNTERS: Final = (
    ("num_preemptions", "Requests preempted for want of KV blocks.", "preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("device_busy_seconds", "Time that the device was at steps.", "device_seconds"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
)


class Metrics:
    """What the answers of one application were like, and its engine's own counts.

    Plain numbers until they are asked for: prometheus-client's take a lock at each change, and
    some change with every token. Only the thread of the asyncio loop changes them.
    """

    def __init__(self, engine: ServingEngine, model: str) -> None:
        # A registry of its own, so that several applications can live in a process.
        self._registry = CollectorRegistry()
        self._registry.register(_EngineStats(engine, model))
        self._registry.register(_Answers(self, model))
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.first = Histogram(_SECONDS)
        self.between = Histogram(_TOKEN_SECONDS)
        self.per_token = Histogram(_TOKEN_SECONDS)
        self.whole = Histogram(_SECONDS)
        self.prompt_sizes = Histogram(_TOKENS)
        self.answer_sizes = Histogram(_TOKENS)

    def begin(self, prompt_tokens: int) -> "Timer":
        """Count a request and start its clock."""
        self.prompt_tokens += prompt_tokens
        self.prompt_sizes.observe(prompt_tokens)
        return Timer(self)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


class Timer:
    """The clock of one answer."""

    __slots__ = ("_begun", "_first", "_last", "_metrics", "_tokens")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = self._last = self._first = time.monotonic()
        self._tokens = 0

    def tokens(self, count: int) -> None:
        """Count tokens that have just come."""
        if not count:
            return
        now = time.monotonic()
        metrics = self._metrics
        if self._tokens:
            metrics.between.observe((now - self._last) / count, count)
        else:
            metrics.first.observe(now - self._begun)
            self._first = now
        metrics.generation_tokens += count
        self._tokens += count
        self._last = now

    def finished(self, reason: str) -> None:
        """Count the answer as finished."""
        now = time.monotonic()
        metrics = self._metrics
        metrics.finished[reason] += 1
        metrics.whole.observe(now - self._begun)
        metrics.answer_sizes.observe(self._tokens)
        if self._tokens > 1:
            metrics.per_token.observe((now - self._first) / (self._tokens - 1))


class _Answers(Collector):
    """What `Metrics` has counted, at the time it is asked."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model

    def collect(self) -> Iterable[Metric]:
        of = self._metrics
        yield self._counter("prompt_tokens", "Prompt tokens of requests begun.", of.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", of.generation_tokens)
        success = CounterMetricFamily(
            "grout:request_success",
            "Answers finished, by reason.",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason, count in of.finished.items():
            success.add_metric((self._model, reason), count)
        yield success
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From request to first token.", of.first),
            ("inter_token_latency_seconds", "Between tokens of an answer.", of.between),
            (
                "request_time_per_output_token_seconds",
                "Mean time a token of an answer, after its first.",
                of.per_token,
            ),
            ("e2e_request_latency_seconds", "From request to last token.", of.whole),
            ("request_prompt_tokens", "Prompt tokens.", of.prompt_sizes),
            ("request_generation_tokens", "Answer tokens.", of.answer_sizes),
        ):
            yield self._histogram(name, text, histogram)

    def _counter(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(f"grout:{name}", text, labels=_LABELS)
        family.add_metric((self._model,), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family = HistogramMetricFamily(f"grout:{name}", text, labels=_LABELS)
        family.add_metric((self._model,), buckets, histogram.total)
        return family


def _shares(stats: Mapping[str, Any]) -> Iterable[tuple[str, str, float]]:
    """Shares of the KV cache, 0 to 1: metric, help and value."""
    total = stats.get("pages_total")
    if total:
        used = 1 - stats.get("pages_free", 0) / total
        yield "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", used
    if total and "pages_touched" in stats:
        text = "Share of the KV cache ever used, 0 to 1; a CPU takes memory for the rest later."
        yield "kv_cache_touched_perc", text, stats["pages_touched"] / total


class _EngineStats(Collector):
    """What `Engine.stats` says, at the time it is asked."""

    def __init__(self, engine: ServingEngine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterable[Metric]:
        stats: Mapping[str, Any] = self._engine.stats()
        for name, text, key in _GAUGES:
            if key in stats:
                yield self._sample(
                    GaugeMetricFamily(f"grout:{name}", text, labels=_LABELS), stats[key]
                )
        for name, text, used in _shares(stats):
            yield self._sample(GaugeMetricFamily(f"grout:{name}", text, labels=_LABELS), used)
        for name, text, key in _COUNTERS:
            if key in stats:
                yield self._sample(
                    CounterMetricFamily(f"grout:{name}", text, labels=_LABELS), stats[key]
                )

    def _sample(self, family: Any, value: float) -> Metric:
        family.add_metric((self._model,), value)
        return family  # type: ignore[no-any-return]

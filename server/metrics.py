"""Prometheus metrics, named as vLLM's with the prefix `grout:`."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.protocol import ServingEngine

__all__ = ["Metrics", "Timer"]

_LABELS = ("model_name",)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

_COUNTED_AT_ONCE = 32
"""Tokens of an answer between two updates of the counter, which is slow for its many readers."""

# Metric, help, and the entry of `Engine.stats` it is taken from.
_GAUGES: Final = (
    ("num_requests_running", "Requests in the batch.", "running"),
    ("num_requests_waiting", "Requests waiting to be scheduled.", "waiting"),
)
_COUNTERS: Final = (
    ("num_preemptions", "Requests preempted for want of KV blocks.", "preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
)


class Metrics:
    """Counters of one application; a registry of its own, so that several can live in a process."""

    def __init__(self, engine: ServingEngine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineStats(engine, model))

        def counter(name: str, text: str) -> Counter:
            family = Counter(f"grout:{name}", text, _LABELS, registry=self._registry)
            return family.labels(model)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(
                f"grout:{name}", text, _LABELS, registry=self._registry, buckets=tuple(buckets)
            )
            return family.labels(model)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests begun.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "grout:request_success",
            "Answers finished, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._model = model
        self._first = histogram(
            "time_to_first_token_seconds", "From request to first token.", _SECONDS
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between tokens of an answer.", _TOKEN_SECONDS
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time a token of an answer, after its first.",
            _TOKEN_SECONDS,
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From request to last token.", _SECONDS
        )
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._answer_sizes = histogram("request_generation_tokens", "Answer tokens.", _TOKENS)

    def begin(self, prompt_tokens: int) -> "Timer":
        """Count a request and start its clock."""
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_sizes.observe(prompt_tokens)
        return Timer(self)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def generated(self, tokens: int) -> None:
        """Count tokens."""
        self._generation_tokens.inc(tokens)

    def gap(self, seconds: float, tokens: int, *, first: bool) -> None:
        """Count the time between tokens, or from the request to the first."""
        if first:
            self._first.observe(seconds)
        else:
            self._between.observe(seconds / tokens)

    def end(self, reason: str, seconds: float, since_first: float, tokens: int) -> None:
        """Count a finished answer."""
        self._success.labels(self._model, reason).inc()
        self._whole.observe(seconds)
        self._answer_sizes.observe(tokens)
        if tokens > 1:
            self._per_token.observe(since_first / (tokens - 1))


class Timer:
    """The clock of one answer."""

    __slots__ = ("_begun", "_counted", "_first", "_last", "_metrics", "_tokens")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = self._last = self._first = time.monotonic()
        self._tokens = self._counted = 0

    def tokens(self, count: int) -> None:
        """Count tokens that have just come."""
        now = time.monotonic()
        if not count:
            return
        self._metrics.gap(now - self._last, count, first=self._tokens == 0)
        if self._tokens == 0:
            self._first = now
        self._tokens += count
        self._last = now
        if self._tokens - self._counted >= _COUNTED_AT_ONCE:
            self._count()

    def finished(self, reason: str) -> None:
        """Count the answer as finished."""
        now = time.monotonic()
        self._count()
        self._metrics.end(reason, now - self._begun, now - self._first, self._tokens)

    def _count(self) -> None:
        self._metrics.generated(self._tokens - self._counted)
        self._counted = self._tokens


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
        if stats.get("pages_total"):
            used = 1 - stats.get("pages_free", 0) / stats["pages_total"]
            text = "Share of the KV cache in use, 0 to 1."
            gauge = GaugeMetricFamily("grout:kv_cache_usage_perc", text, labels=_LABELS)
            yield self._sample(gauge, used)
        for name, text, key in _COUNTERS:
            if key in stats:
                yield self._sample(
                    CounterMetricFamily(f"grout:{name}", text, labels=_LABELS), stats[key]
                )

    def _sample(self, family: Any, value: float) -> Metric:
        family.add_metric((self._model,), value)
        return family  # type: ignore[no-any-return]

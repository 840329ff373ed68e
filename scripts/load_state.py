"""What a server says of itself on /metrics, as far as a load test looks at it."""

import re
from collections.abc import Awaitable, Callable

from scripts.serving_client import Client

__all__ = ["ROWS", "TOUCHED", "Probe", "State", "metrics_probe"]

ROWS = "free_rows"
TOUCHED = "kv_touched"

_GAUGES = {
    name: re.compile(rf"^\w+:{metric}(?:\{{.*\}})? (\S+)$", re.MULTILINE)
    for name, metric in (
        ("running", "num_requests_running"),
        ("waiting", "num_requests_waiting"),
        (ROWS, "num_free_rows"),
        ("kv_used", "(?:kv|gpu)_cache_usage_perc"),
        (TOUCHED, "kv_cache_touched_perc"),
    )
}

State = dict[str, float]
Probe = Callable[[], Awaitable[State | None]]


def metrics_probe(client: Client) -> Probe:
    """The server's state as its /metrics tells it; None where it has none."""

    async def probe() -> State | None:
        response = await client.request("GET", "/metrics")
        if response.status != 200:
            return None
        text = response.body.decode()
        found = {name: gauge.search(text) for name, gauge in _GAUGES.items()}
        return {name: float(match[1]) for name, match in found.items() if match} or None

    return probe

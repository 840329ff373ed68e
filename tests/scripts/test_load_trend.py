"""What the load test makes of readings of memory, and of a process's Python heap."""

import random
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench_http_overhead import free_port
from scripts.load_heap import traced
from scripts.load_plot import plot
from scripts.load_test import growth
from scripts.load_trend import WINDOWS, Sample, trend
from scripts.serving_process import private_bytes, started


@given(st.floats(-1e5, 1e5), st.integers(WINDOWS, 300), st.integers(1, 50))
def test_a_line_has_its_slope(slope: float, count: int, step: int) -> None:
    found = trend([(i * step, round(1e9 + i * step * slope)) for i in range(count)])
    assert found is not None
    assert found.slope == pytest.approx(slope, abs=1 + 1e-6 * abs(slope))
    assert found.margin < 1 + 1e-6 * abs(slope)
    assert found.requests == (count - 1) * step


@pytest.mark.parametrize("leak", [0, 5 * 1024, 20 * 1024])
def test_the_margin_holds_the_true_slope(leak: int) -> None:
    """Memory comes and goes by megabytes, in steps; the slope is in the range 19 times in 20."""
    held = 0
    for seed in range(200):
        rng = random.Random(seed)
        points = [(i * 10, 10**9 + i * 10 * leak + rng.randrange(3) * 2**20) for i in range(240)]
        found = trend(points)
        assert found is not None
        held += abs(found.slope - leak) <= found.margin
        assert found.margin < 2.5 * 1024
        assert (found.slope + found.margin > 4 * 1024) == (leak > 0)
    assert held >= 180


def test_a_peak_of_a_few_requests_does_not_count() -> None:
    points = [(i, 10**8 + (10**9 if i % 40 < 5 else 0)) for i in range(480)]
    found = trend(points)
    assert found is not None
    assert (found.slope, found.margin) == (0, 0)


@pytest.mark.parametrize(
    "points", [[], [(i, 5) for i in range(WINDOWS - 1)], [(7, i) for i in range(50)]]
)
def test_too_little_to_tell(points: list[tuple[int, int]]) -> None:
    assert trend(points) is None


def samples(count: int) -> list[Sample]:
    return [
        Sample(
            i / 2, i * 3, 10**8 + i * 3 * 1024, None, {"running": 4, "kv_touched": 0.5 + i / 1e3}
        )
        for i in range(count)
    ]


def test_growth_of_a_run() -> None:
    assert growth(samples(100), 0, 60) == {
        "memory": {"kb_per_request": 1.0, "margin": 0.0, "requests": 297},
        "memory_mb": [100.0, 100.3, 100.3],
        "heap": None,
        "filling": 0.099,
    }
    part = growth(samples(100), 10, 20)
    assert part["memory"]["requests"] == 60 and part["filling"] == 0.02
    nothing = {"memory": None, "memory_mb": None, "heap": None, "filling": 0.0}
    assert growth([], 0, 60) == nothing


def test_the_plot() -> None:
    drawn = plot(samples(10), "a <title>", 2.0)
    assert drawn.startswith("<svg ") and drawn.endswith("</svg>\n")
    assert "a &lt;title&gt;" in drawn
    assert drawn.count("<polyline") == 4
    assert "nan" not in plot([], "", 1.0)


SERVER = textwrap.dedent("""
    import http.server, sys
    kept = []
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/grow":
                kept.append(bytes(1 << 20))
            self.send_response(200)
            self.end_headers()
        def log_message(self, *_):
            pass
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""")


def test_the_heap_of_a_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    from urllib.request import ProxyHandler, build_opener

    program = tmp_path_factory.mktemp("server") / "growing.py"
    program.write_text(SERVER)
    url = f"http://127.0.0.1:{(port := free_port())}"
    get = build_opener(ProxyHandler({})).open
    with traced(True) as heap:
        assert heap is not None
        command = f"{sys.executable} {program} {port}"
        with started(command, url, 60, heap.environment) as pid:
            assert heap.size() is None
            heap.pid = pid
            heap.begin()
            before, memory = heap.size(), private_bytes(pid)
            assert before is not None and memory > before
            for _ in range(3):
                get(f"{url}/grow").close()
            after = heap.size()
            assert after is not None and 3 << 20 <= after - before < 4 << 20
            first = heap.grown()[0]
            assert first.startswith("3072.") and "growing.py:7" in first


def test_without_tracing() -> None:
    with traced(False) as heap:
        assert heap is None

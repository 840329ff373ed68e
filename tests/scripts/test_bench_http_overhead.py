"""The HTTP overhead benchmark end to end, at a rate that any machine holds."""

import json
from pathlib import Path

import pytest

from scripts import bench_http_overhead


@pytest.mark.slow
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_report(route: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--rates", "200", "--streams", "4", "--seconds", "2", "--route", route]
    profile = tmp_path / "profile.txt"
    assert bench_http_overhead.main([*argv, "--profile", str(profile)]) == 0
    (run,) = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert (run["tokens"], run["streams"], run["route"]) == (400, 4, route)
    assert 0 < run["achieved"] < 220
    assert run["server_us_per_token"] > 0
    assert run["tokens_per_chunk"] >= 1
    assert 0 < run["delay_ms"]["median"] <= run["delay_ms"]["p99"]
    # Of the server's loop; what else is among the slowest depends on the machine.
    assert "(_run_once)" in profile.read_text()

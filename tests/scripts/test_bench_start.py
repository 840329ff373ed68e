"""Starts of processes, measured: one for real, the rest with starts that tests make up."""

import json
from typing import Any

import pytest

from scripts import bench_start
from scripts.bench_start import Stages, Work

ARGS = ["tiny-qwen3", "--load-format", "dummy", "--device", "cpu"]
START = {
    "model": "tiny-qwen3",
    "device": "x",
    "seconds": 1.5,
    "stages": {"imports": 1.0, "first token": 0.5},
    "kernels": (104, 2.5),
    "work": {"trace kernels": [3, 0.25]},
    "weights_gb_s": 2.0,
}


def test_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_start.main([*ARGS, "--repeats", "1", "--max-model-len", "64"]) == 0
    out = capsys.readouterr().out.splitlines()
    [start] = json.loads(out[-1])["starts"]
    stages = start["stages"]
    assert list(stages) == [
        "interpreter", "imports", "device", "open the model", "weights", "KV cache",
        "kernels and recordings", "first token",
    ]  # fmt: skip
    assert all(seconds >= 0 for seconds in stages.values()) and stages["imports"] > 0
    assert start["seconds"] == pytest.approx(sum(stages.values()), abs=0.01)
    assert start["work"]["trace kernels"][0] > 5
    assert out[-2].split()[:2] == ["trace", "kernels"]


def test_fresh_kernels_are_those_of_all_starts_but_no_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders: list[str | None] = []

    def once(options: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
        folders.append(variables.get("GROUT_CACHE"))
        assert options["max_num_seqs"] == 3
        return START

    assert bench_start.main([*ARGS, "--max-num-seqs", "3", "--fresh"], once) == 0
    assert len(folders) == 3 and len(set(folders)) == 1 and folders[0] is not None
    out = capsys.readouterr().out
    assert "to the first token                     1.500" in out
    assert "all kernels, beside that         2.500 (104)" in out
    folders.clear()
    assert bench_start.main([*ARGS, "--max-num-seqs", "3", "--repeats", "1"], once) == 0
    assert folders == [None]


def test_a_start_that_fails_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["no-such-preset", "--load-format", "dummy", "--device", "cpu"]
    assert bench_start.main(argv) == 1
    assert "bench_start: error: start 1: it ended with status 1:" in capsys.readouterr().err


def test_stages_follow_the_lines_of_progress() -> None:
    stages = Stages(0.0)
    for line in (
        *("m on cuda:0", "loading weights: 0% of 1 GiB", "loading weights: 100% of 1 GiB"),
        *("context 64 tokens", "warming up", "104 kernels were ready after 2.51 s"),
    ):
        stages.line(line)
    assert stages.kernels == (104, 2.51)
    assert list(stages.seconds) == ["open the model", "weights", "KV cache"]


def test_work_counts_calls_also_those_that_fail() -> None:
    class Owner:
        @staticmethod
        def call(ok: bool) -> int:
            if not ok:
                raise ValueError("no")
            return 7

    work = Work()
    work.watch(Owner, "call", "calls")
    assert Owner.call(True) == 7
    with pytest.raises(ValueError, match="no"):
        Owner.call(False)
    count, seconds = work.found["calls"]
    assert count == 2 and seconds >= 0

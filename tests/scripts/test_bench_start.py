"""Starts of processes, measured: one for real, the rest with starts that tests make up."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_start
from scripts.bench_start import Stages, Work

ARGS = ["tiny-qwen3", "--load-format", "dummy", "--device", "cpu"]
STAGES = [
    "start Python", "import modules", "open the device", "open the model and its tokenizer",
    "read or make the weights", "allocate the KV cache", "warm up: rest of the kernels, graphs",
    "first token",
]  # fmt: skip
START = {
    "model": "tiny-qwen3",
    "device": "x",
    "seconds": 1.5,
    "stages": {"import modules": 1.0, "first token": 0.5},
    "kernels": (104, 2.5),
    "work": {"trace kernels": [3, 0.25]},
    "weights_gb_s": 2.0,
}


def test_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_start.main([*ARGS, "--repeats", "1", "--max-model-len", "64"]) == 0
    out = capsys.readouterr().out.splitlines()
    [start] = json.loads(out[-1])["starts"]
    stages = start["stages"]
    assert list(stages) == STAGES
    assert all(seconds >= 0 for seconds in stages.values()) and stages["import modules"] > 0
    assert start["seconds"] == pytest.approx(sum(stages.values()), abs=0.01)
    assert start["work"]["trace kernels"][0] > 5
    assert out[-2].split()[:2] == ["trace", "kernels"]
    assert out[-2].endswith(f"({start['work']['trace kernels'][0]})")


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
    assert re.search(r"from start to first token( +1\.500){3}\n", out)
    assert re.search(r"until all kernels were ready( +2\.500 \(104\)){3}\n", out)
    folders.clear()
    assert bench_start.main([*ARGS, "--max-num-seqs", "3", "--repeats", "1"], once) == 0
    assert folders == [None]


def test_a_start_that_fails_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["no-such-preset", "--load-format", "dummy", "--device", "cpu"]
    assert bench_start.main(argv) == 1
    assert "bench_start: error: start 1: it ended with status 1:" in capsys.readouterr().err


def test_stages_follow_the_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(0.0)
    seconds = iter((3.0, 4.0, 9.0, 11.0, 11.5))
    monkeypatch.setattr(bench_start.time, "monotonic", lambda: next(seconds))
    for line, stage in (
        ("m on cuda:0, bfloat16", None),
        ("loading weights: 1.00 GiB", "open the model and its tokenizer"),
        ("loading weights: 50% of 1.00 GiB, 0.10 GB/s", None),
        ("loading weights: 100% of 1.00 GiB, 0.10 GB/s", None),
        ("context 64 tokens; KV cache 64 tokens in 2 MiB of float16", "read or make the weights"),
        ("104 kernels were ready after 2.51 s", None),
        ("warming up", "allocate the KV cache"),
    ):
        before = set(stages.seconds)
        stages.line(line)
        assert set(stages.seconds) - before == ({stage} if stage else set())
    assert stages.kernels == (104, 2.51)
    assert list(stages.seconds.values()) == [3.0, 1.0, 5.0]


def test_starts_that_differ_keep_to_their_columns() -> None:
    other = START | {"kernels": None, "stages": {"first token": 0.25}, "work": {"x": [1, 2.0]}}
    rows = bench_start.table([START, other]).splitlines()
    ends = [re.search(f"{head}(?= |$)", rows[0]) for head in ("start 1", "start 2")]
    cells = {
        row[:48].strip(): [row[: end and end.end()].split()[-1] for end in ends] for row in rows
    }
    assert cells["import modules"] == ["1.000", "-"]
    assert cells["first token"] == ["0.500", "0.250"]
    assert cells["trace kernels"] == ["0.250", "-"]
    assert cells["x"] == ["-", "2.000"]
    assert cells["until all kernels were ready"] == ["2.500", "-"]


def test_the_documented_table_has_the_stages_of_a_start() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks" / "README.md").read_text()
    part = text.partition("from process start to first token\n")[2].partition("\n## ")[0]
    heads = [row.split(" | ")[0] for row in part.splitlines() if row.startswith("| ")]
    rows = [*STAGES, "from start to first token", "until all kernels were ready"]
    assert [name for name in rows if not any(name in head for head in heads)] == []


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

"""The arithmetic of the kernel benchmark, its steps on the cpu, and processes that fail it."""

import contextlib
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilert
from scripts import bench_kernels
from scripts.bench_kernels import (
    Worker,
    calls_of,
    copies_of,
    error_of,
    measure,
    run,
    work_through,
)
from scripts.kernel_cases import (
    COMPILED,
    GROUPS,
    PEER,
    RESIDUAL,
    Case,
    Variant,
    case_of,
    cases,
    step,
    variant_of,
)
from scripts.kernel_memory import Memory
from scripts.kernel_report import ceilings, plot, rows, summary, table
from scripts.kernel_work import switch, work_of
from tilert.target_device import TargetDevice

GEMM = Case("gemm", "square", (("m", 4), ("n", 8), ("k", 16)))


def result(case: Case, name: str, seconds: float, error: float = 1e-3) -> dict[str, Any]:
    times = [seconds * 3, seconds, seconds / 2]
    return {**step(case, Variant(name)), "times": times, "error": error}


# -- what a case costs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "flops", "nbytes"),
    [
        (GEMM, 2 * 4 * 8 * 16, 2 * (4 * 16 + 8 * 16 + 4 * 8)),
        (Case("gated", "small", GEMM.sizes), 4 * 4 * 8 * 16, 2 * (4 * 16 + 2 * 8 * 16 + 4 * 8)),
        (Case("streaming", "add", (("rows", 3), ("columns", 5)), "f32"), 15, 4 * 3 * 15),
        (Case("streaming", "rms_norm", (("rows", 3), ("columns", 5))), 15, 2 * 2 * 15),
        # Query 1 sees one key, query 2 two: a product and a sum for scores and for values each.
        (
            Case("prefill", "causal", (("tokens", 2), ("heads", 4), ("kv_heads", 2), ("dim", 8))),
            2 * 2 * 4 * 8 * 3,
            2 * 2 * 8 * (4 + 4 + 2 + 2),
        ),
        (
            Case("decode", "paged", (("batch", 3), ("context", 10), ("heads", 4), ("kv_heads", 2),
                                     ("dim", 8))),
            3 * 2 * 2 * 4 * 8 * 10,
            2 * 3 * 8 * (2 * 2 * 10 + 4 + 4),
        ),
    ],
)  # fmt: skip
def test_least_work(case: Case, flops: int, nbytes: int) -> None:
    assert (case.flops, case.nbytes) == (flops, nbytes)


def test_steps_survive_json() -> None:
    for group in GROUPS:
        for case, variants in cases(group):
            assert case.group == group and variants[0].name == PEER
            for variant in variants:
                back = json.loads(json.dumps(step(case, variant)))
                assert case_of(back["case"]) == case
                assert variant_of(back["variant"]) == variant


def test_inputs_are_rotated_past_the_cache() -> None:
    small = Case("gemm", "square", (("m", 2048), ("n", 2048), ("k", 2048)))
    assert copies_of(small) == 11 and 11 * small.nbytes >= 256 << 20 > 10 * small.nbytes
    assert copies_of(Case("gemm", "square", (("m", 16384), ("n", 16384), ("k", 16384)))) == 1
    assert copies_of(GEMM) == 16
    # About 3 ms a replay, in whole turns.
    count = calls_of(small, 11)
    assert count % 11 == 0
    assert 2e-3 < count * small.flops / 600e12 < 4e-3


# -- the report ----------------------------------------------------------------------------------


def test_rates_are_of_the_median() -> None:
    (row,) = rows([result(GEMM, PEER, 2.0), result(GEMM, "plain", 1.0), result(GEMM, "x", 4.0)])
    assert row.rates == {PEER: 512.0, "plain": 1024.0, "x": 256.0}
    assert (row.best, row.ratio) == ("plain", 2.0)


def test_what_is_wrong_does_not_count() -> None:
    """Errors up to 1.5 times the peer's are those of another order of sums."""
    given = ((PEER, 2.0, 1e-3), ("fast", 1.0, 1.6e-3), ("slow", 4.0, 1.5e-3), ("off", 1.0, 0.5))
    found = rows([result(GEMM, *values) for values in given])
    assert (found[0].best, found[0].ratio) == ("slow", 0.5)
    assert table(found, None).count("(wrong)") == 2


def test_the_faster_peer_is_the_one_to_beat() -> None:
    given = ((PEER, 2.0, 1e-3), (COMPILED, 1.0, 1e-2), ("ours", 0.8, 1.5e-2))
    (row,) = rows([result(GEMM, *values) for values in given])
    assert (row.peer, row.best, row.ratio) == (COMPILED, "ours", 1.25)
    assert table([row], None).count("(wrong)") == 0


def test_what_streams_has_the_best_copy_as_ceiling() -> None:
    sizes = (("rows", 4), ("columns", 8))
    copy, norm = (Case("streaming", name, sizes) for name in ("copy", "rms_norm"))
    given = [result(copy, PEER, 1.0), result(copy, "ours", 0.5), result(norm, "ours", 0.25)]
    assert ceilings(rows(given), 1e4) == {"streaming": copy.nbytes / 0.5}
    assert ceilings(rows(given[2:]), 1e4) == {"streaming": 1e4}


def test_a_bytes_group_has_the_read_bandwidth_as_ceiling() -> None:
    decode = Case("decode", "paged", (("batch", 1), ("context", 10), ("heads", 4), ("kv_heads", 2),
                                      ("dim", 8)))  # fmt: skip
    found = rows([result(GEMM, PEER, 1.0), result(decode, "plain", 1.0)])
    assert ceilings(found, 1e4) == {"gemm": 1024.0, "decode": 1e4}
    assert f"| {decode.nbytes / 1e4:.1%} |" in table(found, 1e4)
    # Without a peer there is nothing to compare, and 2 % is the limit.
    assert found[1].ratio is None and found[1].best == "plain"


def test_summary_and_what_failed() -> None:
    other = Case("gemm", "square", (("m", 8), ("n", 8), ("k", 8)))
    failed = {**step(other, Variant("plain")), "failed": "no answer within 40 s"}
    found = rows([result(GEMM, PEER, 1.0), result(GEMM, "plain", 2.0),
                  result(other, PEER, 1.0), result(other, "x", 0.5), failed])  # fmt: skip
    assert summary(found) == {
        "gemm": {
            "cases": 2, "compared": 2, "failed": 1, "least_ratio": 0.5, "mean_ratio": 1.0,
        }
    }  # fmt: skip
    assert "| failed |" in table(found, None)
    svg = ET.fromstring(plot(found, "a < b"))
    bars = [e for e in svg.iter() if e.tag.endswith("rect") and e.get("height") == "8"]
    assert len(bars) == 4


def test_nothing_ran() -> None:
    found = rows([{**step(GEMM, Variant(PEER)), "failed": "x"}])
    assert summary(found)["gemm"]["least_ratio"] is None
    ET.fromstring(plot(found, "empty"))
    assert "failed" in table(found, None)


def test_error_is_relative_to_the_largest() -> None:
    assert error_of(np.array([1.0, -4.5]), np.array([1.0, -4.0])) == 0.125
    with pytest.raises(RuntimeError, match="1 of 2 outputs are no numbers"):
        error_of(np.array([np.nan, 1.0]), np.array([1.0, 1.0]))


# -- steps ---------------------------------------------------------------------------------------

SMALL = [
    Case("gemm", "square", (("m", 40), ("n", 48), ("k", 64))),
    Case("gated", "small", (("m", 40), ("n", 48), ("k", 64))),
    *(Case("streaming", name, (("rows", 6), ("columns", 64)), "f32")
      for name in ("copy", "add", "swiglu", "rms_norm")),
    Case("prefill", "causal", (("tokens", 70), ("heads", 4), ("kv_heads", 2), ("dim", 16))),
    Case("decode", "paged", (("batch", 3), ("context", 100), ("heads", 4), ("kv_heads", 2),
                             ("dim", 16))),
]  # fmt: skip


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
def test_ours_on_the_cpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "MOST_COPIES", 2)
    monkeypatch.setattr(bench_kernels, "GRAPH_SECONDS", 0.0)
    monkeypatch.setattr(bench_kernels, "_torch", lambda: None)
    monkeypatch.setenv("TILERT_SCHEDULES", "none")
    variants = [asdict(Variant(name)) for name in ("plain", PEER)]
    line = json.dumps({"case": asdict(case), "variants": variants})
    (answer,) = work_through(tilert.device("cpu"), iter([line]))
    assert not answer["restart"]
    ours, theirs = answer["results"]
    assert ours["error"] < 2e-2, ours
    assert len(ours["times"]) == bench_kernels.REPLAYS
    assert theirs["failed"] == "RuntimeError: torch is not installed"


def test_variants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and backwards; what fails has none."""
    ran: list[str] = []

    @contextlib.contextmanager
    def prepared(_: Any, __: Any, variant: Variant) -> Iterator[tuple[float, Callable[[], float]]]:
        if variant.name == "broken":
            raise ValueError("no")

        def replay() -> float:
            ran.append(variant.name)
            return float(len(ran))

        yield 0.5, replay
        ran.append(f"end of {variant.name}")

    monkeypatch.setattr(bench_kernels, "prepared", prepared)
    monkeypatch.setattr(bench_kernels, "WARM_UP", 1)
    monkeypatch.setattr(bench_kernels, "REPLAYS", 2)
    nothing: Any = None
    results = measure(nothing, nothing, [Variant(n) for n in ("a", "broken", "b")])
    assert ran == ["a", "b", "b", "a", "a", "b", "end of b", "end of a"]
    assert results == [
        {"times": [4.0, 5.0], "error": 0.5},
        {"failed": "ValueError: no"},
        {"times": [3.0, 6.0], "error": 0.5},
    ]


def test_a_lost_device_is_no_result_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked asks for each alone; of one alone it is what failed."""

    def measure(_: Any, __: Any, variants: Sequence[Variant]) -> list[dict[str, Any]]:
        return [{"failed": f"DeviceError: {variant.name}"} for variant in variants]

    monkeypatch.setattr(bench_kernels, "measure", measure)
    monkeypatch.setattr(bench_kernels, "_lost", lambda _: True)
    monkeypatch.setattr(bench_kernels, "_torch", lambda: None)
    asked = [["ours", "plain"], ["ours"]]
    lines = [
        json.dumps({"case": asdict(GEMM), "variants": [asdict(Variant(n)) for n in names]})
        for names in asked
    ]
    several, alone = work_through(tilert.device("cpu"), iter(lines))
    assert several == {"failed": "one of the variants lost the device", "restart": True}
    assert alone == {"results": [{"failed": "DeviceError: ours"}], "restart": True}


def test_each_variant_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose tiles and arrays are those of the variant before."""
    monkeypatch.setenv("TILERT_SCHEDULES", "none")
    device = TargetDevice("sm_90a")
    case = Case("gemm", "small", (("m", 128), ("n", 128), ("k", 128)))
    work = work_of(Memory(device, None), case, 1)
    texts = []
    for schedules in ("none", "pipelined", "none"):
        variant = Variant(schedules, schedules, (128, 128, 64))
        switch(device, variant)
        work.call(variant, 0)()
        texts.append(device.kernels[-1].text)
    assert texts[0] == texts[2] != texts[1]
    assert "copy_box(at" in texts[1]


FAKE = """
import json, os, sys, time
print(json.dumps({"ready": {"name": "fake"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    names = [variant["name"] for variant in asked.get("variants", [])]
    if "bandwidth" in asked:
        answer = {"read_bandwidth": 7.0}
    elif "plain" in names:
        os._exit(3)
    elif "hung" in names:
        time.sleep(60)
    elif "lost" in names:
        answer = {"failed": "DeviceError: lost", "restart": True}
    else:
        wrong = {"failed": "ValueError: no"}
        right = {"times": [os.getpid()], "error": 0.0}
        answer = {"results": [wrong if name == "wrong" else right for name in names]}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("plain", "the process ended with status 3"),
        ("hung", "no answer within 2 s"),
        ("lost", "DeviceError: lost"),
    ],
)
def test_what_takes_others_down_fails_alone(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (PEER, name, "wrong", "fine")
    monkeypatch.setattr(bench_kernels, "cases", lambda _: [(GEMM, [Variant(n) for n in names])])
    monkeypatch.setattr(bench_kernels, "STEP_SECONDS", 2.0)
    worker = Worker([sys.executable, "-c", FAKE])
    noted: list[Any] = []
    try:
        results, bandwidth = run(worker, ["gemm"], 600, noted.append)
    finally:
        worker.close()
    assert bandwidth == 7.0 and worker.info == {"name": "fake"}
    assert noted == results
    outcome = {r["variant"]["name"]: r.get("failed") for r in results}
    assert outcome == {PEER: None, name: reason, "wrong": "ValueError: no", "fine": None}
    assert results[0]["times"] != results[3]["times"], "the same process after a failure"


def test_all_of_a_case_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (PEER, "wrong", "fine")
    monkeypatch.setattr(bench_kernels, "cases", lambda _: [(GEMM, [Variant(n) for n in names])])
    worker = Worker([sys.executable, "-c", FAKE])
    try:
        results, _ = run(worker, ["gemm"], 600, lambda _: None)
    finally:
        worker.close()
    assert [r.get("failed") for r in results] == [None, "ValueError: no", None]
    assert results[0]["times"] == results[2]["times"], "one process"


def test_no_step_is_begun_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 11.0, 12.0])
    monkeypatch.setattr(bench_kernels, "cases", lambda _: [(GEMM, [Variant("a")])] * 3)
    worker = Worker([sys.executable, "-c", FAKE])
    try:
        results, _ = run(worker, ["gemm"], 10, lambda _: None, clock=lambda: next(ticks))
    finally:
        worker.close()
    assert ["failed" in r for r in results] == [False, True, True]
    assert results[1]["failed"] == "not run: the time was up"


def test_reports_are_written(tmp_path: Path) -> None:
    report = {"device": {"name": "fake"}, "date": "2026-01-01", "read_bandwidth": 1.0,
              "results": [result(GEMM, PEER, 1.0), result(GEMM, "plain", 2.0)]}  # fmt: skip
    bench_kernels.write_report(tmp_path, report)
    assert json.loads((tmp_path / "kernels.json").read_text()) == json.loads(json.dumps(report))
    assert "| square 4x8x16 |" in (tmp_path / "kernels.md").read_text()
    ET.fromstring((tmp_path / "kernels.svg").read_text())


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main(["gemm", "--device", "cuda:99"]) == 2
    assert "bench_kernels: error: " in capsys.readouterr().err


def test_what_ends_in_the_residual_stream_is_added_to_it() -> None:
    """As layers run it, and to be measured as such."""
    found = {case.name: variants for case, variants in cases("skinny")}
    assert {name for name, variants in found.items() if RESIDUAL in variants} == {
        "4B o", "4B down", "32B o", "32B down",
    }  # fmt: skip
    case = Case("skinny", "4B o", (("m", 3), ("n", 32), ("k", 64)))
    work = work_of(Memory(tilert.device("cpu"), None), case, 2)
    calls = [work.call(RESIDUAL, i) for i in range(2)]
    work.poison(RESIDUAL)
    calls[0]()
    got, want = work.check(RESIDUAL)
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
    # Another call adds once more, to no other stream.
    calls[0]()
    calls[1]()
    again, _ = work.check(RESIDUAL)
    assert np.abs(again - 2 * want).max() <= 1e-4 * np.abs(want).max()

"""The launch benchmark: its arithmetic, and the same measurements on the cpu."""

import json

import numpy as np
import pytest

import tilert
from scripts import bench_launch
from tilert import f32
from tilert.target_device import TargetDevice


def test_medians_are_of_units_and_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    seconds = {"a": iter([9.0, 3.0, 1.0, 2.0]), "b": iter([9.0, 8.0, 8.0, 5.0])}

    def batch(name: str) -> float:
        order.append(name)
        return next(seconds[name])

    found = bench_launch.in_turns({"a": lambda: batch("a"), "b": lambda: batch("b")}, 3, 1000)
    assert found == {"a": 2000.0, "b": 8000.0}
    assert order == ["a", "b"] * 4
    ticks = iter([10.0, 10.5])
    monkeypatch.setattr(bench_launch.time, "perf_counter", lambda: next(ticks))
    done: list[str] = []
    wait, work = (lambda: done.append("wait")), (lambda: done.append("work"))
    assert bench_launch.clocked(work, 3, wait) == 0.5
    assert done == ["wait", "work", "work", "work", "wait"]


def test_report() -> None:
    found = bench_launch.report(
        {"tilert": 14.5, "raw": 3.25},
        {"tilert": 0.95, "raw": 0.9},
        {"safe": 101.5, "unsafe": 100.0},
    )
    assert found == {
        "op": {"tilert_us": 14.5, "raw_us": 3.25, "price_us": 11.25},
        "node": {"tilert_us": 0.95, "raw_us": 0.9, "price_us": 0.05},
        "twins": {"safe_us": 101.5, "unsafe_us": 100.0, "safe_over_unsafe": 0.015},
        "met": {"op": True, "node": False, "twins": False},
    }


def test_on_the_cpu() -> None:
    device = tilert.device("cpu")
    ops, nodes = bench_launch.Counter(device), bench_launch.Counter(device)
    op = bench_launch.bench_op(ops, None, 5, 3)
    node = bench_launch.bench_node(nodes, None, 4, 3)
    assert ops.count == 20 and nodes.count == 16 and (nodes.array.numpy() == 16).all()
    twins = bench_launch.bench_twins(device, 10_000, 2)
    found = bench_launch.report(op, node, twins)
    assert found["op"].keys() == {"tilert_us"} and min(op["tilert"], node["tilert"]) > 0
    assert found["twins"]["safe_us"] > 0 and found["twins"]["unsafe_us"] > 0


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = tilert.device("cpu")
    counter = bench_launch.Counter(device)
    counter.launch()
    with pytest.raises(RuntimeError, match="op: the array is not what 0 launches make of it"):
        counter.check("op")
    monkeypatch.setattr(bench_launch, "scaled_by_hand", bench_launch.scaled)
    monkeypatch.setattr(bench_launch, "scaled", lambda part, x, by: bench_launch.scaled_by_hand(
        part, x, by * 2
    ))  # fmt: skip
    with pytest.raises(RuntimeError, match="twins: the safe kernel computed something else"):
        bench_launch.bench_twins(device, 100, 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_its_kernels_compile_and_take_what_raw_launches_give(arch: str) -> None:
    device = TargetDevice(arch)
    bench_launch.Counter(device).launch()
    (kernel,) = device.kernels
    signature = kernel.text[kernel.text.rindex(kernel.entry) :].split("{")[0]
    assert signature.count("*") == 2 and signature.count(",") == 2
    assert signature.rstrip(" )").endswith("const u32 early")
    x = tilert.zeros(10_000, f32, device)
    for twin in (bench_launch.scaled, bench_launch.scaled_by_hand):
        twin(tilert.zeros(10_000, f32, device).partition(4096), x, 0.5).run()
    assert [k.entry for k in device.kernels[1:]] == ["scaled_kernel", "scaled_by_hand"]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none(_: str) -> None:
        raise tilert.DeviceError("CUDA is not usable: no driver")

    monkeypatch.setattr(bench_launch.tilert, "device", none)
    assert bench_launch.main([]) == 2
    assert capsys.readouterr() == (
        "", "nothing was measured, this needs a GPU: CUDA is not usable: no driver\n"
    )  # fmt: skip


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--repeats", "3", "--calls", "20", "--nodes", "10", "--size", "100003"]
    assert bench_launch.main(few) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["op"]["raw_us"] > 0 and found["node"]["raw_us"] > 0
    assert np.isfinite(found["twins"]["safe_over_unsafe"])

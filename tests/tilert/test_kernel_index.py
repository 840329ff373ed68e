"""Kernels that an earlier process has made are found without a trace, and only while they hold."""

import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tilert
from models.kernels import linear
from scripts.check_kernels import Walk, serve
from tilert import CompileError, KernelError, bf16, disk_cache, entries, f32, kernel_index
from tilert.codegen import generate
from tilert.device import Launcher, open_device
from tilert.ir import Function
from tilert.kernel import DeferredFunction
from tilert.rehearsal import Rehearsal
from tilert.target_device import TargetDevice

SOURCE = """
import tilert
from tilert import Const, Mut, Ref, f32
from tilert.language import exp

SCALE = 2.0

@tilert.inline
def scaled(x):
    return x * SCALE

@tilert.kernel
def scale(y: Mut, x: Ref, c: Const[float] = 1.0):
    y.store(exp(scaled(x.tile_like(y))) + c)
"""
numbers = itertools.count()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GROUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Import the source as another process does: nothing is left of the import before."""

    def load(source: str = SOURCE) -> ModuleType:
        # A file of its own: Python keeps the lines of files that it has read.
        file = tmp_path / f"module{next(numbers)}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location("module_of_kernels", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "module_of_kernels", module)
        spec.loader.exec_module(module)
        return module

    return load


class Keeping(TargetDevice):
    """Has a cubin that no compiler has made, and does with it what a GPU's device does."""

    def __init__(self, arch: str = "sm_80") -> None:
        super().__init__(arch)
        self.made: list[str] = []
        self.sources: list[Any] = []

    def compile(self, function: Function) -> Any:
        known = kernel_index.find(function, self.arch)
        if known is None:
            source = generate(function, self.arch)
            disk_cache.cubin(source.text, source.entry, self.arch, lambda *_: b"a cubin")
            kernel_index.keep(function, self.arch, source)
        else:
            source = known[0]
            assert known[1] == b"a cubin"
        self.made.append("known" if known else "new")
        self.sources.append(source)
        return _Nothing()


class _Nothing:
    def bind(self, *_: Any) -> Callable[[Any], None]:
        return lambda queue: None


def run(device: tilert.Device, kernel: Any, *constants: float) -> None:
    y, x = (tilert.empty((4, 64), f32, device) for _ in range(2))
    kernel(y.partition(1, 64), x, *constants).run()


def test_another_process_finds_what_was_generated(load: Callable[..., ModuleType]) -> None:
    first, second = Keeping(), Keeping()
    run(first, load().scale)
    module = load()
    run(second, module.scale)
    assert (first.made, second.made) == (["new"], ["known"])
    # All that a launch needs to know, with the types that it had.
    assert vars(second.sources[0]) == vars(first.sources[0]) | {"text": ""}
    # Nothing was traced, but a change of what a trace would read is still seen.
    module.SCALE = 3.0
    run(second, module.scale)
    assert second.made == ["known", "new"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("SCALE = 2.0", "SCALE = 2"),
        ("return x * SCALE", "return x + SCALE"),
        ("+ c)", "- c)"),
        ("import exp", "import log as exp"),
    ],
)
def test_what_has_changed_is_made_anew(
    load: Callable[..., ModuleType], before: str, after: str
) -> None:
    device, changed = Keeping(), SOURCE.replace(before, after)
    assert before in SOURCE
    # A device has its own launchers by kernel, and each import makes another kernel.
    for source in (SOURCE, SOURCE, changed, changed):
        run(device, load(source).scale)
    assert device.made == ["new", "known", "new", "known"]


def test_types_constants_targets_and_switches_tell_apart(
    load: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, other = Keeping(), Keeping("sm_90a")
    kernel = load().scale
    run(device, kernel)
    run(device, kernel, 2.0)
    run(device, kernel, -0.0)
    run(device, kernel, 0.0)
    run(other, kernel)
    y = tilert.empty((4, 64), tilert.bf16, device)
    kernel(y.partition(1, 64), tilert.empty((4, 64), f32, device)).run()
    monkeypatch.setenv("TILERT_SCHEDULES", "none")
    run(Keeping(), kernel)
    assert device.made == ["new"] * 5
    assert other.made == ["new"]
    again = Keeping()
    run(again, kernel)
    assert again.made == ["known"]


@pytest.mark.parametrize("kind", ["kernel", "cubin"])
def test_a_damaged_entry_is_made_anew(
    load: Callable[..., ModuleType], folder: Path, kind: str
) -> None:
    run(Keeping(), load().scale)
    (entry,) = folder.glob(f"*.{kind}")
    entry.write_bytes(entry.read_bytes()[:-1])
    device = Keeping()
    run(device, load().scale)
    assert device.made == ["new"]
    again = Keeping()
    run(again, load().scale)
    assert again.made == ["known"]


def test_what_a_closure_holds_is_not_known_to_another_process(
    load: Callable[..., ModuleType], folder: Path
) -> None:
    body = SOURCE.split("SCALE = 2.0")[0] + (
        "def make(by):\n"
        "    @tilert.kernel\n"
        "    def scale(y: Mut, x: Ref):\n"
        "        y.store(x.tile_like(y) * by)\n"
        "    return scale\n"
    )
    device = Keeping()
    for by in (2.0, 3.0):
        run(device, load(body).make(by))
    assert device.made == ["new", "new"]
    assert list(folder.glob("*.kernel")) == []


def test_an_error_of_a_trace_comes_where_the_kernel_is_launched(
    load: Callable[..., ModuleType],
) -> None:
    kernel = load(SOURCE.replace("x.tile_like(y)", "x")).scale
    with pytest.raises(KernelError, match="x"):
        run(Keeping(), kernel)


def test_what_is_found_of_serving_kernels_is_all_that_was_generated() -> None:
    """Of every schedule, with tensor maps of every form."""
    for arch in ("sm_80", "sm_90a"):
        first, second = Keeping(arch), Keeping(arch)
        for device in (first, second):
            serve(device, "qwen3-4b", Walk(batches=(1, 32), prompts=(5, 1000), several=()))
        assert set(first.made) == {"new"} and len(first.made) > 30
        # One device opens kernels in the order of another.
        assert second.made == ["known"] * len(first.made)
        for found, made in zip(second.sources, first.sources, strict=True):
            assert vars(found) == vars(made) | {"text": ""}
        maps = [len(source.maps) for source in first.sources]
        assert any(maps) == (arch == "sm_90a")


@pytest.mark.gpu
def test_a_gpu_runs_what_an_earlier_process_has_made(
    load: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A streaming kernel; and a pipelined one, whose launches make tensor maps, rehearsed."""
    known: list[bool] = []
    find = kernel_index.find

    def noted(function: Function, arch: str) -> Any:
        found = find(function, arch)
        known.append(found is not None)
        return found

    monkeypatch.setattr(kernel_index, "find", noted)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    a, b = (rng.integers(-4, 5, (256, 256)).astype(bf16.numpy) for _ in range(2))

    def results(device: tilert.Device, scale: Any) -> tuple[Any, Any]:
        y, c = tilert.empty((4, 64), f32, device), tilert.empty((256, 256), f32, device)
        of = [tilert.from_numpy(array, device) for array in (x, a, b)]
        scale(y.partition(1, 64), of[0], 1.0).run()
        linear(c.partition(128, 64), *of[1:], bk=64).run()
        return y.numpy(), c.numpy()

    wanted = np.exp(2 * x) + 1, a.astype(np.float32) @ b.astype(np.float32).T
    for times in range(2):
        device = open_device("cuda:0")
        for got, want in zip(results(device, load().scale), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4)
        assert known == [bool(times)] * 2
        known.clear()
    device, scale = open_device("cuda:0"), load().scale
    rehearsal = Rehearsal(device)
    y, c = tilert.empty((4, 64), f32, rehearsal), tilert.empty((256, 256), f32, rehearsal)
    p, q = (tilert.empty((256, 256), bf16, rehearsal) for _ in range(2))
    scale(y.partition(1, 64), tilert.empty((4, 64), f32, rehearsal), 1.0).run()
    linear(c.partition(128, 64), p, q, bk=64).run()
    rehearsal.finish()
    assert rehearsal.made == 2 and known == [True] * 2
    for got, want in zip(results(device, scale), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)
    assert known == [True] * 2


# -- several at a time ---------------------------------------------------------------------------


class Slow(TargetDevice):
    """Compiles nothing, but waits until so many kernels are being compiled at once."""

    def __init__(self, together: int) -> None:
        super().__init__("sm_80")
        self._barrier = threading.Barrier(together, timeout=60)
        self.names: list[str] = []

    def begin_compile(self, function: Function) -> Callable[[], Launcher]:
        assert isinstance(function, DeferredFunction)
        self.names.append(function.name)

        def finish() -> Launcher:
            self._barrier.wait()
            return _Nothing()

        return finish


def test_kernels_are_compiled_beside_each_other_and_each_once(
    load: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(3)))
    device, kernel = Slow(together=3), load().scale
    rehearsal = Rehearsal(device)
    for c in (1.0, 2.0, 3.0, 1.0):
        run(rehearsal, kernel, c)
    rehearsal.finish()
    assert rehearsal.made == 3
    assert device.names == ["scale"] * 3
    # What was rehearsed is there.
    for c in (1.0, 2.0, 3.0):
        run(device, kernel, c)
    assert device.names == ["scale"] * 3


def test_a_rehearsal_leaves_what_it_has_found_in_one_file(
    load: Callable[..., ModuleType], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = Rehearsal(Keeping())
    run(rehearsal, load().scale)
    rehearsal.finish()
    for path in folder.iterdir():
        if path.name != "used.bundle":
            path.unlink()
    monkeypatch.setattr(entries, "_folders", {})
    device = Keeping()
    run(device, load().scale)
    assert device.made == ["known"]


def test_threads_that_need_the_same_kernel_wait_for_one(load: Callable[..., ModuleType]) -> None:
    device, kernel = Slow(together=1), load().scale
    jobs = [(1.0, 9.0), (2.0, 9.0), (9.0,)]
    threads = [
        threading.Thread(target=lambda cs=cs: [run(device, kernel, c) for c in cs]) for cs in jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(device.names) == ["scale"] * 3


def test_a_kernel_that_does_not_compile_is_left_to_the_launch_that_needs_it(
    load: Callable[..., ModuleType],
) -> None:
    class Failing(TargetDevice):
        def compile(self, function: Function) -> Any:
            raise CompileError("out of registers")

    device, kernel = Failing("sm_80"), load().scale
    rehearsal = Rehearsal(device)
    run(rehearsal, kernel)
    rehearsal.finish()
    assert rehearsal.made == 0
    with pytest.raises(CompileError, match="out of registers"):
        run(device, kernel)


def test_a_rehearsal_that_is_cancelled_begins_nothing_more(
    load: Callable[..., ModuleType],
) -> None:
    device, kernel = Slow(together=1), load().scale
    rehearsal = Rehearsal(device)
    rehearsal.cancel()
    run(rehearsal, kernel)
    rehearsal.finish()
    assert rehearsal.made == 0
    assert device.names == []

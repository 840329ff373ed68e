"""Products shared out over threads: results, failures, contention, settings of the process."""

import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tilert
from tilert.backends import cpu_matmul
from tilert.backends.cpu_plan import Plan
from tilert.backends.cpu_pool import Pool, thread_count
from tilert.device import open_device

POOLS = [Pool(1), Pool(2), Pool(5)]


def use(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    monkeypatch.setattr(cpu_matmul, "shared_pool", lambda: pool)


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.threads} threads")
def test_map_gives_every_result_in_order(pool: Pool) -> None:
    for count in (0, 1, 2, 7, 40):
        assert pool.map(lambda i: i * i, count) == [i * i for i in range(count)]


def test_helpers_take_part() -> None:
    names = set()
    all_there = threading.Event()

    def part(_: int) -> None:
        names.add(threading.current_thread().name)
        if len(names) == 3:
            all_there.set()
        assert all_there.wait(60)

    Pool(3).map(part, 12)
    assert {"tilert-cpu-1", "tilert-cpu-2"} < names


def test_a_part_that_a_helper_does_not_finish_is_done_again() -> None:
    caller, stuck, pool = threading.get_ident(), threading.Event(), Pool(2)
    taken = threading.Event()

    def part(number: int) -> int:
        if threading.get_ident() != caller:
            taken.set()
            assert stuck.wait(20)
        elif number == 0:
            taken.wait(20)
        return number

    assert pool.map(part, 4) == [0, 1, 2, 3]
    assert taken.is_set()
    # The only helper is still stuck; calls go on without it.
    assert pool.map(lambda i: -i, 3) == [0, -1, -2]
    stuck.set()


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.threads} threads")
def test_what_a_part_raises_reaches_the_caller(pool: Pool) -> None:
    def part(number: int) -> int:
        if number == 3:
            raise ArithmeticError("part 3")
        return number

    for _ in range(20):
        with pytest.raises(ArithmeticError, match="part 3"):
            pool.map(part, 5)
    assert pool.map(lambda i: i, 3) == [0, 1, 2]


def test_a_failure_of_a_helper_alone_is_made_good() -> None:
    caller = threading.get_ident()

    def part(number: int) -> int:
        if threading.get_ident() != caller:
            raise MemoryError
        time.sleep(0.001)
        return number

    pool = Pool(2)
    for _ in range(5):
        assert pool.map(part, 6) == list(range(6))


def test_many_threads_share_one_pool() -> None:
    pool = Pool(3)

    def calls(base: int) -> list[list[int]]:
        return [pool.map(lambda i: base + i, 9) for _ in range(50)]

    with ThreadPoolExecutor(4) as threads:
        for base, results in enumerate(threads.map(calls, range(4))):
            assert results == [[base + i for i in range(9)]] * 50


SHAPES = [(1, 64, 5000), (1, 576, 576), (3, 300, 1000), (50, 576, 960), (70, 700, 513)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("columns_first", [True, False])
def test_the_number_of_threads_does_not_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, m: int, k: int, n: int, dtype: type, columns_first: bool
) -> None:
    rng = np.random.default_rng(m + n)
    a = rng.standard_normal((m, k)).astype(dtype)
    b = rng.standard_normal((k, n)).astype(dtype)
    if columns_first:
        b = np.ascontiguousarray(b.T).T
    results = []
    for pool in POOLS:
        use(monkeypatch, pool)
        # Plans try both ways within the first calls.
        results += [cpu_matmul.matmul(a, b) for _ in range(8)]
    for result in results:
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, results[0])
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(results[0], want, rtol=1e-4, atol=1e-3)


def test_up_to_four_rows_are_what_each_is_alone() -> None:
    rng = np.random.default_rng(1)
    for n in (100, 3000):
        rows = rng.standard_normal((4, 320)).astype(np.float32)
        w = rng.standard_normal((n, 320)).astype(np.float32)
        for count in (2, 3, 4):
            together = cpu_matmul.matmul(rows[:count], w.T)
            alone = [cpu_matmul.matmul(rows[i : i + 1], w.T)[0] for i in range(count)]
            np.testing.assert_array_equal(together, np.stack(alone))


def test_rows_of_a_batch_of_products_are_what_each_is_alone() -> None:
    rng = np.random.default_rng(2)
    a = rng.standard_normal((5, 1, 3, 16)).astype(np.float32)
    b = rng.standard_normal((5, 2, 16, 40)).astype(np.float32)
    got = cpu_matmul.batch_matmul(a, b)
    assert got.shape == (5, 2, 3, 40)
    np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC1, 0x8000, 0x0001, 0x3F81])
def test_bf16_operands_are_taken_exactly(bits: int) -> None:
    b = np.full((2, 3), bits, np.uint16).view(ml_dtypes.bfloat16)
    got = cpu_matmul.matmul(np.array([[1, 0]], np.float32)[:, :1], b[:1])
    np.testing.assert_array_equal(got, b[:1].astype(np.float32))


@pytest.mark.parametrize(("text", "threads"), [("1", 1), ("3", 3)])
def test_the_variable_sets_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, text: str, threads: int
) -> None:
    monkeypatch.setenv("TILERT_CPU_THREADS", text)
    assert thread_count() == threads


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TILERT_CPU_THREADS", text)
    with pytest.raises(tilert.DeviceError, match=f"TILERT_CPU_THREADS is '{text}'"):
        thread_count()


@pytest.mark.parametrize("text", ["abc", "0"])
def test_a_device_is_not_opened_with_a_wrong_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TILERT_CPU_THREADS", text)
    with pytest.raises(tilert.DeviceError, match=f"TILERT_CPU_THREADS is '{text}'; it takes"):
        open_device("cpu")


def test_without_the_variable_every_allowed_core_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILERT_CPU_THREADS", raising=False)
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 7})
        assert thread_count() == 3


PROGRAM = """
import os, sys
import numpy as np
from threadpoolctl import threadpool_info
from tilert.backends import cpu_matmul, cpu_process
from tilert.backends.cpu_pool import shared_pool
cpu_process.prepare()
blas = [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"]
assert set(blas) <= {1}, blas
rng = np.random.default_rng(0)
a = rng.standard_normal((1, 600)).astype(np.float32)
b = rng.standard_normal((600, 4000)).astype(np.float32)
want = cpu_matmul.matmul(a, b)
assert shared_pool().threads == 3
child = os.fork()
if child == 0:
    same = all(np.array_equal(cpu_matmul.matmul(a, b), want) for _ in range(20))
    os._exit(0 if same and shared_pool().threads == 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert np.array_equal(cpu_matmul.matmul(a, b), want)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_blas_uses_one_thread_and_a_forked_child_has_its_own_pool() -> None:
    environment = {**os.environ, "TILERT_CPU_THREADS": "3", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


ARENAS = """
import ctypes, re, sys, threading
import numpy as np
from tilert.backends import cpu_process

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p

def arenas():
    to = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
    assert libc.malloc_info(0, to) == 0
    libc.fclose(to)
    with open(sys.argv[1]) as report:
        return len(re.findall("<heap ", report.read()))

def work():
    np.ones(1 << 17)
    done.wait()
    done.wait()

cpu_process.prepare()
before, done = arenas(), threading.Barrier(7)
threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
done.wait()
now = arenas()
done.wait()
assert now <= max(before, 2), (before, now)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_threads_do_not_each_keep_memory_of_their_own(tmp_path: Path) -> None:
    program = [sys.executable, "-c", ARENAS, str(tmp_path / "arenas.xml")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def choices(plan: Plan, alone: float, shared: float, count: int) -> list[bool]:
    """What a plan decides when the two ways take these seconds."""
    chosen = []
    for _ in range(count):
        chosen.append(plan.shares())
        plan.note(chosen[-1], shared if chosen[-1] else alone)
    return chosen


def test_a_plan_takes_the_faster_way_and_tries_the_other_ever_less() -> None:
    plan = Plan(16)
    assert choices(plan, 2.0, 1.0, 8) == [True] * 4 + [False] * 4
    later = choices(plan, 2.0, 1.0, 1000)
    tried = [i for i, shared in enumerate(later) if not shared]
    gaps = np.diff(tried[::2])
    assert len(tried) < 24
    assert (gaps[1:] >= gaps[:-1]).all() and gaps.max() == 130


def test_a_plan_follows_a_change() -> None:
    plan = Plan(16)
    choices(plan, 1.0, 2.0, 1000)
    # Cores are free now.
    choices(plan, 1.0, 0.4, 300)
    assert sum(choices(plan, 1.0, 0.4, 100)) >= 90
    # Contended: seen at once.
    assert sum(choices(plan, 1.0, 20.0, 100)) <= 14


def test_one_slow_call_does_not_change_a_plan() -> None:
    plan = Plan(16)
    choices(plan, 2.0, 1.0, 50)
    plan.note(True, 100.0)
    assert sum(choices(plan, 2.0, 1.0, 20)) >= 18

"""Fixtures and skipping rules that every test shares."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    import tilert

ORACLES = ("torch", "transformers")


# A busy machine is no fault: examples have no deadline. CI tries the same examples every time, so
# that only a change can make it fail; everywhere else they are fresh.
settings.register_profile(
    "grout",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("grout")


def gpu_problem() -> str | None:
    """Why tests marked gpu cannot run here, or None if they can."""
    try:
        import tilert

        tilert.device("cuda")
    except ImportError as error:
        return f"tilert cannot be imported: {error}"
    except tilert.DeviceError as error:
        return f"no CUDA device: {error}"
    return None


def oracle_problem() -> str | None:
    """Why tests marked oracle cannot run here, or None if they can."""
    missing = [name for name in ORACLES if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (ORACLE=1 scripts/test)" if missing else None


PROBLEMS = {"gpu": gpu_problem, "oracle": oracle_problem}
LONGEST = (
    "tests/server/test_load.py",
    "tests/models/test_compile_targets.py",
    "tests/tilert/test_codegen.py",
    "tests/oracle/test_live.py",
    "tests/tilert/test_codegen_attention.py",
    "tests/models/test_emulated.py",
    "tests/models/test_kernels_pipelined.py",
    "tests/tilert/test_codegen_rows.py",
)
"""Files that take half a minute and more come first: one process would wait for them alone."""


def _rank(item: pytest.Item) -> int:
    file = item.nodeid.split("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def pytest_collection() -> None:
    """Nothing that is made while tests are collected is garbage: see `pytest_collection_finish`."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there now stays: collections, and tests that ask for one, need not walk it."""
    gc.freeze()
    gc.enable()
    # As wherever kernels have run on the cpu: threads of BLAS that wait for work keep a core busy.
    threadpool_limits(limits=1, user_api="blas")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and skip the tests whose device or oracle is not here, saying why."""
    items.sort(key=_rank)
    for marker, problem in PROBLEMS.items():
        marked = [item for item in items if item.get_closest_marker(marker) is not None]
        reason = problem() if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a reason for skipping, where -rs would print one a file."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} {reason}")


@pytest.fixture(scope="module", autouse=True)
def swept() -> None:
    """What was there before a module stays: the many collections of its tests need not walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread_of_torch(request: pytest.FixtureRequest) -> None:
    """As of BLAS: where others use the cores, its threads wait for each other most of the time."""
    if request.node.get_closest_marker("oracle") is not None:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> "Iterator[tilert.Device]":
    """Each backend in turn: a test that takes it runs on cpu, and on cuda where there is one."""
    import tilert

    chosen = tilert.device(request.param)
    yield chosen
    chosen.synchronize()

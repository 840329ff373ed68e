"""Fixtures of the tests of tilert."""

import pytest

import tilert
from tests.tilert.emulator import EmulatedDevice, compiler
from tilert.codegen import schedules


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "emulated", marks=pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def everywhere(request: pytest.FixtureRequest) -> tilert.Device:
    """As `device`, and CUDA text run on the host: for tests of few kernels, which g++ compiles."""
    return EmulatedDevice() if request.param == "emulated" else tilert.device(request.param)


@pytest.fixture
def pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules of sm_90a, whatever the environment says."""
    monkeypatch.setenv(schedules.VARIABLE, "pipelined")


@pytest.fixture
def gpu() -> EmulatedDevice:
    """CUDA text for sm_90a, run on the host."""
    return EmulatedDevice("sm_90a")

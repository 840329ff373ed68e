"""Fixtures of the tests of tilert."""

import pytest

import tilert
from tests.tilert.emulator import EmulatedDevice, compiler


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

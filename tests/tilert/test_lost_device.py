"""Failures that a device reports late: which ops they may come from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilert import DeviceError
from tilert.driver import LostError
from tilert.fault import Watch
from tilert.ownership import Place, where

ROOT = Path(__file__).resolve().parents[2]


def test_a_lost_device_names_the_last_ops() -> None:
    watch = Watch(None)
    here = [where(), where()]
    first, second = (Place(*at) for at in here)
    with pytest.raises(LostError) as got, watch:
        raise LostError("gone")
    assert not hasattr(got.value, "__notes__")
    for number in range(40):
        watch.trail.add((f"k{number}" if number != 30 else None, here[number % 2]))
    with pytest.raises(LostError) as got, watch:
        raise LostError("gone")
    [note] = got.value.__notes__
    assert note.startswith(f"enqueued last, the newest at the end: op 'k24' created at {first}; ")
    assert f"; a replay of the graph captured at {first}; op 'k31'" in note
    assert note.endswith(f"; op 'k39' created at {second}")
    with pytest.raises(DeviceError) as other, watch:
        raise DeviceError("something else")
    assert not hasattr(other.value, "__notes__")
    watch.trail.clear()
    with pytest.raises(LostError) as got, watch:
        raise LostError("gone")
    assert not hasattr(got.value, "__notes__")


PROGRAM = """import numpy as np
import tilert
from tilert import Dyn, Mut, Ref, f32

dev = tilert.device("cuda")


@tilert.unsafe_kernel(
    source='''
extern "C" __global__ void astray(float* y, int y_dim0, int grid0) { *(volatile float*)4096 = 1; }
''',
    reference=lambda y: None,
    reason="a test: it goes astray",
    threads=1,
)
def astray(y: Mut[Dyn]): ...


@tilert.kernel
def double(y: Mut[Dyn]):
    y.store(y.load() * 2.0)


y = tilert.zeros(4, f32, dev)
y = double(y.partition(4)).sync()
y = astray(y.partition(4)).run()
try:
    y.numpy()
except tilert.DeviceError as error:
    print(type(error).__name__, error)
    print(*error.__notes__, sep="\\n")
"""


@pytest.mark.gpu
def test_an_illegal_address_names_op_and_line(tmp_path: Path) -> None:
    """In a process of its own, which loses the device."""
    path = tmp_path / "astray.py"
    path.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("LostError CUDA_ERROR_ILLEGAL_ADDRESS")
    line = PROGRAM.splitlines().index("y = astray(y.partition(4)).run()") + 1
    # The host has waited for the first op, but not for the whole device.
    assert second == (
        f"enqueued last, the newest at the end: op 'double' created at {path}:{line - 1}; "
        f"op 'astray' created at {path}:{line}"
    )

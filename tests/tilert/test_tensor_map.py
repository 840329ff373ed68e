"""Tensor maps: what is said of an array, to the driver, and to a launch."""

from typing import Any

import pytest

from tilert import bf16, driver, f16, f32
from tilert.errors import LaunchError
from tilert.tensor_map import Encoding, TensorMap, encoding


def test_encoding() -> None:
    spec = TensorMap(1, (1, 128, 64))
    got = encoding(spec, bf16, 4096, (3, 1000, 520), (1 << 20, 1024, 1))
    assert got == Encoding(bf16, 4096, (520, 1000, 3), (2048, 1 << 21), (64, 128, 1))
    # An axis of one element may have any stride.
    assert encoding(spec, f16, 0, (1, 8, 64), (7, 64, 1)).strides == (128, 128)


def test_boxes_beside_each_other() -> None:
    """The last axis is cut into pieces of a box's width, which the outermost one numbers."""
    spec = TensorMap(0, (1, 20, 64), beside=8)
    got = encoding(spec, bf16, 0, (2, 1000, 512), (1 << 19, 512, 1))
    assert got == Encoding(
        bf16, 0, (64, 1000, 2, 8), (1024, 1 << 20, 128), (64, 20, 1, 8)
    )  # fmt: skip
    wide = encoding(TensorMap(0, (8, 32), beside=4), f32, 0, (3, 640), (640, 1))
    assert wide == Encoding(f32, 0, (32, 3, 20), (2560, 128), (32, 8, 4))
    with pytest.raises(LaunchError, match="with 520 columns"):
        encoding(spec, bf16, 0, (2, 1000, 520), (1 << 20, 520, 1))


@pytest.mark.parametrize(
    ("address", "shape", "strides", "box", "message"),
    [
        (8, (64, 64), (64, 1), (64, 64), "at an address that is 8 past a multiple of 16"),
        (0, (0, 64), (64, 1), (64, 64), r"of shape \(0, 64\)"),
        (0, (64, 60), (60, 1), (64, 64), r"with strides \(60, 1\)"),
        (0, (64, 64), (1, 64), (64, 64), "with a last stride of 64"),
        (0, (64, 128), (128, 1), (64, 128), r"in boxes of \(64, 128\)"),
        (0, (64,), (1,), (64,), "with 1 axes"),
    ],
)
def test_arrays_that_no_map_describes(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...],
    message: str,
) -> None:  # fmt: skip
    with pytest.raises(LaunchError, match=message):
        encoding(TensorMap(0, box), bf16, address, shape, strides)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver's bindings, uninitialised: there is no GPU."""
    cu = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(driver, "_cu", lambda: cu)
    return cu


def test_the_driver_gets_what_was_encoded(bindings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def encode(*args: Any) -> int:
        calls.append(args)
        return 0

    monkeypatch.setattr(driver, "_encode_tiled", lambda: encode)
    packed = driver.tensor_map("BFLOAT16", 4096, (520, 1000), (2048,), (64, 128))
    to, kind, rank, address, dims, strides, box, steps, *modes = calls[0]
    assert to == packed.address and to % 128 == 0
    assert (rank, address) == (2, 4096)
    assert [list(v) for v in (dims, strides, box, steps)] == [
        [520, 1000], [2048], [64, 128], [1, 1],
    ]  # fmt: skip
    names = [
        bindings.CUtensorMapDataType(kind).name,
        bindings.CUtensorMapInterleave(modes[0]).name,
        bindings.CUtensorMapSwizzle(modes[1]).name,
        bindings.CUtensorMapL2promotion(modes[2]).name,
        bindings.CUtensorMapFloatOOBfill(modes[3]).name,
    ]
    assert names == [
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
        "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "CU_TENSOR_MAP_SWIZZLE_128B",
        "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ]


def test_a_launch_takes_maps_before_its_values(bindings: Any) -> None:
    maps = [driver.TensorMap(), driver.TensorMap()]
    launch = driver.Launch(None, 3, 384, 1024, [5, 7], maps)
    numbers = list(launch.values)
    assert numbers[:2] == [5, 7]
    assert numbers[2:4] == [m.address for m in maps]
    base = numbers[4]
    assert numbers[4:] == [base, base + 8]
    assert launch._pointers == base + 16

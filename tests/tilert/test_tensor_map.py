"""Tensor maps: what is said of an array, to the driver, and to a launch."""

# mypy: disable-error-code="type-arg, assignment"

from typing import Any

import pytest

import tilert
from tilert import Const, Mut, Ref, bf16, driver, f16, f32, kernel_launch
from tilert.codegen import generate
from tilert.errors import LaunchError
from tilert.ir import Function
from tilert.language import mma, tiles, zeros
from tilert.target_device import TargetDevice
from tilert.tensor_map import Encoding, TensorMap, encoding


@tilert.kernel
def product(y: Mut, x: Ref, w: Ref, bk: Const[int]) -> None:
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=bk):
        acc = mma(x[m, k], w[n, k].T, acc)
    y.store(acc)


class Keeping(TargetDevice):
    """Keeps the maps of what it would launch."""

    def compile(self, function: Function) -> Any:
        self.maps = generate(function, self.arch).maps
        return self

    def bind(self, *_: Any) -> Any:
        return lambda queue: None


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "fetch"),
    [(8, 40, 256, 128), (32, 40, 128, 128), (128, 128, 64, 256)],
)
def test_two_lines_come_at_once_where_blocks_share_operands(
    rows: int, columns: int, depth: int, fetch: int
) -> None:
    device = Keeping("sm_90a")
    y, x, w = (
        tilert.empty(shape, bf16, device) for shape in ((256, 1280), (256, 512), (1280, 512))
    )
    product(y.partition(rows, columns), x, w, bk=depth).run()
    assert {spec.param for spec in device.maps} >= {1, 2}
    loaded = [spec for spec in device.maps if spec.param > 0]
    assert {spec.fetch for spec in loaded} == {fetch}
    assert encoding(loaded[0], bf16, 0, (256, 512), (512, 1)).fetch == fetch


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
    monkeypatch.setattr(driver, "bindings", lambda: cu)
    return cu


@pytest.mark.parametrize("fetch", [128, 256])
def test_the_driver_gets_what_was_encoded(
    bindings: Any, monkeypatch: pytest.MonkeyPatch, fetch: int
) -> None:
    calls: list[tuple[Any, ...]] = []

    def encode(*args: Any) -> int:
        calls.append(args)
        return 0

    monkeypatch.setattr(kernel_launch, "_encode_tiled", lambda: encode)
    packed = kernel_launch.tensor_map("BFLOAT16", 4096, (520, 1000), (2048,), (64, 128), fetch)
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
        f"CU_TENSOR_MAP_L2_PROMOTION_L2_{fetch}B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ]


def test_a_launch_takes_maps_before_its_values(bindings: Any) -> None:
    maps = [kernel_launch.TensorMap(), kernel_launch.TensorMap()]
    launch = kernel_launch.Launch(None, 3, 384, 1024, [5, 7], maps)
    numbers = list(launch.values)
    assert numbers[:2] == [5, 7]
    assert numbers[2:4] == [m.address for m in maps]
    base = numbers[4]
    assert numbers[4:] == [base, base + 8]
    assert launch._pointers == base + 16

"""Generated CUDA C++ run on the host: values without a GPU, and barriers that are not missing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert import test_language_accumulate as accumulate
from tests.tilert import test_language_draws as draws
from tests.tilert import test_language_memory as memory
from tests.tilert import test_language_mma as products
from tests.tilert import test_language_numbers as numbers
from tests.tilert import test_language_order as order
from tests.tilert import test_language_reductions as reductions
from tests.tilert import test_language_scans as scans
from tests.tilert import test_language_shapes as shapes
from tests.tilert.checks import Frame, data
from tests.tilert.emulator import EmulatedDevice, compiler
from tests.tilert.test_codegen import case_name
from tilert import Dyn, Mut, Ref, bf16, f8e4m3, f8e5m2, f16, f32, i8, i32, u8
from tilert.codegen.emit import Emitter
from tilert.language import device_print

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")

CASES: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (reductions.test_reduce_then_broadcast, {"shape": (65, 31)}),
    (reductions.test_argmax_reaches_every_thread, {"n": 1000}),
    (memory.test_gather, {"tile": (4, 32), "dtype": bf16}),
    (products.test_attention, {"tile": 64, "bk": 32, "dtype": bf16}),
    (scans.test_any_all, {"shape": (9, 70)}),
    (scans.test_whole_tile, {}),
    (scans.test_scan_of_ragged_pieces, {"shape": (7, 5, 20)}),
    (scans.test_scan_in_a_program, {}),
    (order.test_sort_of_a_middle_axis, {}),
    (order.test_topk, {"shape": (5, 33), "dtype": bf16}),
    (order.test_take_along, {"source": (1, 7), "index": (6, 9), "axis": 1}),
    (order.test_order_and_take_agree, {}),
    (shapes.test_permute, {"shape": (3, 20, 33), "dtype": bf16}),
    (shapes.test_concatenate, {"axis": 1, "dtype": u8}),
    (shapes.test_halves_of_rows, {}),
    (shapes.test_broadcast_to, {}),
    (draws.test_uniform_and_normal_bits, {"kind": i32}),
    (draws.test_words, {"seed": 2**64 - 1, "dtype": i32}),
    (numbers.test_fma_rounds_once, {}),
    (accumulate.test_rows_that_repeat, {"kind": "add", "dtype": f32}),
    (accumulate.test_a_sum_over_the_grid, {}),
    (numbers.test_work_in_8_bits, {"dtype": f8e4m3}),
    (numbers.test_rounding_to_8_bits, {"dtype": f8e5m2}),
]
SLOW: list[tuple[Callable[..., None], dict[str, Any]]] = [
    *((numbers.test_every_8_bit_float_survives, {"dtype": d}) for d in (f8e4m3, f8e5m2)),
    (numbers.test_rounding_to_8_bits, {"dtype": f8e4m3}),
    (numbers.test_products_of_8_bit_floats, {"pair": (f8e4m3, f8e5m2)}),
    (numbers.test_products_of_i8, {}),
    *((scans.test_scan, {"name": n, "dtype": d}) for n, d in (("cumsum", f16), ("cumprod", i8))),
    *((order.test_sort, {"descending": d, "dtype": bf16}) for d in (False, True)),
    *((shapes.test_slices, {"kind": k, "dtype": i32}) for k in range(len(shapes.CUTS))),
    (products.test_product, {"sizes": (33, 24, 130), "transposed_a": True, "transposed_b": False,
                             "dtype": f16}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=case_name,
)
def test_values(function: Callable[..., None], arguments: dict[str, Any]) -> None:
    function(EmulatedDevice(), **arguments)


@tilert.kernel
def reversed_row(y: tilert.Mut, x: tilert.Ref):
    y.store(x[:][::-1])


def test_a_missing_barrier_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order threads run, half of them read before the others have written."""
    line = Emitter.line
    monkeypatch.setattr(
        Emitter, "line", lambda e, text: line(e, text) if "__syncthreads" not in text else None
    )
    device = EmulatedDevice()
    x, x64 = data(device, (5000,), f32)
    y = Frame(device, (5000,))
    reversed_row(y.piece(5000), x).sync()
    with pytest.raises(AssertionError):
        y.check(x64[::-1])


@tilert.kernel
def filled_rows(y: Mut[Dyn], x: Ref[Dyn]):
    i, j = y.index
    y.store(x.load(i, j, fill=float("-inf")).to(f32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [f8e4m3, f8e5m2, bf16])
@pytest.mark.parametrize("columns", [4, 12, 16, 64])
def test_what_is_not_there_is_the_fill(columns: int, dtype: tilert.DType, arch: str) -> None:
    """Read element by element or 16 bytes at a time: what the type makes of the fill on the cpu."""
    rows = []
    for device in (tilert.device("cpu"), EmulatedDevice(arch)):
        x, _ = data(device, (1, columns), dtype)
        y = tilert.empty((2, columns), f32, device)
        rows.append(filled_rows(y.partition(1, columns), x).sync().numpy())
    np.testing.assert_array_equal(rows[0], rows[1])
    assert not np.isfinite(rows[0][1]).any()


@tilert.kernel
def told(y: Mut[Dyn], x: Ref[Dyn]):
    v = x.tile_like(y)
    device_print("a row", v)
    y.store(v + 1.0)


def test_a_kernel_that_prints() -> None:
    device = EmulatedDevice("sm_90a")
    x, x64 = data(device, (2, 4), f32)
    y = Frame(device, (2, 4), f32)
    told(y.piece(1, 4), x).sync()
    y.check(x64 + 1.0)

"""Kernels of the language tests compiled for absent GPUs: no spills, the right instructions."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.tilert import (
    test_language_accumulate as accumulate,
)
from tests.tilert import (
    test_language_control as control,
)
from tests.tilert import (
    test_language_draws as draws,
)
from tests.tilert import (
    test_language_elementwise as elementwise,
)
from tests.tilert import (
    test_language_memory as memory,
)
from tests.tilert import (
    test_language_mma as products,
)
from tests.tilert import (
    test_language_numbers as numbers,
)
from tests.tilert import (
    test_language_order as order,
)
from tests.tilert import (
    test_language_reductions as reductions,
)
from tests.tilert import (
    test_language_scans as scans,
)
from tests.tilert import (
    test_language_shapes as shapes,
)
from tests.tilert.checks import Frame, data, ints
from tilert import bf16, f8e4m3, f8e5m2, f16, f32, i8, i32, i64, u8, u32
from tilert.nvrtc import Resources
from tilert.target_device import CompiledKernel, TargetDevice

ARCHITECTURES = [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"]

CASES: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (elementwise.test_function, {"name": "tanh", "dtype": bf16}),
    (elementwise.test_function, {"name": "rsqrt", "dtype": f32}),
    (elementwise.test_arithmetic, {"name": "maximum", "dtype": f16}),
    (elementwise.test_floor_division, {"dtype": u32}),
    (elementwise.test_bits, {"dtype": i32}),
    (elementwise.test_shifts, {"dtype": i32}),
    (elementwise.test_logic_on_bools, {}),
    (elementwise.test_bitcast, {"source": f32, "target": u32}),
    (elementwise.test_bitcast, {"source": bf16, "target": f16}),
    (elementwise.test_promotion_and_literals, {}),
    (elementwise.test_broadcast_three_axes, {}),
    (elementwise.test_where, {}),
    (elementwise.test_makers, {}),
    (elementwise.test_inline, {}),
    *[
        (reductions.test_reduce_axis, {"rank": 3, "kind": k, "dtype": bf16})
        for k in ("sum", "argmax")
    ],
    (reductions.test_full_reduction, {"shape": (7, 1030), "dtype": f32}),
    (reductions.test_reduce_then_broadcast, {"shape": (65, 31)}),
    (reductions.test_three_axes, {"shape": (3, 20, 33)}),
    (reductions.test_argmax_reaches_every_thread, {"n": 1000}),
    (reductions.test_softmax_of_ragged_rows, {"rows": 5, "dtype": bf16}),
    (reductions.test_transpose, {"shape": (65, 31), "dtype": bf16}),
    (reductions.test_reshape, {"source": (4, 6), "target": (2, 3, 4)}),
    (reductions.test_reshape_there_and_back, {"shape": (36, 100)}),
    (memory.test_views_as_inputs, {"dtype": bf16}),
    (memory.test_strided_output, {}),
    (memory.test_span, {"size": 16, "dtype": bf16}),
    (memory.test_point, {"dtype": f32}),
    (memory.test_gather, {"tile": (4, 32), "dtype": bf16}),
    (memory.test_gather_of_the_middle_axis, {}),
    (memory.test_gather_at_computed_indices, {}),
    (memory.test_in_place, {"shape": (17, 130), "dtype": bf16}),
    (memory.test_several_muts_with_one_grid, {}),
    (memory.test_index, {}),
    (memory.test_indexed_pieces, {"dtype": bf16}),
    (memory.test_run_time_extents, {}),
    (control.test_tiles, {"size": 16, "dtype": bf16}),
    (control.test_tiles_between_run_time_bounds, {}),
    (control.test_range_of_run_time_bounds, {"step": 3}),
    (control.test_static_loops, {}),
    (control.test_bounds_depend_on_the_program, {}),
    (control.test_nested_loops, {}),
    (control.test_swapped_carried_variables, {"n": 2}),
    (control.test_run_time_if, {"size": 64}),
    (control.test_branches_that_agree, {}),
    (control.test_ifs_and_loops_inside_each_other, {}),
    (control.test_binary_search, {}),
    (control.test_stores_inside_branches_and_loops, {}),
    *[
        (
            products.test_product,
            {"sizes": sizes, "transposed_a": a, "transposed_b": not a, "dtype": dtype},
        )
        for sizes, a, dtype in [
            ((5, 8, 16), False, bf16),
            ((33, 24, 130), True, f16),
            ((17, 130, 48), False, f32),
            ((100, 40, 1), True, bf16),
        ]
    ],
    (products.test_product_in_a_loop, {"loop": ((64, 128), 64, 200), "dtype": bf16}),
    (products.test_product_in_a_loop, {"loop": ((48, 24), 24, 70), "dtype": f16}),
    (products.test_operands_in_registers, {"sizes": (40, 33, 64), "dtype": bf16}),
    (products.test_chained_products, {"sizes": (70, 64, 33, 20), "dtype": bf16}),
    (products.test_attention, {"tile": 64, "bk": 32, "dtype": bf16}),
    (products.test_attention, {"tile": 3, "bk": 16, "dtype": f32}),
    (products.test_two_sums_and_squares, {"bm": 2, "dtype": bf16}),
    (products.test_two_sums_and_squares, {"bm": 64, "dtype": bf16}),
    (products.test_thin_product, {"bm": 3, "dtype": bf16}),
    (products.test_pages_through_a_table, {"rows": 16, "dtype": bf16}),
    (products.test_products_of_spans, {"dtype": bf16}),
    (products.test_products_under_a_run_time_if, {"dtype": bf16}),
    (products.test_products_in_nested_loops, {"dtype": bf16}),
    *[(elementwise.test_function, {"name": n, "dtype": f16}) for n in ("erf", "log1p", "round")],
    *[(scans.test_scan, {"name": n, "dtype": d}) for n, d in (("cumsum", bf16), ("cumprod", i8))],
    (scans.test_prod_and_argmin, {"dtype": i64}),
    (scans.test_any_all, {"shape": (9, 70)}),
    *[(order.test_sort, {"descending": True, "dtype": d}) for d in (f32, f16, u8)],
    (order.test_topk, {"shape": (3, 1000), "dtype": bf16}),
    (order.test_take, {"dtype": bf16, "index": i64}),
    (order.test_take_along, {"source": (5, 7), "index": (1, 3), "axis": 1}),
    (shapes.test_permute, {"shape": (3, 20, 33), "dtype": bf16}),
    *[(shapes.test_slices, {"kind": k, "dtype": bf16}) for k in range(len(shapes.CUTS))],
    (shapes.test_concatenate, {"axis": 0, "dtype": u8}),
    (shapes.test_broadcast_to, {}),
    (draws.test_words, {"seed": -1, "dtype": i64}),
    (draws.test_uniform_and_normal_bits, {"kind": u32}),
    (numbers.test_pow_and_atan2, {"dtype": bf16}),
    (numbers.test_powers, {"dtype": f32}),
    (numbers.test_fma_of_special_values, {"dtype": f16}),
    (numbers.test_predicates_and_clamp, {"dtype": bf16}),
    *[
        (numbers.test_floats_to_integers_saturate, {"source": bf16, "target": t})
        for t in (i8, u8, u32, i64)
    ],
    *[(numbers.test_work_in_8_bits, {"dtype": d}) for d in (f8e4m3, f8e5m2)],
    (numbers.test_every_8_bit_float_survives, {"dtype": f8e4m3}),
    (numbers.test_bits_of_8_bit_floats, {}),
    (numbers.test_products_of_8_bit_floats, {"pair": (f8e4m3, f8e5m2)}),
    (numbers.test_products_of_i8, {}),
    *[
        (accumulate.test_rows_that_repeat, {"kind": k, "dtype": d})
        for k, d in (("add", f32), ("add", i64), ("max", i64), ("min", u32))
    ],
]


def case_name(case: object) -> str:
    if callable(case):
        return case.__name__.removeprefix("test_")
    return "-".join(map(str, case.values())) if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(("function", "arguments"), CASES, ids=case_name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: str, function: Callable[..., None], arguments: dict[str, Any]) -> None:
    device = TargetDevice(arch)
    function(device, **arguments)
    assert device.kernels
    assert not [k.name for k in device.kernels if spilled(k.resources)]


def spilled(used: Resources) -> bool:
    return bool(used.spill_stores or used.spill_loads)


# What the text must say. The body comes after the prelude, where every instruction is defined.


def body(kernel: CompiledKernel) -> str:
    return kernel.text.partition("__launch_bounds__")[2]


@functools.cache
def linear(
    rows: int, columns: int, depth: int, bm: int, bk: int, dtype: Any, bn: int = 64
) -> CompiledKernel:
    device = TargetDevice("sm_90a")
    x, _ = data(device, (rows, depth), dtype)
    w, _ = data(device, (columns, depth), dtype)
    bias, _ = data(device, (columns,))
    y = Frame(device, (rows, columns), dtype)
    products.linear(y.piece(bm, bn), x, w, bias, bk=bk).run()
    return device.kernels[0]


def test_half_products_run_on_the_tensor_cores_with_a_ring_of_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILERT_SCHEDULES", "none")
    for dtype in (bf16, f16):
        kernel = linear(256, 128, 512, 64, 64, dtype)
        text = body(kernel)
        assert "mma_step(" in text and "ldmatrix4(" in text
        assert "copy_async16(" in text and "copy_wait<" in text
        assert kernel.shared_bytes > 2 * (64 + 64) * 64 * dtype.itemsize


def test_full_precision_products_stay_off_the_tensor_cores() -> None:
    text = body(linear(256, 128, 512, 64, 64, f32))
    assert "mma_step(" not in text
    assert "+=" in text


def test_unaligned_rows_are_not_copied_in_16_bytes() -> None:
    assert "copy_async16(" not in body(linear(64, 64, 100, 16, 64, bf16))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_thin_products_stream_their_weights(rows: int) -> None:
    text = body(linear(rows, 64, 4096, rows, 128, bf16, bn=16))
    # The first ones before the wait for earlier kernels.
    wait = text.index("  wait_for_earlier_grids();")
    assert text.index("load16_early(") < wait < text.index("load16_stream(")
    assert "mma_step(" not in text and "copy_async16(" not in text


def test_thin_products_sum_once_after_the_loop() -> None:
    """Shuffles cost a step each: none of them belongs in the loop over K."""
    device = TargetDevice("sm_90a")
    x, _ = data(device, (1, 512), bf16)
    w, _ = data(device, (2, 64, 512), bf16)
    y, z = Frame(device, (1, 64)), Frame(device, (1, 64))
    products.two_sums(y.piece(1, 8), z.piece(1, 8), x, w, bk=128).run()
    text = body(device.kernels[0])
    # Only a sum that begins at 0 moves out of the loop; `up` begins at 2.
    assert 0 < text.rindex("= ahead0[") < text.index("shuffle_xor(")


def test_pages_are_copied_ahead_through_the_table() -> None:
    device = TargetDevice("sm_90a")
    x, _ = data(device, (16, 32), bf16)
    w, _ = data(device, (9, 16, 32), bf16)
    y = Frame(device, (16, 16), bf16)
    table = ints(device, range(8))
    products.through_a_table(y.piece(16, 16), x, w, table, gathered=False).run()
    text = body(device.kernels[0])
    assert "copy_async16(" in text and "ahead" in text


def test_attention_keeps_its_weights_in_registers() -> None:
    device = TargetDevice("sm_90a")
    q, _ = data(device, (128, 64), bf16)
    y = Frame(device, (128, 64), bf16)
    products.attention(y.piece(64, 64), q, q, q, bk=64).run()
    assert "pack(" in body(device.kernels[0])


def test_contiguous_rows_move_in_16_bytes() -> None:
    device = TargetDevice("sm_90a")
    x, _ = data(device, (64, 256), bf16)
    y = Frame(device, (64, 256), bf16)
    memory.copy_static(y.piece(4, 256), x).run()
    text = body(device.kernels[0])
    assert "load16(" in text and "vec16" in text


def test_text_does_not_depend_on_the_run() -> None:
    """The disk cache is keyed by text: the same kernel must give the same text."""
    texts = []
    for _ in range(2):
        device = TargetDevice("sm_90a")
        reductions.test_reduce_then_broadcast(device, (65, 31))
        products.test_products_of_spans(device, bf16)
        texts.append([k.text for k in device.kernels])
    assert texts[0] == texts[1]

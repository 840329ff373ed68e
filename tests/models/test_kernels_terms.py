"""Activations of two terms: as exact as f32 from the norm to the residual stream."""

from typing import Any

import numpy as np
import pytest

import tilert
from models import kernels
from models.hopper_tiling import HopperTiling
from models.presets import PRESETS
from models.scratch import Scratch
from tests.models.kernel_support import Floats, close, draw, poisoned, put
from tests.models.test_kernels_projection import norm, silu
from tests.tilert.emulator import EmulatedDevice, compiler
from tilert import Array, Device, DType, bf16, f16, f32
from tilert.target_device import TargetDevice

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")
EXACT = 3e-5
"""Allowed where one rounding to bf16 gives 2e-3: two terms have 16 bits, sums are of f32."""

# Tokens, columns and depth of tiles: any, and those of the schedules of sm_90a.
TILES = [(16, 32, 32), (32, 48, 64), (8, 48, 128)]


def sum_of(terms: Array) -> Floats:
    """[T, 2, N] as [T, N]."""
    total: Floats = terms.numpy().astype(np.float64).sum(axis=1)
    return total


def texts(device: Any) -> list[str]:
    """Of the kernels that an emulated device has run."""
    return [launcher.text for launcher in device.launchers.values()]


def near(actual: Floats, expected: Floats) -> None:
    assert np.abs(actual - expected).max() <= EXACT * np.abs(expected).max()


def drawn(
    rng: np.random.Generator, shape: tuple[int, int], dtype: DType, device: Device
) -> tuple[Array, Floats]:
    """f32 values as two terms, and the values."""
    values = rng.standard_normal(shape).astype(np.float32)
    first = values.astype(dtype.numpy)
    rest = (values - first.astype(np.float32)).astype(dtype.numpy)
    return put(np.stack([first, rest], axis=1), device), values.astype(np.float64)


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_rms_norm(device: Device, dtype: DType) -> None:
    rng = np.random.default_rng(0)
    x, values = draw(rng, (5, 130), f32, device, 3)
    gain, gains = draw(rng, (130,), dtype, device)
    for rows in (1, 4):
        y = poisoned((5, 2, 130), dtype, device)
        y = kernels.rms_norm(y.partition(rows, 2, 130), x, gain, eps=1e-6).run()
        near(sum_of(y), norm(values, gains, 1e-6))
        # The first term is what one alone would be.
        np.testing.assert_allclose(y.numpy()[:, 0].astype(float), norm(values, gains, 1e-6), 4e-3)


def check_products(device: Device, dtype: DType, tiles: tuple[int, int, int]) -> None:
    rows, columns, depth = tiles
    rng = np.random.default_rng(1)
    tokens, inputs, outputs = 13, 328, 104
    x, xs = drawn(rng, (tokens, inputs), dtype, device)
    x = x.reshape(2 * tokens, inputs)
    w, ws = draw(rng, (2, outputs, inputs), dtype, device, inputs**-0.5)
    expected = xs @ ws[0].T
    y = poisoned((tokens, outputs), f32, device)
    y = kernels.linear(y.partition(rows, columns), x, w[0], bk=depth, terms=2).run()
    near(y.numpy(), expected)
    y, before = draw(rng, (tokens, outputs), f32, device)
    y = kernels.linear_residual(y.partition(rows, columns), x, w[0], bk=depth, terms=2).run()
    near(y.numpy(), before + expected)
    shares = poisoned((tokens, 2, outputs), f32, device)
    count = -(-inputs // depth) - 1
    piece = shares.partition(rows, 1, columns)
    shares = kernels.linear_shares(piece, x, w[0], bk=depth, count=count, terms=2).run()
    near(sum_of(shares), expected)
    y = poisoned((tokens, 2, outputs), dtype, device)
    y = kernels.gate_up_silu(y.partition(rows, 2, columns), x, w, bk=depth, terms=2).run()
    near(sum_of(y), silu(expected) * (xs @ ws[1].T))


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_products(device: Device, dtype: DType, tiles: tuple[int, int, int]) -> None:
    check_products(device, dtype, tiles)


@needs_compiler
@pytest.mark.parametrize("tiles", TILES[1:], ids=str)
def test_products_under_the_schedules_of_sm_90a(tiles: tuple[int, int, int]) -> None:
    gpu = EmulatedDevice("sm_90a")
    check_products(gpu, bf16, tiles)
    assert all("copy_box(at" in text for text in texts(gpu))


def check_attention(device: Device, dtype: DType, rows: int) -> None:
    """Both terms of the output are together what an output in f32 is."""
    rng = np.random.default_rng(2)
    tokens, heads, dim = 21, 4, 64
    q, _ = draw(rng, (tokens, heads, dim), dtype, device)
    k, _ = draw(rng, (2, 64, 2, dim), dtype, device)
    v, _ = draw(rng, (2, 64, 2, dim), dtype, device)
    ints = ([[0, 1]], [0], [0] * tokens, [0, tokens], [50])
    where = [put(np.array(x, np.int32), device) for x in ints]
    consts = {"scale": dim**-0.5, "pages": 1}
    exact = poisoned((tokens, heads, dim), f32, device)
    kernels.prefill_attention(exact.partition(rows, 1, dim), q, k, v, *where, **consts).run()
    o = poisoned((tokens, 2, heads, dim), dtype, device)
    kernels.prefill_attention(o.partition(rows, 2, 1, dim), q, k, v, *where, **consts).run()
    near(sum_of(o), exact.numpy().astype(np.float64))


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_prefill_attention(device: Device, dtype: DType) -> None:
    check_attention(device, dtype, 64)


@needs_compiler
def test_prefill_attention_under_the_schedule_of_sm_90a() -> None:
    gpu = EmulatedDevice("sm_90a")
    check_attention(gpu, bf16, 64)
    assert all("wgmma_left_n" in text for text in texts(gpu))


def scratch(arch: str, dtype: DType, size: int, decode: bool, preset: str = "qwen3-8b") -> Scratch:
    return Scratch(PRESETS[preset], TargetDevice(arch), dtype, 4096, decode).head(size)


def test_where_activations_are_not_rounded() -> None:
    """Decodes of one sequence, of two where two blocks do not share steps, and prefills of few
    tokens where products have the time."""
    for arch, most in (("sm_90a", 1), ("sm_80", 2)):
        few = scratch(arch, bf16, most, decode=True)
        assert {few.qkv.dtype, few.attended.dtype, few.hidden.dtype} == {f32}
        more = scratch(arch, bf16, most + 1, decode=True)
        assert {more.qkv.dtype, more.attended.dtype, more.hidden.dtype} == {bf16}
        assert few.terms == more.terms == 1
        rounded = scratch(arch, f16, 1, decode=True)
        assert {rounded.qkv.dtype, rounded.attended.dtype, rounded.hidden.dtype} == {f16}
    assert scratch("sm_90a", bf16, 1, decode=True, preset="qwen3-4b").hidden.dtype is bf16
    most = HopperTiling.pair_tokens
    short = scratch("sm_90a", bf16, most, decode=False)
    assert short.terms == 2 and short.qkv.dtype is f32
    for array in (short.normed, short.attended, short.hidden):
        assert array.dtype is bf16 and array.shape[:2] == (most, 2)
    for arch, dtype, size in (("sm_90a", bf16, most + 1), ("sm_90a", f32, 8), ("sm_80", bf16, 8)):
        long = scratch(arch, dtype, size, decode=False)
        assert long.terms == 1 and long.qkv.dtype is dtype
        assert {len(a.shape) for a in (long.normed, long.attended, long.hidden)} == {2}


def test_tiles_of_two_terms_are_no_less_exact_than_f32(device: Device) -> None:
    """What neither term can hold is below 2^-16 of the value."""
    values = np.float32(2.0) ** np.arange(-20, 20, dtype=np.float32) * np.float32(1.2345678)
    x = put(values[None], device)
    gain = put(np.ones(40, np.float32).astype(bf16.numpy), device)
    y = poisoned((1, 2, 40), bf16, device)
    y = kernels.rms_norm(y.partition(1, 2, 40), x, gain, eps=0.0).run()
    scale = 1 / np.sqrt((values.astype(np.float64) ** 2).mean())
    np.testing.assert_allclose(sum_of(y)[0], values * scale, rtol=2.0**-16)
    close(y[:, 0], values[None] * scale, tilert.bf16.itemsize * 2e-3)

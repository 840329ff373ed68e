"""Embedding, RMSNorm and the projections against float64."""

import numpy as np
import pytest

import tilert
from models import kernels
from models.tile_sizes import ProductTiles
from models.tiling import tiling_of
from tests.models.kernel_support import DTYPES, Floats, close, draw, poisoned, put
from tilert import Device, DType

# (tokens, outputs, inputs): one token, few, ragged on every axis, empty.
SHAPES = [(1, 64, 256), (3, 80, 96), (37, 130, 72), (64, 64, 64), (0, 32, 32)]


def norm(x: Floats, gain: Floats, eps: float) -> Floats:
    scaled: Floats = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * gain
    return scaled


def silu(x: Floats) -> Floats:
    activated: Floats = x / (1 + np.exp(-x))
    return activated


def tiles_for(device: Device, shape: tuple[int, int, int], dtype: DType) -> list[ProductTiles]:
    """The device's own tiles, and small ones that leave ragged edges."""
    own = tiling_of(device, dtype).product(max(shape[0], 1), shape[1], shape[2])
    return [own, ProductTiles(16, 32, 32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
def test_embedding(device: Device, dtype: DType, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    table, expected = draw(rng, (50, 40), dtype, device)
    ids = rng.integers(0, 50, tokens).astype(np.int32)
    for rows in (1, 4, max(tokens, 1)):
        x = poisoned((tokens, 40), dtype, device)
        kernels.embedding(x.partition(rows, 40), put(ids, device), table).run()
        np.testing.assert_array_equal(x.numpy().astype(np.float64), expected[ids])


def test_embedding_of_an_id_outside_the_table_is_zero(device: Device) -> None:
    table, expected = draw(np.random.default_rng(0), (8, 16), tilert.f32, device)
    ids = put(np.array([-1, 3, 8], np.int32), device)
    x = poisoned((3, 16), tilert.f32, device)
    kernels.embedding(x.partition(1, 16), ids, table).run()
    close(x, np.stack([np.zeros(16), expected[3], np.zeros(16)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 96), (33, 130), (0, 16)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rms_norm(device: Device, dtype: DType, tokens: int, width: int, scale: float) -> None:
    rng = np.random.default_rng(tokens)
    x, values = draw(rng, (tokens, width), dtype, device, scale)
    gain, gains = draw(rng, (width,), dtype, device)
    for rows in (1, 4):
        y = poisoned((tokens, width), dtype, device)
        kernels.rms_norm(y.partition(rows, width), x, gain, eps=1e-6).run()
        close(y, norm(values, gains, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(device: Device, dtype: DType, shape: tuple[int, int, int]) -> None:
    tokens, outputs, inputs = shape
    rng = np.random.default_rng(1)
    x, xs = draw(rng, (tokens, inputs), dtype, device)
    w, ws = draw(rng, (outputs, inputs), dtype, device)
    for t in tiles_for(device, shape, dtype):
        y = poisoned((tokens, outputs), dtype, device)
        kernels.linear(y.partition(t.rows, t.columns), x, w, bk=t.depth).run()
        close(y, xs @ ws.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_residual(device: Device, dtype: DType, shape: tuple[int, int, int]) -> None:
    tokens, outputs, inputs = shape
    rng = np.random.default_rng(2)
    x, xs = draw(rng, (tokens, inputs), dtype, device)
    w, ws = draw(rng, (outputs, inputs), dtype, device)
    for t in tiles_for(device, shape, dtype):
        y, before = draw(rng, (tokens, outputs), dtype, device)
        kernels.linear_residual(y.partition(t.rows, t.columns), x, w, bk=t.depth).run()
        close(y, before + xs @ ws.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_linear(device: Device, dtype: DType, shape: tuple[int, int, int]) -> None:
    tokens, outputs, inputs = shape
    rng = np.random.default_rng(3)
    x, xs = draw(rng, (tokens, inputs), dtype, device, 3)
    gain, gains = draw(rng, (inputs,), dtype, device)
    w, ws = draw(rng, (outputs, inputs), dtype, device)
    expected = norm(xs, gains, 1e-5) @ ws.T
    for t in tiles_for(device, shape, dtype):
        y = poisoned((tokens, outputs), tilert.f32, device)
        out = y.partition(t.rows, t.columns)
        kernels.norm_linear(out, x, gain, w, eps=1e-5, bk=t.depth).run()
        # The output is f32, but x * gain was rounded to the inputs' type.
        close(y, expected, {"f32": 2e-5, "bf16": 1e-2, "f16": 1e-3}[dtype.name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gate_up_silu(device: Device, dtype: DType, shape: tuple[int, int, int]) -> None:
    tokens, outputs, inputs = shape
    rng = np.random.default_rng(4)
    x, xs = draw(rng, (tokens, inputs), dtype, device)
    gain, gains = draw(rng, (inputs,), dtype, device)
    w, ws = draw(rng, (2, outputs, inputs), dtype, device, inputs**-0.5)
    normed = norm(xs, gains, 1e-6)
    for t in tiles_for(device, shape, dtype):
        y = poisoned((tokens, outputs), dtype, device)
        kernels.gate_up_silu(y.partition(t.rows, t.columns), x, w, bk=t.depth).run()
        close(y, silu(xs @ ws[0].T) * (xs @ ws[1].T))
        y = poisoned((tokens, outputs), dtype, device)
        out = y.partition(t.rows, t.columns)
        kernels.norm_gate_up_silu(out, x, gain, w, eps=1e-6, bk=t.depth).run()
        close(y, silu(normed @ ws[0].T) * (normed @ ws[1].T))


def test_silu_of_extreme_gates(device: Device) -> None:
    """exp overflows for a very negative gate; the product must be 0, not NaN."""
    x = put(np.array([[1.0] + [0.0] * 15], np.float32), device)
    w = np.zeros((2, 16, 16), np.float32)
    w[0, :4, 0] = [-200, -90, 90, 200]
    w[1, :, 0] = 1
    y = poisoned((1, 16), tilert.f32, device)
    kernels.gate_up_silu(y.partition(1, 16), x, put(w, device), bk=16).run()
    close(y[0, :4], np.array([0.0, 0.0, 90.0, 200.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (20, 48, 1000)])
@pytest.mark.parametrize("shares", [1, 2, 5])
def test_linear_in_shares(
    device: Device, dtype: DType, shape: tuple[int, int, int], shares: int
) -> None:
    """Also with more shares than steps: what has no steps contributes zeros."""
    tokens, outputs, inputs = shape
    rng = np.random.default_rng(5)
    x, xs = draw(rng, (tokens, inputs), dtype, device)
    w, ws = draw(rng, (outputs, inputs), dtype, device)
    steps = -(-inputs // 32)
    partial = poisoned((tokens, shares, outputs), tilert.f32, device)
    partial = kernels.linear_shares(
        partial.partition(16, 1, 32), x, w, bk=32, count=-(-steps // shares)
    ).run()
    y = poisoned((tokens, outputs), dtype, device)
    kernels.add_shares(y.partition(1, 64), partial, residual=False).run()
    close(y, xs @ ws.T)
    y, before = draw(rng, (tokens, outputs), dtype, device)
    kernels.add_shares(y.partition(1, 64), partial, residual=True).run()
    close(y, before + xs @ ws.T)

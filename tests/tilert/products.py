"""Kernels with products of tiles, and what they must compute, under the schedules of sm_90a."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert import emulator
from tests.tilert.checks import Frame, data
from tests.tilert.emulator import compiler
from tilert import Const, DType, Dyn, Mut, Ref, bf16, f32
from tilert.language import exp, max, mma, tiles, zeros
from tilert.target_device import TargetDevice

__all__ = [
    "check_epilogue",
    "check_product",
    "check_row_reduction",
    "compiled",
    "gated_bias",
    "hopper",
    "is_pipelined",
    "last_text",
    "less_the_largest",
    "mistaken",
    "needs_compiler",
    "product",
    "two_products",
]

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")


def hopper() -> tilert.Device:
    """The GPU, for tests of what sm_90a alone has; on another one they are skipped."""
    device = tilert.device("cuda:0")
    if device.info()["arch"] != "sm_90a":
        pytest.skip("the schedule is one of sm_90a")
    return device


def last_text(device: Any) -> str:
    """The text of the kernel compiled last."""
    if isinstance(device, TargetDevice):
        return device.kernels[-1].text
    text: str = list(device.launchers.values())[-1].text
    return text


def is_pipelined(device: Any) -> bool:
    return "copy_box(at" in last_text(device)


def mistaken(monkeypatch: pytest.MonkeyPatch, old: str, new: str, kernel: str = "") -> None:
    """From now on kernels, or those of a name, are emulated with `new` for `old` in their text,
    which has to have it."""
    made = emulator.generate

    def changed(*args: Any) -> Any:
        source = made(*args)
        if not source.entry.startswith(kernel):
            return source
        if old not in source.text:
            pytest.fail(f"the text has no {old!r}")
        return replace(source, text=source.text.replace(old, new))

    monkeypatch.setattr(emulator, "generate", changed)


@tilert.kernel
def product(y: Mut[Dyn], a: Ref[Dyn], b: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=bk):
        acc = mma(a[m, k], b[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def gated_bias(y: Mut, a: Ref, b: Ref, bias: Ref, scale: Ref):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=64):
        acc = mma(a[m, k], b[n, k].T, acc)
    v = acc * scale[m][:, None] + bias[n][None, :].to(f32)
    y.store(y.load().to(f32) + v / (exp(-v) + 1.0))


@tilert.kernel
def less_the_largest(y: Mut, a: Ref, b: Ref):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=64):
        acc = mma(a[m, k], b[n, k].T, acc)
    y.store(acc - max(acc, axis=1)[:, None])


@tilert.kernel
def two_products(y: Mut, a: Ref, b: Ref, c: Ref):
    m, n = y.index
    acc = zeros(y.shape, f32)
    other = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=64):
        acc = mma(a[m, k], b[n, k].T, acc)
        acc = mma(a[m, k], c[n, k].T, acc)
        other = mma(c[m, k], b[n, k].T, other)
    y.store(acc - other)


def compiled(shape: tuple[int, int, int], tile: tuple[int, int, int]) -> TargetDevice:
    m, n, k = shape
    device = TargetDevice("sm_90a")
    y = tilert.empty((m, n), bf16, device)
    a, b = (tilert.empty((rows, k), bf16, device) for rows in (m, n))
    product(y.partition(*tile[:2]), a, b, bk=tile[2])
    return device


def check_product(
    device: tilert.Device,
    sizes: tuple[int, int, int],
    tile: tuple[int, int, int],
    dtype: DType,
) -> None:
    (m, n, k), (bm, bn, bk) = sizes, tile
    a, a64 = data(device, (m, k), dtype)
    b, b64 = data(device, (n, k), dtype, seed=1)
    y = Frame(device, (m, n), dtype)
    product(y.piece(bm, bn), a, b, bk=bk).sync()
    y.check(a64 @ b64.T, steps=k, scale=np.abs(a64) @ np.abs(b64.T))


def check_epilogue(
    device: tilert.Device,
    sizes: tuple[int, int, int],
    tile: tuple[int, int],
    dtype: DType = bf16,
) -> None:
    """What follows the products, with rows and columns that are broadcast over the sums."""
    m, n, k = sizes
    a, a64 = data(device, (m, k), bf16)
    b, b64 = data(device, (n, k), bf16, seed=1)
    bias, bias64 = data(device, (n,), bf16)
    scale, scale64 = data(device, (m,), f32)
    start = np.random.default_rng(3).uniform(-2, 2, (m, n)).astype(dtype.numpy)
    y = Frame(device, (m, n), dtype, values=start)
    gated_bias(y.piece(*tile), a, b, bias, scale).sync()
    v = (a64 @ b64.T) * scale64[:, None] + bias64
    size = (np.abs(a64) @ np.abs(b64.T)) * np.abs(scale64)[:, None] + 4
    y.check(start.astype(np.float64) + v / (np.exp(-v) + 1), steps=2 * k, scale=size)


def check_row_reduction(device: tilert.Device, tile: tuple[int, int]) -> None:
    """The sums less the largest of their row."""
    m, n, k = 2 * tile[0], tile[1], 136
    a, a64 = data(device, (m, k), bf16)
    b, b64 = data(device, (n, k), bf16, seed=1)
    y = Frame(device, (m, n), f32)
    less_the_largest(y.piece(*tile), a, b).sync()
    want = a64 @ b64.T
    y.check(want - want.max(1, keepdims=True), steps=2 * k, scale=np.abs(a64) @ np.abs(b64.T) + 90)

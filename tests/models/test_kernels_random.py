"""The generator of made-up weights and of sampling noise."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

import tilert
from models.kernels import fill_normal
from models.kernels.random import exponential, random_bits, stream_key, uniform
from tests.models.kernel_support import DTYPES, poisoned, put
from tilert import Device, DType, Mut, Ref, f32, u32


@tilert.kernel
def from_bits(u: Mut, e: Mut, bits: Ref):  # type: ignore[type-arg, no-untyped-def]
    """Uniform and exponential deviates of given bits."""
    (i,) = u.index
    u.store(uniform(bits[i]))
    e.store(exponential(bits[i]))


@tilert.kernel
def bits_of(y: Mut, key: Ref):  # type: ignore[type-arg, no-untyped-def]
    """The bits of a stream."""
    (i,) = y.index
    y.store(random_bits(stream_key(key[0], key[1], key[2]), i.offsets.to(u32)))


def stream(device: Device, key: tuple[int, int, int], count: int) -> NDArray[np.uint32]:
    y = tilert.zeros((count,), u32, device)
    bits_of(y.partition(256), put(np.array(key, np.uint32), device)).run()
    return y.numpy()


def reference(key: tuple[int, int, int], index: int) -> int:
    """The generator in Python integers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    low, high, number = key
    first = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ number)
    second = mix(mix(mix(low ^ 0x3C6EF372) ^ high) ^ number)
    return mix(mix(index ^ first) + second & 0xFFFFFFFF)


@pytest.mark.parametrize("key", [(0, 0, 0), (1, 2, 3), (0xFFFFFFFF, 0x80000000, 77)])
def test_bits_are_those_of_the_definition(device: Device, key: tuple[int, int, int]) -> None:
    bits = stream(device, key, 1000)
    assert bits[[0, 1, 255, 256, 999]].tolist() == [
        reference(key, i) for i in (0, 1, 255, 256, 999)
    ]


def test_bits_are_balanced_and_independent(device: Device) -> None:
    """Each bit, neighbours, and streams of related keys: half of all bits differ."""
    count = 1 << 14
    base = stream(device, (7, 0, 0), count)
    others = [stream(device, key, count) for key in ((8, 0, 0), (7, 1, 0), (7, 0, 1))]
    others += [np.roll(base, 1), np.zeros(count, np.uint32)]
    limit = 5 * 0.5 / math.sqrt(count)
    for other in others:
        for bit in range(32):
            share = float(((base ^ other) >> np.uint32(bit) & np.uint32(1)).mean())
            assert abs(share - 0.5) < limit


def test_uniform_and_exponential_stay_inside_their_range(device: Device) -> None:
    bits = np.array([0, 1, 2**22, 2**24, 2**31, 2**32 - 2**10, 2**32 - 1], np.uint32)
    u, e = (poisoned((7,), f32, device) for _ in range(2))
    from_bits(u.partition(8), e.partition(8), put(bits, device)).run()
    expected = (bits.astype(np.float64) + 0.5) / 2**32
    assert ((u.numpy() > 0) & (u.numpy() < 1)).all()
    np.testing.assert_allclose(u.numpy(), expected, rtol=1e-6)
    assert np.isfinite(e.numpy()).all()
    # The largest bits round to the last f32 below 1.
    np.testing.assert_allclose(e.numpy()[:5], -np.log1p(-expected[:5]), rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_deviates(device: Device, dtype: DType) -> None:
    """Moments, and the share beyond each deviation, as of the normal distribution."""
    count = 100_003
    y = poisoned((count,), dtype, device)
    key = put(np.array([1, 0, 5], np.uint32), device)
    fill_normal(y.partition(1024), key, std=0.5).run()
    x = y.numpy().astype(np.float64) / 0.5
    error = 5 / math.sqrt(count)
    assert abs(x.mean()) < error
    assert abs((x**2).mean() - 1) < error * math.sqrt(2)
    assert abs((x**3).mean()) < error * math.sqrt(15)
    assert abs((x**4).mean() - 3) < error * math.sqrt(96)
    for deviation in (1, 2, 3):
        share = math.erfc(deviation / math.sqrt(2))
        assert abs(float((np.abs(x) > deviation).mean()) - share) < error * math.sqrt(share) + 2e-3
    assert abs(float((x[:-1] * x[1:]).mean())) < error


def test_normal_deviates_depend_on_key_and_index_alone(device: Device) -> None:
    key = put(np.array([1, 2, 3], np.uint32), device)
    short, long = (poisoned((n,), f32, device) for n in (100, 1000))
    fill_normal(short.partition(64), key, std=1.0).run()
    fill_normal(long.partition(256), key, std=1.0).run()
    np.testing.assert_allclose(short.numpy(), long.numpy()[:100], rtol=1e-6)
    other = poisoned((100,), f32, device)
    fill_normal(other.partition(64), put(np.array([1, 2, 4], np.uint32), device), std=1.0).run()
    assert np.abs(other.numpy() - short.numpy()).min() > 0

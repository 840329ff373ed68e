"""Helpers that generated cpu code calls: conversions, functions NumPy lacks, random numbers.

A scalar is a Python int or bool or a NumPy float, and so is what a helper makes of scalars.
"""

import math
from typing import Any

import numpy as np

from tilert.dtypes import dtype_of

__all__ = ["erf", "fma", "normal", "philox", "philox_block", "to_integer", "to_narrow"]

Tile = Any
_F = np.float32


def to_narrow(x: Tile, dtype: Any) -> Tile:
    """To an 8-bit float: what is beyond the largest becomes the largest, NaN stays NaN."""
    largest = dtype_of(dtype).largest
    return np.clip(np.asarray(x, _F), -largest, largest).astype(dtype)[()]


def to_integer(x: Tile, dtype: Any) -> Tile:
    """A float cut toward 0 to an integer type: the nearest that the type has, 0 for NaN."""
    info = np.iinfo(dtype)
    wide = np.asarray(x, _F)
    # The ends as floats: the lower is a power of two or 0, the upper is first too large.
    low, high = float(info.min), float(info.max) + 1.0
    if wide.size and not (wide.min() >= low and wide.max() < high):
        out = np.where((wide > low) & (wide < high), wide, 0).astype(dtype)
        out[wide >= high] = info.max
        out[wide <= low] = info.min
    else:
        out = wide.astype(dtype)
    return out if out.shape else int(out)


def erf(x: Tile) -> Tile:
    """The error function in f32."""
    wide = np.asarray(x, np.float64)
    return np.fromiter(map(math.erf, wide.ravel()), _F, wide.size).reshape(wide.shape)[()]


def fma(a: Tile, b: Tile, c: Tile) -> Tile:
    """a * b + c in f32, rounded once.

    The product is exact in float64. Its sum with c is rounded to odd there: of the two neighbours
    of an inexact sum the one whose last bit is 1, so that rounding to f32 does not round twice.
    """
    product = np.multiply(a, b, dtype=np.float64)
    third = np.asarray(c, np.float64)
    total = np.asarray(product + third)
    part = total - product
    error = (product - (total - part)) + (third - part)
    bits = total.view(np.int64)
    even = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    away = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(even, bits + away, bits).view(np.float64).astype(_F)[()]


def philox_block(key: tuple[Tile, ...], counter: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """Philox 4x32-10 (Salmon et al., 2011): four u32 words of a key of two and a counter of four.

    Args:
        key, counter: words below 2^32, as arrays that broadcast or as ints.
    """
    k0, k1 = (np.asarray(k).astype(np.uint64) for k in key)
    a, b, c, d = (np.asarray(x).astype(np.uint64) for x in counter)
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for turn in range(10):
        if turn:
            k0 = k0 + np.uint64(0x9E3779B9) & low
            k1 = k1 + np.uint64(0xBB67AE85) & low
        one, two = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = two >> half ^ b ^ k0, two & low, one >> half ^ d ^ k1, one & low
    return tuple(np.asarray(x).astype(np.uint32) for x in np.broadcast_arrays(a, b, c, d))


def philox(k0: Tile, k1: Tile, c0: Tile, c1: Tile) -> tuple[Tile, ...]:
    """The four words of a key and of a counter whose high half is 0."""
    return philox_block((k0, k1), (c0, c1, 0, 0))


# Taylor coefficients: of atanh(s) / s - 1 over s^2, of sin(t) / t - 1 and of cos(t) - 1 over t^2.
_LOG = tuple(_F(1 / n) for n in (9, 7, 5, 3))
_SIN = tuple(_F(x) for x in (1 / 362880, -1 / 5040, 1 / 120, -1 / 6))
_COS = tuple(_F(x) for x in (1 / 40320, -1 / 720, 1 / 24, -1 / 2))
# The high part has few bits: times an exponent it is exact.
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(math.log(2) - 0.693359375)


def _series(coefficients: tuple[Any, ...], x: Tile) -> Tile:
    """(((c0 x + c1) x + c2) x + c3) x"""
    total = coefficients[0] * x
    for c in coefficients[1:]:
        total = (total + c) * x
    return total


def normal(k0: Tile, k1: Tile, c0: Tile, c1: Tile) -> Tile:
    """A normal deviate for each counter, f32, by the method of Box and Muller (1958).

    Only operations that IEEE 754 rounds in one way, in this order, are used, so that every backend
    gives the same bits.
    """
    first, second, _, _ = philox(k0, k1, c0, c1)
    # In (0, 1]; then its exponent, and its mantissa in [sqrt(1/2), sqrt(2)).
    u = np.asarray(np.maximum(first, 1).astype(_F) * _F(2.0**-32))
    bits = u.view(np.int32)
    power = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    m = (bits - (power << np.int32(23))).view(_F)
    s = (m - _F(1)) / (m + _F(1))
    twice = s + s
    power = power.astype(_F)
    log = power * _LN2_HIGH + (power * _LN2_LOW + (twice + twice * _series(_LOG, s * s)))
    radius = np.sqrt(_F(0) - (log + log))
    # A quarter turn is 2^22 of the 24 bits; the rest is at most an eighth of a turn.
    turn = (second >> np.uint32(8)).astype(np.int32)
    quarter = (turn + np.int32(1 << 21)) >> np.int32(22)
    t = (turn - (quarter << np.int32(22))).astype(_F) * _F(math.tau / 2**24)
    sine = t + t * _series(_SIN, t * t)
    cosine = _F(1) + _series(_COS, t * t)
    value = np.where(quarter & 1, sine, cosine)
    # Quarters 1 and 2 turn the sign: -sin, -cos.
    return radius * np.where((quarter + 1) & 2, -value, value)

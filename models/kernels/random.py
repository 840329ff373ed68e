"""Counter-based random numbers: a hash of a 64-bit seed, a stream and an index, with no state."""

# mypy: disable-error-code="type-arg"

from typing import Any

import tilert
from tilert import Const, Dyn, Mut, Ref, f32, u32
from tilert.language import cos, log, minimum, sqrt, where

__all__ = ["exponential", "fill_normal", "random_bits", "stream_key", "uniform"]

TWO_PI = 6.283185307179586
BELOW_ONE = 1.0 - 2.0**-24
"""The largest f32 below 1."""


@tilert.inline
def mix(x: Any) -> Any:
    """A bijection of u32 that flips each output bit with probability 1/2 for each input bit.

    lowbias32 of C. Wellons, "Prospecting for Hash Functions" (2018).
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@tilert.inline
def stream_key(low: Any, high: Any, stream: Any) -> Any:
    """Two u32 scalars that stand for a seed (its low and high word) and a stream number."""
    first = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ stream)
    second = mix(mix(mix(low ^ 0x3C6EF372) ^ high) ^ stream)
    return first, second


@tilert.inline
def random_bits(key: Any, index: Any) -> Any:
    """u32 random bits for each u32 index of a stream."""
    return mix(mix(index ^ key[0]) + key[1])


@tilert.inline
def uniform(bits: Any) -> Any:
    """f32 in (0, 1), both ends excluded, from u32 bits; fine-grained near 0."""
    return minimum(bits.to(f32) * 2.0**-32 + 2.0**-33, BELOW_ONE)


@tilert.inline
def exponential(bits: Any) -> Any:
    """f32 > 0 of the exponential distribution with mean 1, from u32 bits.

    -log(1 - u), by its series where 1 - u would lose the digits of a small u: the smallest of many
    draws decides a sample.
    """
    u = uniform(bits)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return where(u < 2.0**-8, series, -log(1.0 - u))


@tilert.kernel
def fill_normal(y: Mut[Dyn], key: Ref, std: Const[float]) -> None:
    """y[i] = a normal deviate with mean 0 that depends on key and i only (Box and Muller 1958).

    y: any float dtype, one axis shorter than 2^31. key: u32[3]: seed low, seed high, stream.
    """
    i = y.index[0].offsets.to(u32) * 2
    k = stream_key(key[0], key[1], key[2])
    radius = sqrt(2.0 * exponential(random_bits(k, i)))
    angle = TWO_PI * uniform(random_bits(k, i + 1))
    y.store(radius * cos(angle) * std)

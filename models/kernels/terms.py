"""Activations of two terms: what rounding to a narrow dtype leaves is the second one.

An array [T, 2, N] of bf16 stands for f32 values [T, N] of 16 bits of mantissa. To a product its
terms are rows, [2 T, N], whose sums it adds in pairs: weights are read once, and tiles have rows
to spare where there are few tokens.
"""

from typing import Any

import tilert
from tilert import f32
from tilert.language import iota, span, sum, where, zeros

__all__ = ["both", "empty_sums", "joined", "rows_of"]


@tilert.inline
def both(v: Any, dtype: Any) -> Any:
    """f32 values v [M, N] as two terms [M, 2, N] of a dtype, not yet rounded to it."""
    rest = v - v.to(dtype).to(f32)
    return where((iota(2) == 0)[None, :, None], v[:, None, :], rest[:, None, :])


@tilert.inline
def rows_of(m: Any, size: Any, terms: Any) -> Any:
    """Where the terms of block m of `size` tokens are."""
    return m if terms == 1 else span(m.start * terms, size * terms)


@tilert.inline
def empty_sums(size: Any, columns: Any, terms: Any) -> Any:
    """Zero sums of the products of the terms of `size` tokens."""
    return zeros((size * terms, columns), f32)


@tilert.inline
def joined(sums: Any, terms: Any) -> Any:
    """The sums of products of terms, [M * terms, N], as those of tokens, [M, N]."""
    if terms == 1:
        return sums
    return sum(sums.reshape(sums.shape[0] // terms, terms, sums.shape[1]), axis=1)

"""Shapes and strides: what views of an array need to know."""

import math
import operator
from itertools import pairwise

import numpy as np

from tilert.errors import DeviceError
from tilert.limits import MAX_AXES, MAX_BYTES

__all__ = [
    "Shape",
    "flatten",
    "full_shape",
    "new_shape",
    "point",
    "reshape_strides",
    "row_major",
]

Shape = tuple[int, ...]


def flatten(shape: tuple[int | tuple[int, ...], ...]) -> Shape:
    """A shape given as several ints or as one tuple."""
    flat = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    return tuple(operator.index(n) for n in flat)  # type: ignore[arg-type]


def new_shape(shape: int | Shape, itemsize: int, device_name: str) -> tuple[Shape, int]:
    """The shape of a new array, and its bytes.

    Raises:
        DeviceError: if no machine has as many.
        ValueError: if an extent is negative, or there are more than 32 axes.
    """
    extents = flatten((shape,))
    if any(n < 0 for n in extents):
        raise ValueError(f"negative extent in shape {list(extents)}")
    if len(extents) > MAX_AXES:
        raise ValueError(f"an array has at most {MAX_AXES} axes, got {len(extents)}")
    # With empty axes as 1: strides are products of extents too.
    if math.prod(max(n, 1) for n in extents) * itemsize > MAX_BYTES:
        raise DeviceError(
            f"{device_name} is out of memory: an array of shape {list(extents)} has more bytes than"
            " any machine"
        )
    return extents, math.prod(extents) * itemsize


def row_major(shape: Shape) -> Shape:
    """Strides of an array without gaps, the last axis fastest."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def point(index: object, n: int, axis: int) -> int:
    """An index of an axis with `n` elements, from 0.

    Raises:
        IndexError: if there is no such element.
    """
    if isinstance(index, bool | np.bool_):
        raise IndexError("bool indices are not supported; use ints and slices")
    try:
        at = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        raise IndexError(
            f"index of axis {axis} must be an int or a slice, got {type(index).__name__}"
        ) from None
    if not -n <= at < n:
        raise IndexError(f"index {at} is out of range for axis {axis} with {n} elements")
    return at + n if at < 0 else at


def full_shape(shape: Shape, old: Shape) -> Shape:
    """The shape with -1 replaced, for as many elements as `old` has.

    Raises:
        ValueError: if they do not fit.
    """
    size = math.prod(old)
    known = math.prod(n for n in shape if n != -1)
    if shape.count(-1) == 1 and known and size % known == 0:
        shape = tuple(size // known if n == -1 else n for n in shape)
    if min(shape, default=0) < 0 or math.prod(shape) != size:
        raise ValueError(f"cannot reshape {list(old)} ({size} elements) to {list(shape)}")
    return shape


def reshape_strides(extents: Shape, steps: Shape, shape: Shape) -> Shape | None:
    """Strides of a reshaped view, or None: both shapes are cut into the smallest groups of axes of
    equal size, and a group of old axes can be regrouped where it has one common step."""
    old = [(n, s) for n, s in zip(extents, steps, strict=True) if n != 1]
    strides: list[int] = []
    at = 0
    axis = 0
    while axis < len(shape):
        group = [shape[axis]]
        axis += 1
        if group == [1]:
            strides.append(0)
            continue
        taken = [old[at]]
        at += 1
        while math.prod(group) != math.prod(n for n, _ in taken):
            if math.prod(group) < math.prod(n for n, _ in taken):
                group.append(shape[axis])
                axis += 1
            else:
                taken.append(old[at])
                at += 1
        for (_, outer), (n, inner) in pairwise(taken):
            if outer != n * inner:
                return None
        strides += [step * taken[-1][1] for step in row_major(tuple(group))]
    return tuple(strides)

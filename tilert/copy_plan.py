"""How to copy between two strided views with pitched row copies."""

import itertools
from dataclasses import dataclass

__all__ = ["CopyPlan", "copy_plan"]


@dataclass(frozen=True)
class CopyPlan:
    """Equal copies of `height` rows of `width` bytes, one for each pair of byte offsets.

    Attributes:
        starts: (target, source) offsets of the copies.
        pitches: (target, source) bytes from one row to the next; unused when height is 1.
    """

    starts: tuple[tuple[int, int], ...]
    width: int
    height: int
    pitches: tuple[int, int]


def copy_plan(
    shape: tuple[int, ...],
    target: tuple[int, ...],
    source: tuple[int, ...],
    itemsize: int,
    max_pitch: int,
) -> CopyPlan:
    """The fewest row copies that cover a view.

    Args:
        shape: of both views; no axis is empty.
        target, source: their strides in elements.
        max_pitch: largest pitch the device copies rows with, in bytes.
    """
    axes = _merged(shape, target, source)
    width = itemsize
    if axes and axes[-1][1:] == (1, 1):
        width *= axes.pop()[0]
    height, pitches = 1, (0, 0)
    if axes:
        n, a, b = axes[-1]
        pitch = (a * itemsize, b * itemsize)
        if min(pitch) >= width and max(pitch) <= max_pitch:
            height, pitches = n, pitch
            axes.pop()
    starts = tuple(
        (
            sum(i * a for i, (_, a, _) in zip(index, axes, strict=True)) * itemsize,
            sum(i * b for i, (_, _, b) in zip(index, axes, strict=True)) * itemsize,
        )
        for index in itertools.product(*(range(n) for n, _, _ in axes))
    )
    return CopyPlan(starts, width, height, pitches)


def _merged(
    shape: tuple[int, ...], target: tuple[int, ...], source: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Axes as (extent, target stride, source stride), joined where one continues the next."""
    axes: list[tuple[int, int, int]] = []
    for n, a, b in zip(shape, target, source, strict=True):
        if n == 1:
            continue
        if axes:
            outer, outer_a, outer_b = axes[-1]
            if (outer_a, outer_b) == (n * a, n * b):
                axes[-1] = (outer * n, a, b)
                continue
        axes.append((n, a, b))
    return axes

"""Whole-number points of a box on a plane: what decides, exactly, whether addresses meet.

A strided view is the set of sums of stride times index over a box of indices. Two views meet, or a
view meets itself, where such sums agree, which is one equation in bounded whole numbers. Strides of
views nest, and then the search below tries one or two values a variable whatever the extents are.
"""

import math
from collections.abc import Sequence

__all__ = ["TooHardError", "collision", "solve"]

Term = tuple[int, int]
"""A coefficient above 0 and the largest value of its variable; the smallest is 0."""

# Values tried. Only coefficients that neither nest nor share factors come near.
_MAX_WORK = 2_000
# Sums of one part of the terms that are tried against the rest of them.
_FEW = 4


class TooHardError(Exception):
    """The search was given up."""


def solve(terms: Sequence[Term], target: int) -> list[int] | None:
    """Values of the variables for which coefficients times values add up to `target`, or None.

    Raises:
        TooHardError: if they are not found within the bound on work.
    """
    merged: dict[int, int] = {}
    for c, most in terms:
        merged[c] = merged.get(c, 0) + most
    order = sorted(((c, n) for c, n in merged.items() if n), reverse=True)
    found = _Search().find(order, target)
    if found is None:
        return None
    sums = dict(zip([c for c, _ in order], found, strict=True))
    values: list[int] = []
    for c, most in terms:
        values.append(min(sums.get(c, 0), most))
        sums[c] = sums.get(c, 0) - values[-1]
    return values


class _Search:
    """A search with a bound on its work."""

    def __init__(self) -> None:
        self._work = 0

    def find(self, terms: list[Term], target: int) -> list[int] | None:
        """Values for terms of different coefficients, the largest first."""
        if not terms:
            return [] if target == 0 else None
        reach = [0]
        for c, most in reversed(terms):
            reach.append(reach[-1] + c * most)
        reach.reverse()
        if not 0 <= target <= reach[0]:
            return None
        divisor = math.gcd(*[c for c, _ in terms])
        if target % divisor:
            return None
        if len(terms) == 1:
            return [target // divisor]
        if divisor > 1:
            terms = [(c // divisor, most) for c, most in terms]
            return self.find(terms, target // divisor)
        at, step = _split(terms, reach)
        if reach[at] // step < _FEW:
            return self._apart(terms, at, step, reach[at], target)
        return self._one_by_one(terms, reach[1], target)

    def _apart(
        self, terms: list[Term], at: int, step: int, reach: int, target: int
    ) -> list[int] | None:
        """The first terms give a multiple of `step`; those from `at` on at most `reach`."""
        for number in range(-((reach - target) // step), target // step + 1):
            self._count()
            front = self.find(terms[:at], number * step)
            if front is not None:
                back = self.find(terms[at:], target - number * step)
                if back is not None:
                    return front + back
        return None

    def _one_by_one(self, terms: list[Term], reach: int, target: int) -> list[int] | None:
        """Every value of the first variable that leaves what the others can add up to."""
        c, most = terms[0]
        behind = math.gcd(*[other for other, _ in terms[1:]])
        low, high = max(0, -((reach - target) // c)), min(most, target // c)
        # c and `behind` share no factor: one value in `behind` leaves a multiple of it.
        low += (target * pow(c, -1, behind) - low) % behind
        for value in range(low, high + 1, behind):
            self._count()
            rest = self.find(terms[1:], target - c * value)
            if rest is not None:
                return [value, *rest]
        return None

    def _count(self) -> None:
        self._work += 1
        if self._work > _MAX_WORK:
            raise TooHardError


def _split(terms: list[Term], reach: list[int]) -> tuple[int, int]:
    """Where the terms part best, and the common divisor of those before: the fewest of its
    multiples lie within reach of those behind."""
    best, step, divisor = 1, terms[0][0], 0
    for at in range(1, len(terms)):
        divisor = math.gcd(divisor, terms[at - 1][0])
        if reach[at] // divisor < reach[best] // step:
            best, step = at, divisor
    return best, step


def collision(
    strides: Sequence[int], extents: Sequence[int], width: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Two different indices whose places are less than `width` apart, or None.

    Args:
        strides: what a step along each axis adds to the place; any sign.
        extents: of the box of indices, each at least 1.

    Raises:
        TooHardError: as `solve`.
    """
    axes = [axis for axis, n in enumerate(extents) if n > 1]
    reach = width
    for stride, n in sorted((abs(strides[axis]), extents[axis]) for axis in axes):
        if stride < reach:
            break
        reach += stride * (n - 1)
    else:
        return None
    # The difference of the two has a first axis on which it is not 0, and is positive there.
    for number, axis in enumerate(axes):
        difference = _difference(strides, extents, axes[number:], width)
        if difference is not None:
            ends = [difference.get(axis, 0) for axis in range(len(extents))]
            return tuple([max(-d, 0) for d in ends]), tuple([max(d, 0) for d in ends])
    return None


def _difference(
    strides: Sequence[int], extents: Sequence[int], axes: list[int], width: int
) -> dict[int, int] | None:
    """A difference of two indices, above 0 on the first of `axes` and anything on the others."""
    first = axes[0]
    # A variable is the difference, counted from the end where stride times difference is least.
    target = width - 1
    terms: list[Term] = [(1, 2 * (width - 1))]
    shifts: list[tuple[int, int, int]] = []
    for axis in axes:
        stride, most = strides[axis], extents[axis] - 1
        least, span = (1, most - 1) if axis == first else (-most, 2 * most)
        if stride == 0:
            if axis == first:
                return {axis: 1}
            continue
        start = least if stride > 0 else least + span
        target -= stride * start
        terms.append((abs(stride), span))
        shifts.append((axis, start, 1 if stride > 0 else -1))
    values = solve(terms, target)
    if values is None:
        return None
    return {
        axis: start + sign * value
        for (axis, start, sign), value in zip(shifts, values[1:], strict=True)
    }

"""The row copies that move one strided view to another."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilert.copy_plan import copy_plan

views = st.integers(1, 3).flatmap(
    lambda rank: st.tuples(
        st.permutations(range(rank)),
        st.tuples(*[st.integers(1, 4)] * rank),
        st.tuples(*[st.integers(1, 3)] * rank),
    )
)


def view(shape: tuple[int, ...], axes: list[int], steps: tuple[int, ...]) -> np.ndarray:
    """A view of `shape`: axes of a fresh array in another order, with gaps."""
    room = [shape[a] * steps[a] for a in axes]
    base = np.zeros(room, np.int16)
    back = base.transpose(np.argsort(axes))
    return back[tuple(slice(0, n * s, s) for n, s in zip(shape, steps, strict=True))]


@given(views, st.sampled_from([4, 8, 2**31]))
def test_plan_copies_every_element(
    drawn: tuple[list[int], tuple[int, ...], tuple[int, ...]], max_pitch: int
) -> None:
    axes, shape, steps = drawn
    target = view(shape, list(range(len(shape))), steps)
    source = view(shape, axes, tuple(reversed(steps)))
    source[...] = np.arange(1, source.size + 1).reshape(shape)
    strides = [tuple(s // 2 for s in v.strides) for v in (target, source)]
    plan = copy_plan(shape, strides[0], strides[1], 2, max_pitch)
    raw_to = _bytes(target)
    raw_of = _bytes(source)
    for a, b in plan.starts:
        for row in range(plan.height):
            start, origin = a + row * plan.pitches[0], b + row * plan.pitches[1]
            raw_to[start : start + plan.width] = raw_of[origin : origin + plan.width]
    np.testing.assert_array_equal(target, source)
    if plan.height > 1:
        assert plan.width <= min(plan.pitches) <= max(plan.pitches) <= max_pitch


def _bytes(view: np.ndarray) -> np.ndarray:
    base = view
    while base.base is not None:
        base = base.base
    return base.reshape(-1).view(np.uint8)


def test_plans_are_short() -> None:
    whole = copy_plan((4, 8, 2), (16, 2, 1), (16, 2, 1), 4, 2**31)
    assert (whole.starts, whole.width, whole.height) == (((0, 0),), 256, 1)
    columns = copy_plan((4, 8), (8, 1), (32, 1), 4, 2**31)
    assert (columns.width, columns.height, columns.pitches) == (32, 4, (32, 128))
    transposed = copy_plan((4, 8), (8, 1), (1, 4), 4, 2**31)
    assert (len(transposed.starts), transposed.width, transposed.height) == (4, 4, 8)
    repeated = copy_plan((3, 4), (4, 1), (0, 1), 4, 2**31)
    assert repeated.starts == ((0, 0), (16, 0), (32, 0))

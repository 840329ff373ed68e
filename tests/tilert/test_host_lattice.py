"""Rule O3's arithmetic: exact, and as quick for huge arrays as for small ones."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilert import lattice
from tilert.lattice import collision, solve
from tilert.ownership import Region, overlap

terms = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 4)), max_size=5)


@settings(max_examples=400)
@given(terms, st.integers(-5, 120))
def test_solve_finds_a_solution_where_there_is_one(terms: list, target: int) -> None:
    sums = {
        sum(c * v for (c, _), v in zip(terms, values, strict=True))
        for values in itertools.product(*(range(most + 1) for _, most in terms))
    }
    found = solve(terms, target)
    assert (found is not None) == (target in sums)
    if found is not None:
        assert all(0 <= v <= most for v, (_, most) in zip(found, terms, strict=True))
        assert sum(c * v for (c, _), v in zip(terms, found, strict=True)) == target


axes = st.lists(st.tuples(st.integers(-12, 12), st.integers(1, 5)), max_size=4)


@settings(max_examples=400)
@given(axes, st.sampled_from([1, 2, 4]))
def test_collision_names_two_indices(axes: list, width: int) -> None:
    strides, extents = [s for s, _ in axes], [n for _, n in axes]

    def place(index: tuple[int, ...]) -> int:
        return sum(i * s for i, s in zip(index, strides, strict=True))

    indices = list(itertools.product(*map(range, extents)))
    meet = any(abs(place(p) - place(q)) < width for p, q in itertools.combinations(indices, 2))
    pair = collision(strides, extents, width)
    assert (pair is not None) == meet
    if pair is not None:
        one, two = pair
        assert one != two and one in indices and two in indices
        assert abs(place(one) - place(two)) < width


def view(shape: list[int], cuts: list[slice], order: list[int], size: int) -> tuple[Region, list]:
    strides = [size]
    for n in shape[:0:-1]:
        strides.insert(0, strides[0] * n)
    ranges = [range(*cut.indices(n)) for cut, n in zip(cuts, shape, strict=True)]
    start = sum(r.start * s for r, s in zip(ranges, strides, strict=True) if len(r))
    steps = [s * r.step for s, r in zip(strides, ranges, strict=True)]
    extents = tuple(len(ranges[axis]) for axis in order)
    return Region(start, extents, tuple(steps[axis] for axis in order), size), ranges


@st.composite
def two_views(draw: st.DrawFn) -> tuple:
    """Two views of one large array, cut with steps and permuted."""
    shape = draw(st.lists(st.sampled_from([1, 3, 64, 1000, 50_000]), min_size=1, max_size=4))
    views = []
    for _ in range(2):
        cuts = []
        for n in shape:
            low = draw(st.integers(0, n - 1))
            high = draw(st.integers(low + 1, n))
            cuts.append(slice(low, high, draw(st.integers(1, 7))))
        order = draw(st.permutations(range(len(shape))))
        views.append(view(shape, cuts, order, 4))
    return views[0], views[1]


@settings(max_examples=300)
@given(two_views())
def test_overlap_of_huge_views_is_exact(views: tuple) -> None:
    (a, one), (b, two) = views

    def meet(p: range, q: range) -> bool:
        # Two arithmetic progressions: at most one common residue to look for.
        if q.step < p.step:
            p, q = q, p
        return any(i in q for i in itertools.islice(p, min(len(p), 2 * q.step + len(p))))

    assert overlap(a, b) == all(meet(p, q) for p, q in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("first", "second", "overlapping"),
    [
        (slice(None, None, 2), slice(1, None, 2), False),
        (slice(0, 512), slice(512, None), False),
        (slice(0, 513), slice(512, None), True),
        (slice(None, None, 6), slice(3, None, 9), True),
        (slice(None, None, 6), slice(1, None, 9), False),
    ],
)
def test_columns_of_a_huge_array(
    first: slice, second: slice, overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No element is looked at: a handful of steps for 10^12 of them.
    monkeypatch.setattr(lattice, "_MAX_WORK", 60)
    shape = [10**9, 1024]
    a, _ = view(shape, [slice(None), first], [0, 1], 4)
    b, _ = view(shape, [slice(None), second], [1, 0], 4)
    assert overlap(a, b) is overlapping


def test_what_is_too_much_work_is_taken_to_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lattice, "_MAX_WORK", 3)
    a = Region(0, (50, 50, 50), (4 * 101, 4 * 103, 4 * 107), 4)
    b = Region(4 * 7, (50, 50, 50), (4 * 109, 4 * 113, 4 * 127), 4)
    with pytest.raises(lattice.TooHardError):
        solve([(101, 49), (103, 49), (107, 49), (109, 49), (113, 49), (127, 49)], 9001)
    assert overlap(a, b)

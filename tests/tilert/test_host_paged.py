"""Page tables and the index maps that they prove unique (rule O7)."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilert
from tilert import OwnershipError
from tilert.cpu_device import CpuDevice

cpu = tilert.device("cpu")


def table() -> tilert.PageTable:
    return tilert.PageTable(num_pages=6, page_size=4, max_rows=3, max_pages_per_row=3, dev=cpu)


def test_a_page_has_one_owner() -> None:
    pages = table()
    pages.set_pages(0, [5, 2])
    np.testing.assert_array_equal(pages.table.numpy()[0], [5, 2, -1])
    with pytest.raises(OwnershipError) as caught:
        pages.set_pages(1, [3, 2])
    assert str(caught.value) == (
        "O7 indexed pieces: page 2 belongs to row 0 and cannot be given to row 1; clear that row"
        " first"
    )
    with pytest.raises(OwnershipError, match="page 3 is given twice to row 1"):
        pages.set_pages(1, [3, 3])
    assert pages.pages(1) == []
    pages.set_pages(0, [5])
    pages.set_pages(1, [3, 2])
    pages.clear(0)
    pages.set_pages(1, [2, 5, 3])
    np.testing.assert_array_equal(pages.table.numpy(), [[-1] * 3, [2, 5, 3], [-1] * 3])


def test_table_errors() -> None:
    pages = table()
    with pytest.raises(IndexError, match="there is no row 3: the table has 3"):
        pages.set_pages(3, [])
    with pytest.raises(IndexError, match="there is no page 6: the table has 6"):
        pages.set_pages(0, [6])
    with pytest.raises(ValueError, match="row 0 holds at most 3 pages, got 4"):
        pages.set_pages(0, [0, 1, 2, 3])
    with pytest.raises(OwnershipError, match="a page table is changed through set_pages and clear"):
        pages.table.copy_from(np.zeros((3, 3), np.int32))
    with pytest.raises(ValueError, match="at least one"):
        tilert.PageTable(0, 4, 1, 1, cpu)


def test_slots_of_consecutive_positions() -> None:
    pages = table()
    pages.set_pages(1, [5, 2])
    slots = pages.slots(1, 2, 12)
    np.testing.assert_array_equal(
        slots.array.numpy(), [22, 23, 8, 9, 10, 11, -1, -1, -1, -1, -1, -1]
    )
    assert slots.upper == 24


def test_decode_rows_are_distinct() -> None:
    index = table().decode_index(4)
    index.set_rows([2, -1, 0])
    np.testing.assert_array_equal(index.rows.numpy(), [2, -1, 0, -1])
    with pytest.raises(OwnershipError, match="row 2 occurs twice"):
        index.set_rows([2, 0, 2])
    with pytest.raises(IndexError, match="there is no row 3"):
        index.set_rows([3])
    with pytest.raises(ValueError, match="got rows of shape"):
        index.set_rows([0, 1, 2, -1, -1])
    with pytest.raises(ValueError, match=r"positions must be i32\[4\], got f32\[4\]"):
        index.update(tilert.zeros(4, tilert.f32, cpu))


def test_shared_pages_are_read_by_many_and_written_by_none() -> None:
    pages = table()
    pages.set_pages(0, [4, 1, 2])
    with pytest.raises(
        OwnershipError, match="page 4 belongs to row 0 and cannot be given to row 1"
    ):
        pages.set_pages(1, [4, 3], shared=1)
    pages.set_pages(0, [4, 1, 2], shared=2)
    pages.set_pages(1, [4, 3], shared=1)
    pages.set_pages(2, [4, 1, 0], shared=2)
    np.testing.assert_array_equal(pages.table.numpy(), [[4, 1, 2], [4, 3, -1], [4, 1, 0]])
    np.testing.assert_array_equal(pages.writable_from.numpy(), [8, 4, 8])
    with pytest.raises(OwnershipError) as caught:
        pages.set_pages(1, [4, 3], shared=0)
    assert str(caught.value) == (
        "O7 indexed pieces: page 4 is shared and cannot be given to row 1 to write; clear the"
        " other rows that read it first"
    )
    with pytest.raises(OwnershipError, match="page 2 belongs to row 0"):
        pages.set_pages(1, [2], shared=1)
    with pytest.raises(OwnershipError, match="page 4 is given twice to row 1"):
        pages.set_pages(1, [4, 4], shared=1)
    with pytest.raises(ValueError, match="got 1 pages, which cannot have 2 shared"):
        pages.set_pages(1, [4], shared=2)
    # Nothing has changed; and a page becomes writable again once one row is left.
    np.testing.assert_array_equal(pages.table.numpy()[1], [4, 3, -1])
    pages.clear(0)
    pages.clear(2)
    pages.set_pages(1, [4, 3], shared=0)
    pages.set_pages(0, [1, 2, 0])
    np.testing.assert_array_equal(pages.writable_from.numpy(), [0, 0, 0])


def test_rows_get_further_pages() -> None:
    pages = table()
    pages.set_pages(0, [5, 2], shared=1)
    pages.set_pages(1, [5], shared=1)
    pages.extend({1: [0], 0: [4], 2: [3, 1]})
    np.testing.assert_array_equal(pages.table.numpy(), [[5, 2, 4], [5, 0, -1], [3, 1, -1]])
    np.testing.assert_array_equal(pages.writable_from.numpy(), [4, 4, 0])
    assert [pages.pages(row) for row in range(3)] == [[5, 2, 4], [5, 0], [3, 1]]
    np.testing.assert_array_equal(pages.slot_numbers(1, 3, 6), [-1, 0, 1, 2, 3, -1])
    pages.clear(0)
    for further, error, says in (
        ({1: [2], 2: [2]}, OwnershipError, "page 2 is given twice to row 2"),
        ({1: [2], 2: [3]}, OwnershipError, "page 3 is given twice to row 2"),
        ({1: [2], 2: [0]}, OwnershipError, "page 0 belongs to row 1 and cannot be given to row 2"),
        ({1: [2], 2: [5]}, OwnershipError, "page 5 is shared and cannot be given to row 2"),
        ({0: [2], 1: [5]}, OwnershipError, "page 5 is shared and cannot be given to row 1"),
        ({0: [2], 1: [6]}, IndexError, "there is no page 6"),
        ({0: [2], 3: [4]}, IndexError, "there is no row 3"),
        ({0: [2], 1: [2, 4]}, ValueError, "row 1 holds at most 3 pages, got 4"),
    ):
        with pytest.raises(error, match=says):
            pages.extend(further)
        assert [pages.pages(row) for row in range(3)] == [[], [5, 0], [3, 1]]
    pages.extend({0: [2], 1: [4]})
    np.testing.assert_array_equal(pages.table.numpy(), [[2, -1, -1], [5, 0, 4], [3, 1, -1]])


def test_growth_is_sent_together_where_that_is_quick() -> None:
    uploads: list[int] = []

    class Counting(CpuDevice):
        def upload(self, target: tilert.Array, source: Any) -> None:
            uploads.append(target.size)
            super().upload(target, source)

    for width, sent in ((4, [98 * 4]), (4096, [4096 * 2, 4096 * 2])):
        pages = tilert.PageTable(200, 4, 100, width, Counting())
        for row in range(100):
            pages.set_pages(row, [row])
        uploads.clear()
        pages.extend({98: [101], 1: [102], 97: [103], 2: [104]})
        assert uploads == sent
        assert [pages.table.numpy()[row, :3].tolist() for row in (1, 2, 50, 97, 98)] == [
            [1, 102, -1], [2, 104, -1], [50, -1, -1], [97, 103, -1], [98, 101, -1],
        ]  # fmt: skip
        pages.extend({})
        assert uploads == sent


def test_a_shared_page_has_no_slots() -> None:
    pages = table()
    pages.set_pages(0, [5, 2], shared=1)
    pages.set_pages(1, [5, 3], shared=1)
    np.testing.assert_array_equal(pages.slot_numbers(0, 2, 4), [-1, -1, 8, 9])
    index = pages.decode_index(2)
    index.set_rows([1, 0])
    for position, want in ((0, [-1, -1]), (3, [-1, -1]), (4, [12, 8]), (7, [15, 11])):
        index.update(tilert.from_numpy(np.full(2, position, np.int32), cpu))
        np.testing.assert_array_equal(index.array.numpy(), want)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.integers(0, 5), max_size=3),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=30,
    ),
    st.integers(0, 12),
)
def test_no_two_rows_ever_have_one_slot(
    changes: list[tuple[int, list[int], int, bool]], position: int
) -> None:
    pages = table()
    for row, wanted, shared, further in changes:
        before = [pages.pages(r) for r in range(3)]
        try:
            if further:
                pages.extend({row: wanted[:1], (row + 1) % 3: wanted[1:]})
                assert all(pages.pages(r)[: len(before[r])] == before[r] for r in range(3))
                wanted = before[row] + wanted[:1]
            else:
                pages.set_pages(row, wanted, shared)
        except (OwnershipError, ValueError):
            assert [pages.pages(r) for r in range(3)] == before
            continue
        assert pages.pages(row) == wanted
        on_device = pages.table.numpy()
        assert [[p for p in own if p >= 0] for own in on_device.tolist()] == [
            pages.pages(r) for r in range(3)
        ]
        slots = [pages.slot_numbers(r, 0, 12) for r in range(3)]
        written = np.concatenate([own[own >= 0] for own in slots])
        assert len(set(written.tolist())) == len(written)
        first = pages.writable_from.numpy()
        writable = [set(pages.pages(r)[int(first[r]) // 4 :]) for r in range(3)]
        for r in range(3):
            for other in {0, 1, 2} - {r}:
                assert not writable[r] & set(pages.pages(other))
    index = pages.decode_index(3)
    index.set_rows([2, 0, 1])
    index.update(tilert.from_numpy(np.full(3, position, np.int32), cpu))
    want = [pages.slot_numbers(row, position, 1)[0] for row in (2, 0, 1)]
    np.testing.assert_array_equal(index.array.numpy(), want)


@given(
    st.permutations(range(6)),
    st.lists(st.integers(0, 2), min_size=2, max_size=2),
    st.permutations([0, 1, 2, -1, -1]),
    st.lists(st.integers(-2, 14), min_size=5, max_size=5),
)
def test_decode_slots(
    order: list[int], cuts: list[int], rows: list[int], positions: list[int]
) -> None:
    pytest.importorskip("tilert.backends.cpu")
    pages = table()
    owned = [order[: cuts[0]], order[2 : 2 + cuts[1]], order[4:6]]
    for row, mine in enumerate(owned):
        pages.set_pages(row, mine)
    index = pages.decode_index(5)
    index.set_rows(rows)
    index.update(tilert.from_numpy(np.array(positions, np.int32), cpu))
    want = [
        owned[row][p // 4] * 4 + p % 4 if row >= 0 and p >= 0 and p // 4 < len(owned[row]) else -1
        for row, p in zip(rows, positions, strict=True)
    ]
    got = index.array.numpy()
    np.testing.assert_array_equal(got, want)
    real = got[got >= 0]
    assert len(set(real)) == len(real)
    for row, p, slot in zip(rows, positions, want, strict=True):
        if row >= 0 and p >= 0:
            assert pages.slots(row, p, 1).array.numpy()[0] == slot

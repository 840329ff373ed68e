"""Paged slots: index maps whose uniqueness follows from who owns a page (rule O7).

A paged array has `num_pages * page_size` rows, called slots. A page table gives pages to rows of a
batch; position p of a row lives in slot `page * page_size + p % page_size`, where `page` is entry
`p // page_size` of the row. Slots of distinct (row, position) pairs are distinct, because

- a page that a row may write belongs to that row only, once: `PageTable.set_pages` refuses anything
  else, and so does `extend`, which is the same for rows that get more pages; so two rows share no
  slot, and two positions of a row in different pages share none;
- two positions of a row in one page differ in their offset.

The first pages of a row may be *shared*: any number of rows have them, all of them to read only. A
page is shared in every row that has it or in none, which `set_pages` checks, so no page is written
while another row reads it. A row's writable positions are those from `shared * page_size` on
(`PageTable.writable_from`), and no index map has a slot for a position before it: both computations
give -1 there. So shared pages add no slot to any index map, and the argument above, which is about
slots in index maps, stands as it is.

`PageTable.slots` takes consecutive positions of one row. `DecodeIndex` takes one position of each
of several rows, which `set_rows` checks to be distinct, and computes the slots on the device.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.annotations import Const, Dyn, Mut, Ref
from tilert.array import Array, from_numpy
from tilert.dtypes import i32
from tilert.errors import OwnershipError
from tilert.index_map import IndexMap, UniqueIndex
from tilert.kernel import kernel
from tilert.language import where
from tilert.opt_out import IndexProof

if TYPE_CHECKING:
    from tilert.device import Device

__all__ = ["DecodeIndex", "PageTable", "paged_slots"]

_BRIDGED = 16 << 10
"""Most bytes between two changed rows that are sent along, because another copy takes longer."""

_TABLE = "O7 indexed pieces: a page table is changed through set_pages and clear"
_SLOTS = IndexProof(
    "PageTable.slots",
    "positions of one row are distinct, and set_pages gives each writable page to one row, once",
)
_DECODE = IndexProof(
    "DecodeIndex",
    "set_rows takes distinct rows only, and set_pages gives each writable page to one row, once",
)
_ROWS = "O7 indexed pieces: the rows of a decode index are changed through set_rows"


@kernel
def paged_slots(
    slots: Mut[Dyn],
    rows: Ref[Dyn],
    positions: Ref[Dyn],
    table: Ref[Dyn, Dyn],
    writable_from: Ref[Dyn],
    page_size: Const[int],
) -> None:
    """Slot of one position in each row, or -1 without a row or a page, or if it is not writable.

    slots, rows, positions: i32[n]. table: i32[max_rows, max_pages_per_row].
    writable_from: i32[max_rows], the first position of each row that may be written.
    """
    (i,) = slots.index
    position = positions[i.start]
    # A negative row or position, and one past the table, reads as no page.
    page = table.load(rows[i.start], position // page_size, fill=-1)
    closed = (page < 0) | (position < writable_from.load(rows[i.start], fill=0))
    slot = where(closed, -1, page * page_size + position % page_size)
    slots.store(slot.reshape(slots.shape))


class PageTable:
    """Which pages belong to which row, on the host and on the device.

    Attributes:
        num_pages, page_size: the paged array has num_pages * page_size slots.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_rows: int, max_pages_per_row: int, dev: "Device"
    ) -> None:
        if min(num_pages, page_size, max_rows, max_pages_per_row) < 1:
            raise ValueError("a page table needs at least one page, slot, row and entry")
        if num_pages * page_size > np.iinfo(np.int32).max:
            raise ValueError(f"{num_pages} pages of {page_size} slots do not fit in 32 bits")
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = dev
        # The one row that may write a page, or -1; and how many rows have it to read only.
        self._owner = np.full(num_pages, -1, np.int64)
        self._readers = np.zeros(num_pages, np.int64)
        # How many pages a row has, and which.
        self._counts = np.zeros(max_rows, np.int64)
        self._pages = np.full((max_rows, max_pages_per_row), -1, np.int32)
        self._shared = np.zeros(max_rows, np.int64)
        self._table = from_numpy(self._pages, dev)
        self._writable_from = from_numpy(np.zeros(max_rows, np.int32), dev)

    @property
    def table(self) -> Array:
        """i32[max_rows, max_pages_per_row], -1 where a row has no page; read-only."""
        return self._table.as_readonly(_TABLE)

    @property
    def writable_from(self) -> Array:
        """i32[max_rows], the first position of each row that has a slot; read-only."""
        return self._writable_from.as_readonly(_TABLE)

    @property
    def num_slots(self) -> int:
        """Rows of the paged array."""
        return self.num_pages * self.page_size

    def set_pages(self, row: int, pages: Sequence[int], shared: int = 0) -> None:
        """Give a row exactly these pages, in the order of its positions.

        The first `shared` of them are to be read only: the row has no slots in them, and other rows
        may have them too, likewise to be read only. Work enqueued earlier still sees the row's
        previous pages.

        Raises:
            OwnershipError: if a page is given twice, belongs to another row that may write it, or
                is to be written by this row while another reads it; nothing changes.
            IndexError: if the row or a page does not exist.
            ValueError: if there are more pages than a row holds, or fewer than `shared`.
        """
        self._check_row(row)
        self._check_room(row, len(pages))
        if not 0 <= shared <= len(pages):
            raise ValueError(f"row {row} got {len(pages)} pages, which cannot have {shared} shared")
        self._check_pages(row, pages, shared)
        read, count = self._shared[row], self._counts[row]
        self._readers[self._pages[row, :read]] -= 1
        self._owner[self._pages[row, read:count]] = -1
        self._readers[list(pages[:shared])] += 1
        self._owner[list(pages[shared:])] = row
        entries = np.full(self._pages.shape[1], -1, np.int32)
        entries[: len(pages)] = pages
        self._counts[row] = len(pages)
        if not np.array_equal(entries, self._pages[row]):
            self._pages[row] = entries
            self._upload((row,))
        if shared != self._shared[row]:
            self._shared[row] = shared
            start = np.array([shared * self.page_size], np.int32)
            self._writable_from[row : row + 1].copy_from(start)

    def extend(self, further: Mapping[int, Sequence[int]]) -> None:
        """Give rows further pages, which they may write, behind those they have.

        The same as `set_pages` of each row, in as few copies to the device as is quick.

        Raises:
            OwnershipError: if a page is given twice, or a row has it already; nothing changes.
            IndexError, ValueError: as `set_pages`.
        """
        seen: set[int] = set()
        for row, pages in further.items():
            self._check_row(row)
            self._check_room(row, int(self._counts[row]) + len(pages))
            for page in pages:
                self._check_page(row, page, seen)
                if self._owner[page] == row:
                    raise _given_twice(row, page)
                if self._readers[page]:
                    raise _still_shared(row, page)
        for row, pages in further.items():
            count = self._counts[row]
            self._pages[row, count : count + len(pages)] = pages
            self._counts[row] += len(pages)
            self._owner[list(pages)] = row
        self._upload(sorted(further))

    def _upload(self, rows: Iterable[int]) -> None:
        """Bring rows of the device's table up to date; rows between them are anyway."""
        first = last = -1
        for row in rows:
            if first >= 0 and (row - last) * self._pages[0].nbytes > _BRIDGED:
                self._table[first : last + 1].copy_from(self._pages[first : last + 1])
                first = row
            first, last = (row if first < 0 else first), row
        if first >= 0:
            self._table[first : last + 1].copy_from(self._pages[first : last + 1])

    def _check_room(self, row: int, count: int) -> None:
        if count > self._pages.shape[1]:
            raise ValueError(f"row {row} holds at most {self._pages.shape[1]} pages, got {count}")

    def _check_page(self, row: int, page: int, seen: set[int]) -> None:
        """Refuse a page that is not there, in `seen`, or another row's to write."""
        if not 0 <= page < self.num_pages:
            raise IndexError(f"there is no page {page}: the table has {self.num_pages}")
        if page in seen:
            raise _given_twice(row, page)
        if self._owner[page] not in (-1, row):
            raise OwnershipError(
                f"O7 indexed pieces: page {page} belongs to row {self._owner[page]} and cannot"
                f" be given to row {row}; clear that row first"
            )
        seen.add(page)

    def _check_pages(self, row: int, pages: Sequence[int], shared: int) -> None:
        reading = set(self._pages[row, : self._shared[row]].tolist())
        seen: set[int] = set()
        for at, page in enumerate(pages):
            self._check_page(row, page, seen)
            if at >= shared and self._readers[page] > (page in reading):
                raise _still_shared(row, page)

    def clear(self, row: int) -> None:
        """Take all pages from a row.

        Raises:
            IndexError: if there is no such row.
        """
        self.set_pages(row, ())

    def pages(self, row: int) -> list[int]:
        """The pages of a row, in the order of its positions."""
        self._check_row(row)
        pages: list[int] = self._pages[row, : self._counts[row]].tolist()
        return pages

    def slots(self, row: int, start: int, count: int) -> UniqueIndex:
        """An index map of `slot_numbers`."""
        return UniqueIndex.trusted(self.slot_numbers(row, start, count), self.device, _SLOTS)

    def slot_numbers(self, row: int, start: int, count: int) -> np.ndarray[Any, Any]:
        """The slots of positions start..start+count-1 of a row, i32.

        They are -1 where the row has no page, or only one to read.

        They are those of the row's present pages; later changes to the table do not reach them.

        Raises:
            IndexError: if there is no such row.
            ValueError: if `start` or `count` is negative.
        """
        self._check_row(row)
        if start < 0 or count < 0:
            raise ValueError(f"positions {start}..{start + count - 1} are negative")
        positions = np.arange(start, start + count, dtype=np.int64)
        entries = positions // self.page_size
        inside = entries < self._pages.shape[1]
        page = np.where(inside, self._pages[row][np.where(inside, entries, 0)], -1)
        closed = (page < 0) | (entries < self._shared[row])
        slot = np.where(closed, -1, page * self.page_size + positions % self.page_size)
        return slot.astype(np.int32)

    def decode_index(self, size: int) -> "DecodeIndex":
        """A map for one position in each of up to `size` rows, computed on the device."""
        return DecodeIndex(self, size)

    def check_rows(self, rows: np.ndarray[Any, Any]) -> None:
        """Refuse rows that are not distinct, apart from negative ones.

        Raises:
            OwnershipError: if a row occurs twice.
            IndexError: if a row does not exist.
        """
        real = np.sort(rows[rows >= 0])
        twice = np.flatnonzero(real[1:] == real[:-1])
        if twice.size:
            raise OwnershipError(
                f"O7 indexed pieces: row {real[twice[0]]} occurs twice; the slots of one position"
                " in each row are distinct only if the rows are"
            )
        if real.size and real[-1] >= len(self._pages):
            raise IndexError(f"there is no row {real[-1]}: the table has {len(self._pages)}")

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self._pages):
            raise IndexError(f"there is no row {row}: the table has {len(self._pages)}")


def _given_twice(row: int, page: int) -> OwnershipError:
    return OwnershipError(f"O7 indexed pieces: page {page} is given twice to row {row}")


def _still_shared(row: int, page: int) -> OwnershipError:
    return OwnershipError(
        f"O7 indexed pieces: page {page} is shared and cannot be given to row {row} to write;"
        " clear the other rows that read it first"
    )


class DecodeIndex(IndexMap, proof=_DECODE):
    """Slots of one position in each of several distinct rows; see the module for the proof.

    `update` computes all of them from one state of the table, so they stay unique among themselves
    when the table changes afterwards.
    """

    def __init__(self, table: PageTable, size: int) -> None:
        if size < 1:
            raise ValueError(f"a decode index needs at least one entry, got {size}")
        nothing = np.full(size, -1, np.int32)
        super().__init__(from_numpy(nothing, table.device), table.num_slots)
        self._page_table = table
        self._rows = from_numpy(nothing, table.device)

    @property
    def rows(self) -> Array:
        """i32[size]: row of each entry, -1 for none; read-only."""
        return self._rows.as_readonly(_ROWS)

    def set_rows(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Choose the row of each entry; missing and negative ones are none.

        Entries keep their slots until the next `update`.

        Raises:
            OwnershipError: if a row occurs twice.
            IndexError: if a row does not exist.
            ValueError: if there are more rows than entries.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        if wanted.ndim != 1 or len(wanted) > len(self):
            raise ValueError(
                f"a decode index of {len(self)} entries got rows of shape {list(wanted.shape)}"
            )
        self._page_table.check_rows(wanted)
        entries = np.full(len(self), -1, np.int32)
        entries[: len(wanted)] = np.maximum(wanted, -1)
        self._rows.copy_from(entries)

    def update(self, positions: Array) -> None:
        """Enqueue computing the slots; may be captured.

        Args:
            positions: i32[size], the position in each entry's row.

        Raises:
            ValueError: if it has another shape or dtype.
            MovedError: if an op holds it, or a pending op uses this map's entries.
        """
        if positions.shape != (len(self),) or positions.dtype != i32:
            raise ValueError(
                f"positions must be i32[{len(self)}], got {positions.dtype.name}"
                f"{list(positions.shape)}"
            )
        table = self._page_table
        paged_slots(
            self._entries.partition(1),
            self._rows,
            positions,
            table.table,
            table.writable_from,
            table.page_size,
        ).run()

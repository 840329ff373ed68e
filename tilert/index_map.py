"""Index maps: device arrays of row numbers that are proven to have no repeated row (rule O7)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.errors import LaunchError, OwnershipError
from tilert.opt_out import IndexProof

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.device import Device

__all__ = ["MAY_REPEAT", "IndexMap", "UniqueIndex"]

_READONLY = (
    "O7 indexed pieces: this array belongs to an index map, whose entries must stay unique;"
    " change it through the map's own methods"
)


# The proof of a type that looks at every row.
_CHECKED = object()
# Stands where nothing is proven: only `Mut`s that are accumulated into may be placed so.
MAY_REPEAT = object()


def _proves(proof: object) -> bool:
    return proof is _CHECKED or isinstance(proof, IndexProof)


class IndexMap:
    """Where `Array.partition_at` puts its pieces.

    No non-negative entry occurs twice. A type that has a proof of that, and alone writes the array,
    names it: `class Mine(IndexMap, proof=IndexProof("Mine", "..."))`. Users read `array`.

    Attributes:
        upper: every entry is below it.
    """

    _proof: object = None

    def __init_subclass__(cls, proof: object = None) -> None:
        """Subclasses have the proof of their base, or give one.

        Raises:
            OwnershipError: without either.
        """
        cls._proof = proof or cls._proof
        if cls._proof is not MAY_REPEAT and not _proves(cls._proof):
            raise OwnershipError(
                f"O7 indexed pieces: the index map type '{cls.__name__}' does not say why its rows"
                " are distinct; give proof=IndexProof(name, reason)"
            )

    def __init__(self, array: "Array", upper: int) -> None:
        if self._proof is None:
            raise OwnershipError(
                "O7 indexed pieces: an IndexMap by itself proves nothing; use UniqueIndex.checked"
                " or a PageTable"
            )
        self._entries = array
        self._shown = array.as_readonly(_READONLY)
        self.upper = upper

    def __len__(self) -> int:
        return self._entries.shape[0]

    @property
    def may_repeat(self) -> bool:
        """Whether nothing is proven of the rows, so that two programs may have one piece."""
        return self._proof is MAY_REPEAT

    @property
    def array(self) -> "Array":
        """The entries, i32[len]; kernels may read them and nothing may write them."""
        return self._shown

    @property
    def device(self) -> "Device":
        """Where the entries are."""
        return self._entries.device

    def bound_to(self, rows: int) -> None:
        """Called when an array of `rows` rows is partitioned by this map.

        Raises:
            LaunchError: if an entry may lie outside it.
        """
        if self.upper > rows:
            raise LaunchError(
                f"O7 indexed pieces: the index map reaches row {self.upper - 1}, the array has"
                f" {rows} rows"
            )


class UniqueIndex(IndexMap, proof=_CHECKED):
    """An index map whose entries the host has checked. `UniqueIndex.checked` makes one."""

    def __init__(self, array: "Array", upper: int, proof: object = None) -> None:
        if not _proves(proof):
            raise OwnershipError(
                "O7 indexed pieces: UniqueIndex.checked(values, device) makes an index map; it"
                " looks at every row"
            )
        super().__init__(array, upper)
        self._limit: int | None = None

    @classmethod
    def checked(cls, values: np.ndarray[Any, Any], device: "Device") -> "UniqueIndex":
        """A map of the given row numbers; negative entries are no piece.

        Args:
            values: integers, one axis.

        Raises:
            OwnershipError: if a row occurs twice.
            ValueError: if `values` are not integers on one axis that fit in 32 bits.
        """
        return cls._of(_validated(values), device, _CHECKED)

    @classmethod
    def trusted(
        cls, entries: np.ndarray[Any, Any], device: "Device", proof: IndexProof
    ) -> "UniqueIndex":
        """As `checked`, for int32 entries that nobody looks at: an opt-out (rule O9)."""
        return cls._of(entries, device, proof)

    @classmethod
    def _of(cls, entries: np.ndarray[Any, Any], device: "Device", proof: object) -> "UniqueIndex":
        from tilert.array import from_numpy

        return cls(from_numpy(entries, device), int(entries.max(initial=-1)) + 1, proof)

    def update(self, values: np.ndarray[Any, Any]) -> None:
        """Replace the entries, as many as before; work enqueued earlier still sees the old ones.

        Raises:
            As `checked`; also OwnershipError if a row lies outside an array that this map has
            partitioned.
        """
        entries = _validated(values)
        if len(entries) != len(self):
            raise ValueError(f"the index map has {len(self)} entries, got {len(entries)}")
        upper = int(entries.max(initial=-1)) + 1
        if self._limit is not None and upper > self._limit:
            raise OwnershipError(
                f"O7 indexed pieces: row {upper - 1} is outside an array of {self._limit} rows"
                " that this map partitions"
            )
        self._entries.copy_from(entries)
        self.upper = upper

    def bound_to(self, rows: int) -> None:
        """See `IndexMap`; later updates must stay inside the array too."""
        super().bound_to(rows)
        self._limit = rows if self._limit is None else min(self._limit, rows)


def _validated(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"an index map takes integers on one axis, got {array.dtype} of shape"
            f" {list(array.shape)}"
        )
    if array.size and int(array.max()) > np.iinfo(np.int32).max:
        raise ValueError(f"row {array.max()} of an index map does not fit in 32 bits")
    if array.dtype.kind == "i":
        # Any negative entry means "no piece"; a very negative one must not wrap around.
        array = np.maximum(array, -1)
    entries = array.astype(np.int32)
    order = np.argsort(entries, kind="stable")
    ranked = entries[order]
    twice = np.flatnonzero((ranked[1:] == ranked[:-1]) & (ranked[1:] >= 0))
    if twice.size:
        first = int(twice[0])
        raise OwnershipError(
            f"O7 indexed pieces: row {ranked[first]} occurs twice in the index map, at entries"
            f" {order[first]} and {order[first + 1]}"
        )
    return entries

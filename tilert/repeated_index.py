"""Index maps whose rows may repeat, for `Mut`s that programs only accumulate into (rule O7)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.errors import OwnershipError
from tilert.index_map import MAY_REPEAT, IndexMap

if TYPE_CHECKING:
    from tilert.device import Device

__all__ = ["RepeatedIndex", "check_repeats"]


class RepeatedIndex(IndexMap, proof=MAY_REPEAT):
    """An index map that nothing is proven of, so that several programs may have one piece.

    It places pieces only of a `Mut[Accumulate...]`, whose updates may come in any order.
    """

    @classmethod
    def of(cls, values: np.ndarray[Any, Any], device: "Device") -> "RepeatedIndex":
        """A map of the given row numbers; negative entries are no piece.

        Args:
            values: integers, one axis.

        Raises:
            ValueError: if they are not, or do not fit in 32 bits.
        """
        from tilert.array import from_numpy

        array = np.asarray(values)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"an index map takes integers on one axis, got {array.dtype} of shape"
                f" {list(array.shape)}"
            )
        if array.size and int(array.max()) > np.iinfo(np.int32).max:
            raise ValueError(f"row {array.max()} of an index map does not fit in 32 bits")
        entries = (np.maximum(array, -1) if array.dtype.kind == "i" else array).astype(np.int32)
        return cls(from_numpy(entries, device), int(entries.max(initial=-1)) + 1)


def check_repeats(kernel: str, name: str, accumulate: str, index_map: IndexMap) -> None:
    """Rule O7 for one indexed `Mut`: only accumulated pieces may be named twice.

    Raises:
        OwnershipError: if programs store to pieces that may be the same.
    """
    if index_map.may_repeat and not accumulate:
        raise OwnershipError(
            f"O7 indexed pieces: the index map of '{name}' may name a row twice, and kernel"
            f" '{kernel}' stores to it; declare it Mut[Accumulate.Add] and call {name}.add(tile),"
            " or pass a UniqueIndex"
        )

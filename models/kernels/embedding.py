"""Rows of a table: token embedding, and picking one token of many."""

# mypy: disable-error-code="type-arg"

import tilert
from tilert import Dyn, Mut, Ref

__all__ = ["embedding"]


@tilert.kernel
def embedding(x: Mut[Dyn], ids: Ref[Dyn], table: Ref[Dyn]) -> None:
    """x[t, :] = table[ids[t], :]; an id outside the table gives a row of zeros.

    x: [T, H] in pieces (bt, H). ids: i32[T]. table: [V, H].
    """
    t, _ = x.index
    x.store(table[ids[t], :])

"""Slots of a batch change hands between steps, without the host knowing the ids in them."""

# mypy: disable-error-code="type-arg"

import tilert
from models.slot import FROM_SLOT, GIVEN, KEPT
from tilert import Dyn, Mut, Ref
from tilert.language import where

__all__ = ["seat"]


@tilert.kernel
def seat(
    ids: Mut[Dyn],
    positions: Mut[Dyn],
    bad: Mut[Dyn],
    sources: Ref[Dyn],
    tokens: Ref[Dyn],
    starts: Ref[Dyn],
    before: Ref,
    fresh: Ref,
) -> None:
    """Give each slot its newest id and its position, from where its source says they are.

    A source is one of `models.slot.Slot.source`: a slot that is `KEPT` stays as it is. The others
    take their position from `starts`, are not bad, and get a token: one of `tokens` if it is given,
    else one of `before` or of `fresh`.

    ids, positions, bad: i32[B] in pieces (1,). sources, tokens, starts: i32[B]. before: i32[S], the
    ids as they were. fresh: i32[P].
    """
    b = ids.index[0].number
    source = sources[b]
    kept = source == KEPT
    earlier = before.load(source - FROM_SLOT, fill=0)
    elsewhere = where(source < 0, fresh.load(-1 - source, fill=0), earlier)
    ids.store(where(kept, ids.load(), where(source == GIVEN, tokens[b], elsewhere)))
    positions.store(where(kept, positions.load(), starts[b]))
    bad.store(where(kept, bad.load(), 0))

"""Online softmax of which several warps have shares of the keys.

A loop carries the largest score so far, the sum of weights, and their sum of values, and makes all
smaller where a larger score comes (Milakov and Gimelshein 2018). With zeros to begin with, the
loop can run on any part of the keys by itself: what parts have found is joined by the same rule. So
is what it began with, where that is more than zeros: it counts as one more part.
The largest score has to begin with a number, for there may be parts of which no key is seen.
"""

from dataclasses import dataclass
from math import isfinite

from tilert.codegen.lower import is_zero
from tilert.codegen.unfit import Unfit
from tilert.dtypes import f32
from tilert.ir import Block, Op, Value, walk
from tilert.ops import make

__all__ = ["JOIN", "Shares", "find_shares"]

JOIN = "join"
"""Operation behind the loop: results of the whole from those of each share, and from what the loop
began with, where that is given too."""

LOWEST = -3e38
"""The largest score of no keys."""


@dataclass(eq=False)
class Shares:
    """What a loop carries.

    Attributes:
        best, total, sums: its results, of each share.
        join: the operation with these, and what the loop began with unless that was nothing, and
            the results of the whole, in the same order.
        largest, added: the reductions of scores and of weights in the loop.
    """

    best: Value
    total: Value
    sums: Value
    join: Op
    largest: Op
    added: Op


def find_shares(
    block: Block, loop: Op, scaling: Op | None, narrowed: Op, second: Op, between: list[Op]
) -> Shares:
    """What the loop carries, if all of it is an online softmax; then `JOIN` is put behind it.

    Args:
        block: that the loop is in.
        scaling: the multiplication of the sums before the second product.
        narrowed: the cast of weights for the second product.
        between: what the loop does between its products.

    Raises:
        Unfit: where it is none.
    """
    body = loop.regions[0]
    out, carried = body.ops[-1], body.args[1:]
    fade = _spread(scaling, carried) if scaling is not None else None
    best = _argument(fade, "exp2", "sub")
    weights = narrowed.args[0]
    scores = _argument(weights, "exp2", "sub")
    if fade is None or best not in carried or scores is None or len(carried) != 3:
        raise Unfit("few rows are shared out by keys, and the loop is no online softmax")
    top = out.args[carried.index(best)]
    largest = _other(top, "maximum", best)
    total = next((v for v in carried if v is not best and v.shape == best.shape), None)
    sums = next(v for v in carried if v is not best and v is not total)
    found: set[Op] = set()
    checks = (
        largest is not None
        and _reduces(largest, "max", scores)
        and _is(fade, "exp2", "sub", best, top, found)
        and _is(weights, "exp2", "sub", scores, top, found)
        and total is not None
    )
    if not checks or total is None or largest is None or largest.op is None:
        raise Unfit("few rows are shared out by keys, and the loop is no online softmax")
    after = out.args[carried.index(total)]
    faded = next((a for a in _arguments(after, "add") if total in _arguments(a, "mul")), None)
    added = _other(after, "add", faded)
    begins = [loop.args[3 + carried.index(v)] for v in (best, total, sums)]
    known = [top.op, largest.op, fade.op, weights.op, narrowed, scaling, second, after.op]
    known += [v.op for v in (faded, added) if v is not None]
    found |= {op for op in known if op is not None}
    checks = (
        added is not None
        and _reduces(added, "sum", weights)
        and _other(faded, "mul", total) is fade
        and out.args[carried.index(sums)] is second.result
        and _is_number(begins[0])
        and not _seen_elsewhere(between, found, carried)
    )
    if not checks or added is None or added.op is None:
        raise Unfit("few rows are shared out by keys, and the loop is no online softmax")
    results = [loop.results[carried.index(v)] for v in (best, total, sums)]
    join = _put_join(block, loop, results)
    if _known(begins[0]) is None or not all(is_zero(v) for v in begins[1:]):
        join.args += begins
        _begin_with_nothing(block, loop, carried.index(best))
    return Shares(results[0], results[1], results[2], join, largest.op, added.op)


def _put_join(block: Block, loop: Op, results: list[Value]) -> Op:
    join = Op(JOIN, results, {}, loc=loop.loc)
    join.results = [Value(v.type, join) for v in results]
    whole = dict(zip(results, join.results, strict=True))
    place = block.ops.index(loop) + 1
    for op in walk(Block(ops=block.ops[place:])):
        op.args[:] = [whole.get(a, a) for a in op.args]
    block.ops.insert(place, join)
    return join


def _begin_with_nothing(block: Block, loop: Op, best: int) -> None:
    """Let each share begin as if there were no keys."""
    place = block.ops.index(loop)
    nothing: list[Op] = []
    for i, v in enumerate(loop.args[3:]):
        number = make("const", [], value=LOWEST if i == best else 0.0, dtype=f32)
        tile = make("broadcast", [number.result], shape=v.shape)
        nothing += [number, tile]
        loop.args[3 + i] = tile.result
    block.ops[place:place] = nothing


def _behind(v: Value, found: set[Op] | None = None) -> Value:
    """The number for each row that a value has for all columns."""
    while v.op is not None and v.op.name in ("broadcast", "reshape"):
        source = v.op.args[0]
        if v.op.name == "reshape" and v.shape != (*source.shape, 1):
            break
        if found is not None:
            found.add(v.op)
        v = source
    return v


def _known(v: Value) -> float | None:
    """The number that all elements are known to be."""
    op = v.op.args[0].op if v.op is not None and v.op.name == "broadcast" else v.op
    return float(op.attrs["value"]) if op is not None and op.name == "const" else None


def _is_number(v: Value) -> bool:
    known = _known(v)
    return known is None or isfinite(known)


def _spread(op: Op, carried: list[Value]) -> Value:
    """The factor by which something carried is multiplied."""
    return _behind(op.args[1] if op.args[0] in carried else op.args[0])


def _arguments(v: Value | None, name: str) -> list[Value]:
    return v.op.args if v is not None and v.op is not None and v.op.name == name else []


def _argument(v: Value | None, outer: str, inner: str) -> Value | None:
    """x of `outer(inner(x, ...))`."""
    args = _arguments(v, outer)
    return next(iter(_arguments(args[0], inner)), None) if args else None


def _other(v: Value | None, name: str, one: Value | None) -> Value | None:
    """The argument beside `one`."""
    args = _arguments(v, name)
    if len(args) != 2 or one not in args:
        return None
    return args[1] if args[0] is one else args[0]


def _is(v: Value, outer: str, inner: str, a: Value, b: Value, found: set[Op]) -> bool:
    """Whether a value is `outer(inner(a, b))`, b perhaps repeated; what it is made by is added."""
    args = _arguments(v, outer)
    parts = _arguments(args[0], inner) if args else []
    if len(parts) != 2 or parts[0] is not a or _behind(parts[1], found) is not b:
        return False
    found |= {op for op in (v.op, args[0].op) if op is not None}
    return True


def _reduces(v: Value, kind: str, source: Value) -> bool:
    op = v.op
    if op is None or op.name != "reduce" or op.args[0] is not source:
        return False
    return (op.attrs["kind"], op.attrs["axis"]) == (kind, 1)


def _seen_elsewhere(between: list[Op], found: set[Op], carried: list[Value]) -> bool:
    """Whether anything else depends on what the shares find each by itself."""
    own = {*carried, *(v for op in found for v in op.results)}
    for op in (o for first in between for o in walk(Block(ops=[first]))):
        if op not in found and any(a in own for a in op.args):
            if op.name not in ("broadcast", "reshape"):
                return True
            own.update(op.results)
    return False

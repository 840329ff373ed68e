"""Turns a loop that only accumulates products and sums over blocks into one step.

`for k: acc = mma(x[m, k], w[n, k].T, acc)` adds up products of neighbouring blocks, which is the
product of the wider tiles; so does `total = total + sum(x[m, k], axis=1)`. The match below finds
which axis of every tile in the loop grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilert.dtypes import f32
from tilert.ir import Access, Op, Value
from tilert.ops import ELEMENTWISE, OPS

__all__ = ["Contraction", "match_contraction"]

# Where the grown operands of these are 0, so is the result.
_KEEPS_ZERO = {"transpose", "cast", "mul", "neg", "abs", "broadcast", "reshape"}


@dataclass
class Contraction:
    """A matched loop.

    Attributes:
        shapes: the wider shape of every tile that grows.
        access: the accesses of every load that grows, the grown axis being a "span" whose
            start is the constant `start`.
        start: first element of the grown axis.
        chains: for each carried value, the operations that add to it, first to last.
    """

    shapes: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    access: dict[Op, tuple[Access, ...]] = field(default_factory=dict)
    start: int = 0
    chains: list[list[Op]] = field(default_factory=list)


def _chain(carried: Value, result: Value, uses: Mapping[Value, int]) -> list[Op] | None:
    """The mma and add operations from a carried value to what the loop yields for it."""
    chain: list[Op] = []
    value = result
    while value is not carried:
        if value.op is None or uses[value] != 1 or value.op.name not in ("mma", "add"):
            return None
        chain.append(value.op)
        value = value.op.args[_running(value.op)]
    return chain[::-1] if uses[carried] == 1 else None


def _running(op: Op) -> int:
    """Which operand of an accumulating operation is the sum so far."""
    if op.name == "mma":
        return 2
    other = op.args[1].op
    return 0 if other is not None and other.name == "reduce" else 1


def _accumulates(op: Op, axes: Mapping[Value, int], sums: set[Value]) -> bool:
    """Whether an operation of a chain adds what the grown axis sums to."""
    if op.name == "mma":
        return axes.get(op.args[0]) == 1 and axes.get(op.args[1]) == 0
    term = op.args[1 - _running(op)].op
    return (
        term is not None
        and term.name == "reduce"
        and term.attrs["kind"] == "sum"
        and op.result.dtype == f32
        and axes.get(term.args[0]) == term.attrs["axis"]
        and term.result not in sums
    )


def _spread(value: Value, axis: int) -> bool:
    """Whether a tile that does not depend on the loop repeats one element along `axis`."""
    op = value.op
    if op is None or op.name != "broadcast":
        return False
    source = op.args[0].shape
    return source == () or source[axis] == 1


def _reshaped(source: tuple[int, ...], target: tuple[int, ...], axis: int) -> int | None:
    """Where `axis` goes in a reshape that only adds or removes axes of extent 1."""
    old = [i for i, n in enumerate(source) if n != 1]
    new = [i for i, n in enumerate(target) if n != 1]
    if axis not in old or [source[i] for i in old] != [target[i] for i in new]:
        return None
    return new[old.index(axis)]


def _grow(op: Op, index: Value, axes: dict[Value, int]) -> tuple[bool, int | None]:
    """(whether the operation can grow, the axis of its result that grows or None)."""
    if not OPS[op.name].pure or (index in op.args and op.name != "load"):
        return False, None
    growing = [a for a in op.args if a in axes]
    if op.name == "load":
        if growing:
            return False, None
        hits = [a for a in op.attrs["access"] if a.arg >= 0 and op.args[a.arg] is index]
        if not hits:
            return True, None
        if len(hits) > 1 or hits[0].kind != "block":
            return False, None
        kept = [a for a in op.attrs["access"] if a.kind != "point"]
        return True, next(i for i, a in enumerate(kept) if a is hits[0])
    if not growing:
        return True, None
    axis = axes[growing[0]]
    if op.name in ELEMENTWISE:
        fits = all(axes[a] == axis if a in axes else _spread(a, axis) for a in op.args)
        return fits, axis
    shape = op.args[0].shape
    if op.name == "transpose":
        return True, 1 - axis
    if op.name == "broadcast":
        return shape[axis] == op.attrs["shape"][axis] and shape[axis] != 1, axis
    if op.name == "reshape":
        moved = _reshaped(shape, op.attrs["shape"], axis)
        return moved is not None, moved
    return False, None


def match_contraction(
    loop: Op,
    first: int,
    trips: int,
    extents: Mapping[int, tuple[int, ...]],
    live: set[Op],
    uses: Mapping[Value, int],
) -> Contraction | None:
    """The single product that a loop of step 1 over blocks computes, or None.

    Args:
        first, trips: first loop index and number of iterations (at least 1).
        extents: extents of each array parameter, by position.
        live, uses: the operations that matter and how often those use each value.
    """
    body = loop.regions[0]
    index, carried, results = body.args[0], body.args[1:], body.ops[-1].args
    found = Contraction()
    for start, end in zip(carried, results, strict=True):
        chain = _chain(start, end, uses)
        if chain is None:
            return None
        found.chains.append(chain)
    products = {op for chain in found.chains for op in chain}
    sums = {value for op in products for value in (op.result, op.args[_running(op)])}
    terms = {op.args[1 - _running(op)].op for op in products if op.name == "add"}
    axes: dict[Value, int] = {}
    grown: list[Op] = []
    plain = True
    for op in body.ops[:-1]:
        if op not in live:
            continue
        if op in products:
            if not _accumulates(op, axes, sums):
                return None
            continue
        if op in terms and uses[op.result] == 1 and not sums & set(op.args):
            continue
        fits, axis = _grow(op, index, axes)
        if not fits or any(a in sums for a in op.args):
            return None
        if axis is not None:
            axes[op.result] = axis
            if op.name == "load":
                grown.append(op)
            else:
                plain &= op.name in _KEEPS_ZERO
    return _widen(found, grown, axes, index, first, trips, extents, plain)


def _widen(
    found: Contraction,
    grown: list[Op],
    axes: dict[Value, int],
    index: Value,
    first: int,
    trips: int,
    extents: Mapping[int, tuple[int, ...]],
    plain: bool,
) -> Contraction | None:
    blocks: dict[Op, tuple[int, int]] = {}  # load -> (array axis, extent of the array)
    for op in grown:
        for axis, a in enumerate(op.attrs["access"]):
            if a.arg >= 0 and op.args[a.arg] is index:
                blocks[op] = axis, extents[op.attrs["param"].position][axis]
    sizes = {op.attrs["access"][axis].size for op, (axis, _) in blocks.items()}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    width = size * trips
    found.start = first * size
    ends = {n for _, n in blocks.values()}
    zero = all(not op.attrs["fill"] for op in grown)
    if plain and zero and len(ends) == 1:
        # What lies past the end is 0 everywhere and adds nothing.
        width = max(min(width, ends.pop() - found.start), 1)
    for op, (axis, _) in blocks.items():
        access = list(op.attrs["access"])
        access[axis] = Access("span", width, access[axis].arg)
        found.access[op] = tuple(access)
    for value, axis in axes.items():
        shape = list(value.shape)
        shape[axis] = width
        found.shapes[value] = tuple(shape)
    return found

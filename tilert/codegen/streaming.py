"""How kernels without products run: threads, the order of loads, rows that are brought ahead,
divisions that may be inexact."""

from tilert.codegen.lower import uses
from tilert.dtypes import bf16, f16, f32
from tilert.ir import Access, Block, Function, Op, Param, Value, walk
from tilert.ops import ELEMENTWISE

__all__ = ["coarse", "far_rows", "is_row_sum", "lift_loads", "streaming_threads", "triples"]

ELEMENTS, SUMMED_VECTORS = 8, 2
"""Elements of the largest tile that a thread has, and at most one vector of 16 bytes of each that
is loaded: with all loads first, two of f32 are 1 to 4 % slower on an H200. Where tiles are reduced,
as many vectors: sums along rows cost less with two than with one, and leave room for more blocks
than with four."""
PAIRED_BYTES = 4 << 10
"""Up to so many, of 16 bits each and of a tile that none of its shape is loaded with, a thread has
two vectors: smaller blocks are begun sooner, and there are many. Copies of 2^24 bf16 take 3 % less
with it, of 2^28 0.5 % more; with larger tiles, or in f32, it is no gain."""
MOST_THREADS = 512
LIFTED_BYTES = 128
"""Of a thread: what is loaded ahead of its use takes registers."""

FAR_BYTES = 132 * (32 << 10)
"""From a row to the one that the second-level cache is told to bring, about: a little less than an
H200's blocks have of rows at once. Half and twice as far gain half as much."""
COPIED, MOST_COPIED = 16, 1 << 20
"""The copy engine's addresses and sizes are whole times so many bytes; its instruction has 16 bits
for how many times."""

_SCALARS = ELEMENTWISE | {"const", "program", "dim"}
_SIMPLE = _SCALARS | {"iota", "load", "store_piece", "reduce", "broadcast", "reshape"}
"""What needs few registers besides the tiles, and no power of two of threads. With anything else a
thread has no more than 8 elements."""


def streaming_threads(function: Function) -> int:
    """Threads a program, by its largest tile: a power of two, and where that is one row, so many
    warps that all threads have equally much of it."""
    ops = list(walk(function.body))
    largest = max((v for op in ops for v in op.results), key=lambda v: v.type.numel, default=None)
    if largest is None or not largest.shape:
        return 32
    names = {op.name for op in ops}
    simple, elements = names <= _SIMPLE, ELEMENTS
    loads = (op.result for op in ops if op.name == "load")
    sizes = [v.dtype.itemsize for v in loads if v.shape == largest.shape]
    if simple and "reduce" in names:
        elements = SUMMED_VECTORS * 16 // max(2, min(sizes, default=4))
    elif simple and sizes:
        elements = min(elements, 16 // min(4, *sizes))
        if sizes == [2] and largest.type.numel * sizes[0] <= PAIRED_BYTES:
            elements *= 2
    least = -(-largest.type.numel // elements)
    if simple and largest.type.numel == largest.shape[-1] and least % 32 == 0 < least:
        return min(least, MOST_THREADS)
    return min(MOST_THREADS, max(32, 1 << (least.bit_length() - 1)))


def is_row_sum(function: Function) -> bool:
    """Whether a program reduces one row, and does nothing else that takes many registers: norms."""
    ops = list(walk(function.body))
    names = {op.name for op in ops}
    rows = (v.type.numel == v.shape[-1] for op in ops for v in op.results if v.shape)
    return names <= _SIMPLE and "reduce" in names and all(rows)


def far_rows(function: Function) -> dict[Op, int]:
    """Loads of a row by each program of a row sum, and how many rows later comes the one that it
    has the second-level cache bring.

    A program waits for its row, for its warps and, at the end of an earlier kernel, for that one's
    last programs: memory works meanwhile. Elements of no row sum are not waited for so long.
    """
    axes = [axis for axis, n in enumerate(function.grid) if n != 1]
    if len(axes) != 1 or not is_row_sum(function):
        return {}

    found: dict[Op, int] = {}
    for op in function.body.ops:
        if not _is_load(op) or len(op.attrs["access"]) != 2:
            continue
        param: Param = op.attrs["param"]
        row, columns = op.attrs["access"]
        by = op.args[row.arg].op if row.kind in ("block", "point") else None
        nbytes = op.result.type.numel * param.dtype.itemsize
        stride = param.strides[0]
        if (
            by is not None
            and by.name == "program"
            and by.attrs["axis"] == axes[0]
            and (columns.kind == "full" or _is_whole(op, columns, param.shape[1]))
            and param.aligned
            and param.strides[1] == 1
            and stride is not None
            and stride * param.dtype.itemsize % COPIED == nbytes % COPIED == 0
            and 0 < nbytes < MOST_COPIED
        ):
            found[op] = max(1, FAR_BYTES // nbytes)
    return found


def _is_whole(op: Op, access: Access, extent: int | None) -> bool:
    """Whether a block is the only one along its axis."""
    number = op.args[access.arg].op if access.kind == "block" else None
    first = number is not None and number.name == "const" and number.attrs["value"] == 0
    return first and access.size == extent


def lift_loads(function: Function, threads: int) -> None:
    """Begin blocks with the loads of Refs that depend on nothing but coordinates and other loads:
    first those that others depend on.

    So their latencies pass together, where they would follow each other behind reductions, stores
    and barriers. No kernel writes what a Ref of its own shows. What prints or asserts says what
    it does before any access behind it fails, so that a kernel which has such is left as it is.
    """
    if any(op.name in ("print", "check") for op in walk(function.body)):
        return
    left = LIFTED_BYTES * threads
    for block in _blocks(function.body):
        left -= _lift(block, left)


def _blocks(block: Block) -> list[Block]:
    return [block, *(b for op in block.ops for r in op.regions for b in _blocks(r))]


def _lift(block: Block, budget: int) -> int:
    """Reorder one block; gives the bytes that it loads first."""
    made = {v: op for op in block.ops for v in op.results}
    needs: dict[Op, set[Op] | None] = {}
    level: dict[Op, int] = {}

    def behind(op: Op) -> set[Op] | None:
        """What an operation needs of the block, None where that is more than coordinates."""
        if op not in needs:
            found: set[Op] | None = {op}
            deep = 0
            if op.regions or not (_is_load(op) or _is_scalar(op)):
                found = None
            for a in op.args if found is not None else ():
                inner = made.get(a)
                if inner is None:
                    continue
                more = behind(inner)
                found = None if more is None or found is None else found | more
                deep = max(deep, level.get(inner, 0) + _is_load(inner))
            needs[op], level[op] = found, deep
        return needs[op]

    chosen: set[Op] = set()
    feeding: set[Op] = set()
    used = 0
    for op in block.ops:
        if not _is_load(op):
            continue
        found = behind(op)
        size = op.result.type.numel * op.result.dtype.itemsize
        if found is None or used + size > budget:
            continue
        used += size
        chosen |= found
        for other in found:
            if other is not op and _is_load(other):
                feeding |= needs[other] or set()
    place = {op: i for i, op in enumerate(block.ops)}
    first = sorted(chosen, key=lambda op: (level[op], op not in feeding, place[op]))
    block.ops[:] = [*first, *(op for op in block.ops if op not in chosen)]
    return used


def _is_load(op: Op) -> bool:
    return op.name == "load" and op.attrs["param"].kind == "ref"


def _is_scalar(op: Op) -> bool:
    return op.name in _SCALARS and all(not r.shape for r in op.results)


def coarse(function: Function) -> set[Op]:
    """Divisions and reciprocal roots of f32 of which only what is rounded to 16 bits reaches
    memory, times factors.

    An exact division takes some thirty instructions and a branch, an exact root seven. With two
    ulps of f32 more, what is rounded differs where it lay within a thousandth of an ulp of a tie.
    """
    readers = uses(function.body)

    def rounded(v: Value) -> bool:
        found = readers.get(v, [])
        return bool(found) and all(
            (op.name == "cast" and op.result.dtype in (bf16, f16))
            or (op.name in _FACTORS and op.result.dtype == f32 and rounded(op.result))
            for op in found
        )

    # By a constant it may be a product.
    found = [
        op
        for op in walk(function.body)
        if op.name == "rsqrt" or (op.name == "div" and not _given(op.args[1]))
    ]
    return {op for op in found if op.result.dtype == f32 and rounded(op.result)}


def triples(function: Function) -> dict[Op, tuple[Value, ...]]:
    """The factors of products of three tiles of f32 that are stored as such, as a norm's is with
    its gain: rounded once they are nearer by a seventh, and memory leaves time for it."""
    readers = uses(function.body)
    found: dict[Op, tuple[Value, ...]] = {}
    for op in walk(function.body):
        if op.name != "mul" or op.result.dtype != f32 or not op.result.shape:
            continue
        if any(reader.name != "store_piece" for reader in readers.get(op.result, [])):
            continue
        for inner, other in (op.args, op.args[::-1]):
            if inner.op is not None and inner.op.name == "mul":
                found[op] = (*inner.op.args, other)
                break
    return found


def _given(value: Value) -> bool:
    """Whether a value is a constant or a broadcast of one."""
    op = value.op
    while op is not None and op.name == "broadcast":
        op = op.args[0].op
    return op is not None and op.name == "const"


_FACTORS = ("mul", "neg", "reshape", "broadcast")

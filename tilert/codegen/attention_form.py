"""Which kernels the attention schedules of sm_90a take: two products, one of which feeds the other.

It takes a kernel with one loop, by itself or in another one, that has two products and no more. The
left operand of the first is loaded before the loop, or computed there if it has few rows. Its
result goes through elementwise work, reductions and branches, and as 16-bit floats to the left of
the second, which adds to what the loop carries, multiplied by a factor a row at most. The right
operands are tiles that each step has copied, the first transposed. Whatever comes before and after
the loops is up to the kernel.

Tiles of whole 64 rows are for warpgroups (`attention.py`). Of up to 16 rows the keys are shared out
to warps (`row_attention.py`), where the loop is an online softmax (`shares.py`).
"""

from dataclasses import dataclass, field, replace

from tilert.codegen.lower import clone, is_zero, uses
from tilert.codegen.plan import source_of
from tilert.codegen.ring import COLUMNS, GROUP, GROUP_ROWS
from tilert.codegen.shares import Shares, find_shares
from tilert.codegen.unfit import Unfit
from tilert.dead_code import remove_dead
from tilert.dtypes import bf16, f16, f32, i32
from tilert.ir import Access, Block, Function, Op, Param, TileType, Value, walk
from tilert.ops import ELEMENTWISE, make
from tilert.tensor_map import LINE, MOST_AXES, MOST_ROWS, TensorMap

__all__ = ["Form", "find_form", "scalars"]

MOST_REGISTERS = 200
"""A thread's share of the operands and sums: the others are for the work between the products."""
FEW_ROWS = 16
FEW_REGISTERS = 112
"""The same where keys are shared out to warps."""
MOST_WARPS = 4
KEYS = 16
"""Of a product of a warp."""

_REGISTERS = {"const", "iota", "program", "dim", "reduce", "broadcast", "reshape", "transpose"}


@dataclass(eq=False)
class Side:
    """A right operand, which each step of the loop has copied.

    Attributes:
        loads: its pages, one below the other.
        rows, cols: its extents. It lies as columns of `COLUMNS`, one after the other.
        map: number of the tensor map.
        offset: of its first byte within a stage of the ring.
    """

    loads: list[Op]
    rows: int
    cols: int
    map: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tile."""
        return self.rows * self.cols * 2


@dataclass(eq=False)
class Form:
    """Two products in a loop.

    Attributes:
        function: a copy of the kernel, in which pages that were gathered are loaded one by one.
        path: the loops from the outermost to the one with the products.
        first, second: the products.
        narrowed: the cast that gives the second product's left operand.
        scaling: the multiplication of the sums before the second product, None where there is none.
        keys, values: the right operands of the products.
        maps: what the copy engine reads.
        partial: sums along rows that only add to what the loops carry: each thread may keep its
            own share until they end. The carried totals by the reductions.
        shares: of few rows, what the warps find each by itself.
    """

    function: Function
    path: list[Op]
    first: Op
    second: Op
    narrowed: Op
    scaling: Op | None
    keys: Side
    values: Side
    maps: list[TensorMap]
    partial: dict[Op, Value] = field(default_factory=dict)
    shares: Shares | None = None

    @property
    def loop(self) -> Op:
        """The loop with the products."""
        return self.path[-1]

    @property
    def groups(self) -> int:
        """Warpgroups that compute, 64 rows each."""
        rows: int = self.first.result.shape[0]
        return rows // GROUP_ROWS

    @property
    def consumers(self) -> int:
        """Threads that compute."""
        return GROUP * self.groups

    @property
    def warps(self) -> int:
        """Warps that compute where there are few rows: each has as many keys."""
        return _warps(self.keys.rows)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of what one step copies."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def between(self) -> list[Op]:
        """What the loop does between the products."""
        own = {self.first, self.second, self.narrowed, self.scaling}
        own |= {*self.keys.loads, *self.values.loads, self.first.args[2].op}
        own |= {source_of(op.args[1])[0].op for op in (self.first, self.second)}
        return [op for op in self.loop.regions[0].ops[:-1] if op not in own]


def find_form(function: Function) -> Form:
    """The schedule of a lowered function.

    Raises:
        Unfit: where it is not one for it.
    """
    if _path(function) is None:
        raise Unfit("it has no loop with products of tiles, or several")
    function = clone(function)
    _split_gathers(function)
    path = _path(function) or []
    loop = path[-1]
    ops = loop.regions[0].ops
    products = [op for op in walk(function.body) if op.name == "mma"]
    if len(products) != 2 or any(op not in ops for op in products):
        raise Unfit("it does not have two products of tiles in one loop")
    first, second = products
    readers = uses(function.body)
    narrowed = second.args[0].op
    if (
        narrowed is None
        or narrowed not in ops
        or narrowed.name != "cast"
        or narrowed.args[0].dtype != f32
        or readers[narrowed.result] != [second]
        or not is_zero(first.args[2])
        or readers[first.args[2]] != [first]
    ):
        raise Unfit("the first product does not go to the left of the second, as 16-bit floats")
    if not _fits(first, second):
        shown = " and ".join("{} x {}".format(*op.result.shape) for op in products)
        raise Unfit(f"neither warpgroups nor warps can compute products of {shown} of these dtypes")
    carried, scaling = _sums(second, loop, readers)
    maps: list[TensorMap] = []
    keys = _side(first, True, loop, readers, maps, 0)
    values = _side(second, False, loop, readers, maps, keys.nbytes) if keys is not None else None
    left = first.args[0]
    if not carried:
        raise Unfit("the sums of the second product are more than carried and scaled by rows")
    if keys is None or values is None:
        raise Unfit("the copy engine cannot bring a right operand as products want it")
    few = first.result.shape[0] <= FEW_ROWS
    if not _stays(left, path, few) or readers[left] != [first]:
        raise Unfit("the left operand of the first product is not loaded before the loop")
    form = Form(function, path, first, second, narrowed, scaling, keys, values, maps)
    if odd := [op.name for op in form.between if not _computes(op)]:
        raise Unfit(f"{odd[0]} between the products does not stay in registers")
    if scalars(form) is None:
        raise Unfit("where an operand lies depends on tiles, branches or what the loops carry")
    for op in form.between:
        if op.name == "reduce" and op.attrs["kind"] == "sum":
            total = _total(op, form, readers)
            if total is not None:
                form.partial[op] = total
    if few:
        if len(path) > 1:
            raise Unfit("few rows are shared out by keys, and the loop is in another one")
        form.shares = find_shares(function.body, loop, scaling, narrowed, second, form.between)
        # Nobody shares keys and values.
        form.maps[:] = [replace(spec, fetch=LINE) for spec in maps]
    return form


def _path(function: Function) -> list[Op] | None:
    """The loops around the products."""
    path: list[Op] = []
    block = function.body
    while True:
        loops = [op for op in block.ops if op.name == "for"]
        inside = [op for op in loops if any(o.name == "mma" for o in walk(op.regions[0]))]
        if not inside:
            break
        if len(inside) > 1 or any(op.name == "pieces" for op in block.ops):
            return None
        path.append(inside[0])
        block = inside[0].regions[0]
    return path or None


def _warps(keys: int) -> int:
    return next(n for n in range(MOST_WARPS, 0, -1) if keys // KEYS % n == 0)


def _fits(first: Op, second: Op) -> bool:
    (m, n), (rows, columns) = first.result.shape, second.result.shape
    depth = first.args[0].shape[1]
    if m <= FEW_ROWS:
        share = n // _warps(n)
        registers = -(-m // 8) * (depth // 8 + share // 4 + columns // 4)
        # Layouts have no place for one row that is padded.
        takes = m > 1 and registers <= FEW_REGISTERS
    else:
        registers = depth // 4 + n // 2 + n // 4 + columns // 2
        takes = m in (GROUP_ROWS, 2 * GROUP_ROWS) and registers <= MOST_REGISTERS
    dtypes = {v.dtype for op in (first, second) for v in op.args[:2]}
    return (
        takes
        and rows == m
        and n % KEYS == 0
        and n <= 256
        and columns % 64 == 0
        and columns <= 256
        and depth % 64 == 0
        and len(dtypes) == 1
        and dtypes <= {bf16, f16}
    )


def _sums(second: Op, loop: Op, readers: dict[Value, list[Op]]) -> tuple[bool, Op | None]:
    """Whether the sums of the second product are carried and nothing else; what scales them."""
    body = loop.regions[0]
    out = body.ops[-1]
    if readers.get(second.result) != [out]:
        return False, None
    carried = body.args[1 + out.args.index(second.result)]
    added = second.args[2]
    if added is carried:
        return readers[carried] == [second], None
    op = added.op
    if op is None or op.name != "mul" or op not in body.ops or readers[added] != [second]:
        return False, None
    factor = op.args[1] if op.args[0] is carried else op.args[0]
    spread = factor.op
    by_row = spread is not None and spread.name == "broadcast" and spread in body.ops
    fits = carried in op.args and readers[carried] == [op] and by_row
    return fits and readers[factor] == [op], op


def _total(op: Op, form: Form, readers: dict[Value, list[Op]]) -> Value | None:
    """What the loops carry in all, of a sum that is only added to that, perhaps scaled before."""
    adds = readers.get(op.result, [])
    if len(adds) != 1 or adds[0].name != "add":
        return None
    (add,) = adds
    before = add.args[1] if add.args[0] is op.result else add.args[0]
    at, reader, place = add.result, add, None
    if before.op is not None:
        if before.op.name != "mul" or readers[before] != [add]:
            return None
        reader = before.op
    for loop in reversed(form.path):
        body = loop.regions[0]
        out = body.ops[-1]
        if readers.get(at) != [out]:
            return None
        number = out.args.index(at)
        carried = body.args[1 + number]
        if readers.get(carried) != [reader]:
            return None
        if place is not None and reader.args[place] is not carried:
            return None
        at, reader, place = loop.results[number], loop, 3 + number
    return at if place is not None and is_zero(reader.args[place]) else None


def _side(
    product: Op,
    transposed: bool,
    loop: Op,
    readers: dict[Value, list[Op]],
    maps: list[TensorMap],
    offset: int,
) -> Side | None:
    """The right operand of a product if the copy engine can bring it; its map is added."""
    value, found = source_of(product.args[1])
    op = value.op
    if op is None or found != transposed or len(readers[value]) != 1 or op.name == "load_piece":
        return None
    loads = [a.op for a in op.args] if op.name == "concat" and op.attrs["axis"] == 0 else [op]
    specs = {_map(load) for load in loads if load in loop.regions[0].ops}
    if len(specs) != 1 or readers[product.args[1]] != [product]:
        return None
    (spec,) = specs
    rows, cols = value.shape
    kept = [load for load in loads if load is not None and readers[load.result] != []]
    alone = all(len(readers[load.result]) == 1 for load in kept)
    if spec is None or len(kept) != len(loads) or not alone or cols % COLUMNS:
        return None
    if spec not in maps:
        maps.append(spec)
    return Side(kept, rows, cols, maps.index(spec), offset)


def _map(load: Op | None) -> TensorMap | None:
    """Boxes by which the copy engine can bring a tile."""
    if load is None or load.name != "load":
        return None
    param: Param = load.attrs["param"]
    access: tuple[Access, ...] = load.attrs["access"]
    vector = 16 // param.dtype.itemsize
    kept = [a for a in access if a.kind != "point"]
    if (
        param.kind != "ref"
        or param.dtype not in (bf16, f16)
        or not param.aligned
        or param.strides[-1] != 1
        or any(s is None or s <= 0 or s % vector for s in param.strides[:-1])
        or load.attrs["fill"] != 0
        or not 2 <= len(access) <= MOST_AXES
        or any(a.kind not in ("block", "span", "full", "point") for a in access)
        or len(kept) != 2
        or access[-1].kind == "point"
        or 0 in param.shape
        # Eight rows are a period of the swizzle.
        or kept[0].size % 8
        or kept[0].size > MOST_ROWS
    ):
        return None
    box = tuple(1 if a.kind == "point" else a.size for a in access)
    return TensorMap(param.position, (*box[:-1], COLUMNS))


def _split_gathers(function: Function) -> None:
    """Pages gathered by numbers that a load gives become one load each, by a scalar."""
    readers = uses(function.body)

    def visit(block: Block) -> None:
        ops: list[Op] = []
        for op in block.ops:
            for region in op.regions:
                visit(region)
            load = op.args[0].op if op.name == "reshape" else None
            if load is None or load not in block.ops or readers[load.result] != [op]:
                ops.append(op)
                continue
            ops += _pages(op, load)
        block.ops = ops

    visit(function.body)
    remove_dead(function.body)


def _pages(reshape: Op, load: Op) -> list[Op]:
    """The operations in place of a reshape of gathered pages; the reshape if it is of others."""
    access: tuple[Access, ...] = load.attrs.get("access", ())
    numbers = load.args[access[0].arg].op if access and access[0].kind == "gather" else None
    if numbers is None or numbers.name != "load" or numbers.attrs["access"][-1].kind != "block":
        return [reshape]
    inner: tuple[Access, ...] = numbers.attrs["access"]
    if any(a.kind != "point" for a in inner[:-1]) or len(reshape.result.shape) != 2:
        return [reshape]
    count, page = load.result.shape[0], load.result.shape[1:]
    if (count * page[0], *page[1:]) != reshape.result.shape:
        return [reshape]
    ops: list[Op] = []

    def add(op: Op) -> Value:
        op.loc = load.loc
        ops.append(op)
        return op.result

    first = numbers.args[inner[-1].arg]
    size = add(make("const", [], value=count, dtype=i32))
    first = add(make("mul", [first, size]))
    tiles: list[Value] = []
    for i in range(count):
        at = add(make("add", [first, add(make("const", [], value=i, dtype=i32))]))
        number = Op("load", list(numbers.args), dict(numbers.attrs))
        number.args[inner[-1].arg] = at
        number.attrs["access"] = (*inner[:-1], Access("point", 1, inner[-1].arg))
        number.results = [Value(TileType((), numbers.result.dtype), number)]
        one = Op("load", list(load.args), dict(load.attrs))
        one.args[access[0].arg] = add(number)
        one.attrs["access"] = (Access("point", 1, access[0].arg), *access[1:])
        one.results = [Value(TileType(page, load.result.dtype), one)]
        tiles.append(add(one))
    joined = Op("concat", tiles, {"axis": 0}, reshape.results, loc=load.loc)
    reshape.result.op = joined
    return [*ops, joined]


def _stays(left: Value, path: list[Op], computed: bool) -> bool:
    """Whether the left operand is loaded, or perhaps computed, outside of the loops."""
    op = left.op
    if op is None or any(op in loop.regions[0].ops for loop in path):
        return False
    return computed or op.name == "load"


def _computes(op: Op) -> bool:
    """Whether an operation between the products is work on registers, or loads a scalar."""
    if op.name == "if":
        return all(o.name == "yield" or _computes(o) for r in op.regions for o in r.ops)
    if op.name == "load":
        return not op.result.shape
    return op.name in ELEMENTWISE or op.name in _REGISTERS


def scalars(form: Form) -> dict[Block, list[Op]] | None:
    """What whoever only copies computes as well, of the function's body and of each loop's.

    None where an address or a bound depends on more: on tiles, on what a loop carries, on a branch
    or on a `Mut`.
    """
    blocks = [form.function.body, *(loop.regions[0] for loop in form.path)]
    homes = {r: block for block in blocks for op in block.ops for r in op.results}
    counters = {loop.regions[0].args[0] for loop in form.path}
    wanted = [v for loop in form.path for v in loop.args[:3]]
    wanted += [v for side in (form.keys, form.values) for load in side.loads for v in load.args]
    needed: set[Op] = set()
    while wanted:
        v = wanted.pop()
        if v in counters:
            continue
        op = v.op
        if op is None or v not in homes or v.shape or op.regions or op.name == "load_piece":
            return None
        if op not in needed:
            needed.add(op)
            wanted += op.args
    return {block: [op for op in block.ops if op in needed] for block in blocks}

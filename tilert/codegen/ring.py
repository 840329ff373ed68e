"""Which kernels the pipelined schedule of sm_90a takes: boxes, warpgroups, order of pieces.

It takes a kernel with one loop over products whose operands are loaded as they are: tiles of 16-bit
floats of `Ref`s with rows that the copy engine can address, the right one transposed, and sums that
nothing else in the loop looks at. Of few rows, the left one may also be made of such a tile, each
element of its own: it passes through registers. Whatever comes before and after the loop is up to
the kernel. All others are compiled as they are for every target.
"""

from dataclasses import dataclass, field
from math import prod

from tilert.codegen.emit import Emitter
from tilert.codegen.layout import mma_swapped, thin_left
from tilert.codegen.lower import uses
from tilert.codegen.plan import Plan, make_group_plan, make_share_plan, operand_only, source_of
from tilert.codegen.unfit import Unfit
from tilert.dtypes import DType, bf16, f16, f32
from tilert.ir import Access, Block, Function, Op, Param, Value, walk
from tilert.ops import ELEMENTWISE
from tilert.tensor_map import LINE, MOST_AXES, MOST_ROWS, ROW_BYTES, TensorMap

__all__ = ["Box", "Ring", "find_ring", "plan_of", "scalars", "sums_of", "turn_over", "wanted"]

GROUP = 128
"""Threads of a warpgroup."""
PERIOD = 8
"""Rows of the swizzle."""
WARP, WARPS = 32, 4
"""Threads of a warp, and warps that share the columns of thin operands."""
GROUP_ROWS = 64
"""Rows of a product of a warpgroup."""
LEAST_GROUPED = 16
"""Rows from which on a warpgroup computes where it can, the rows of its products partly empty: so
many take warps longer, that bring the left operand to registers."""
MOST_COLUMNS = 256
"""Columns of one such product."""
MOST_SUMS = 160
"""Sums a thread: the other registers are for whatever follows the products."""
SPLIT_ROWS = 4
"""Rows that leave half of the instruction's columns free: for what is left of f32 when bf16 has
taken what it holds."""
COLUMNS = ROW_BYTES // 2
"""Elements of 16 bits of a row of a box."""
LEAST_READ = 8 << 10
"""Bytes of right operands a step from which on tiles of few rows are taken: what reads less a step
is better off with several blocks a multiprocessor."""


def _whole(rows: int) -> int:
    return -(-rows // PERIOD) * PERIOD


@dataclass(eq=False)
class Box:
    """An operand of the products: a tile that each step of the loop has copied.

    Attributes:
        load: where the tile comes from.
        rows, cols: its extents. It lies as boxes of `width` columns, one after the other.
        map: number of its tensor map.
        offset: of its first byte within a stage of its ring.
        together: whether one copy brings all boxes.
    """

    load: Op
    rows: int
    cols: int
    map: int
    offset: int
    together: bool

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.load.result.dtype.itemsize

    @property
    def width(self) -> int:
        """Columns of a box."""
        return ROW_BYTES // self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tile."""
        return self.rows * self.cols * self.itemsize

    @property
    def block(self) -> int:
        """Bytes from one box to the next."""
        return self.rows * ROW_BYTES if self.together else _whole(self.rows) * ROW_BYTES

    @property
    def room(self) -> int:
        """Bytes that the tile takes, up to where the swizzle begins again."""
        boxes = self.cols // self.width
        rows = _whole(self.rows * boxes) if self.together else _whole(self.rows) * boxes
        return rows * ROW_BYTES


@dataclass(frozen=True)
class Side:
    """Operands that one thread brings, through stages of their own.

    Attributes:
        boxes: what a stage holds.
        name: what begins the names of its barriers and counters in the text.
        once: those of them that this block alone reads.
    """

    boxes: tuple[Box, ...]
    name: str = ""
    once: frozenset[Box] = frozenset()

    @property
    def stage_bytes(self) -> int:
        """Shared memory of what one step copies."""
        return sum(box.room for box in self.boxes)

    @property
    def copied_bytes(self) -> int:
        """Bytes that one step copies."""
        return sum(box.nbytes for box in self.boxes)


@dataclass(eq=False)
class Ring:
    """The schedule of one kernel.

    Attributes:
        function: the kernel.
        loop: the loop over products.
        groups: warpgroups that share a tile of sums, along its rows and its columns.
        rows: of a tile of sums.
        boxes: tiles that are copied, by the value that they hold.
        lefts: left operands of thin products.
        read: tiles that threads take into registers.
        maps: what the copy engine reads.
        grouped: whether one warpgroup computes, of few rows, instead of warps or of several groups.
        cluster: blocks that share the steps of a piece.
        axes: axes of the grid along rows and columns of the product, where it has both.
    """

    function: Function
    loop: Op
    groups: tuple[int, int]
    rows: int
    boxes: dict[Value, Box] = field(default_factory=dict)
    lefts: set[Value] = field(default_factory=set)
    read: set[Value] = field(default_factory=set)
    maps: list[TensorMap] = field(default_factory=list)
    grouped: bool = False
    cluster: int = 1
    axes: tuple[int, int] | None = None

    @property
    def thin(self) -> bool:
        """Whether warps compute, that share the columns of the operands of few rows."""
        return self.rows < GROUP_ROWS and not self.grouped

    @property
    def few(self) -> bool:
        """Whether there are so few rows that reading the right operand is what takes time."""
        return self.thin or self.grouped

    @property
    def rights(self) -> set[Value]:
        """Tiles that are right operands."""
        products = (op for op in self.loop.regions[0].ops if op.name == "mma")
        return {source_of(op.args[1])[0] for op in products}

    @property
    def sides(self) -> list[Side]:
        """Operands by who brings them: one thread, or, of few rows, one a side."""
        if not self.few:
            return [Side(tuple(self.boxes.values()))]
        rights = frozenset(self.boxes[v] for v in self.rights)
        lefts = tuple(box for box in self.boxes.values() if box not in rights)
        found = Side(tuple(box for box in self.boxes.values() if box in rights), once=rights)
        return [found, Side(lefts, "left_")] if lefts else [found]

    @property
    def consumers(self) -> int:
        """Threads that compute."""
        return GROUP * prod(self.groups)

    def right(self, product: Op) -> Box:
        """Where the right operand of a product lies."""
        return self.boxes[source_of(product.args[1])[0]]


def find_ring(function: Function, grouped: bool = False, cluster: int = 1) -> Ring:
    """The schedule of a lowered function.

    Args:
        grouped: whether a warpgroup is to compute, of few rows.
        cluster: blocks that share the steps of a piece.

    Raises:
        Unfit: where it is not one for it.
    """
    loop = _only_loop(function)
    if loop is None:
        raise Unfit("its products of tiles are not all in one loop by themselves")
    products = [op for op in loop.regions[0].ops if op.name == "mma"]
    groups = _groups(products, grouped)
    if groups is None:
        shown = " and ".join("{} x {}".format(*op.result.shape) for op in products)
        raise Unfit(f"warpgroups cannot share sums of {shown} out")
    ring = Ring(function, loop, groups, products[0].result.shape[0])
    ring.grouped, ring.cluster = grouped, cluster
    if not _sums_stay(ring, products):
        raise Unfit("the loop does more with the sums than products, or has too many of them")
    taken = operand_only(function)
    for op in products:
        for position, side in enumerate(op.args[:2]):
            value, transposed = source_of(side)
            fits = transposed == (position == 1)
            if position == 0 and ring.thin:
                fits = fits and _add_left(ring, value)
            else:
                boxed = value in ring.boxes or (value in taken and _add_box(ring, value))
                fits = fits and boxed
            if not fits:
                which = "right" if position else "left"
                raise Unfit(f"the copy engine cannot bring a {which} operand as products want it")
    if ring.thin and sum(ring.boxes[v].nbytes for v in ring.rights) < LEAST_READ:
        raise Unfit(f"products of {ring.rows} rows read less than {LEAST_READ} bytes a step")
    if scalars(function, loop, wanted(ring)) is None:
        raise Unfit("where an operand lies depends on tiles, branches or what the loop carries")
    for part in ring.sides:
        offset = 0
        for box in part.boxes:
            box.offset = offset
            offset += box.room
    ring.axes = _axes(ring, products[0])
    return ring


def _only_loop(function: Function) -> Op | None:
    """The loop that has all products, none of them in a loop or branch of its own."""
    ops = list(walk(function.body))
    if any(op.name == "pieces" for op in ops):
        return None
    products = [op for op in ops if op.name == "mma"]
    loops = [op for op in function.body.ops if op.name == "for"]
    for loop in loops:
        inside = loop.regions[0].ops
        if any(op.name == "mma" for op in inside):
            whole = all(op in inside for op in products)
            return loop if whole and not any(op.regions for op in inside) else None
    return None


def _groups(products: list[Op], grouped: bool) -> tuple[int, int] | None:
    """Warpgroups along rows and columns: two where the tile can be halved."""
    shapes = {op.result.shape for op in products}
    if len(shapes) != 1:
        return None
    ((m, n),) = shapes
    if grouped:
        return (
            (1, 1)
            if LEAST_GROUPED <= m <= GROUP_ROWS and m % 8 == n % 8 == 0 and n <= MOST_COLUMNS
            else None
        )
    if m < GROUP_ROWS:
        return (1, 1) if (m % 8 == 0 or m == SPLIT_ROWS) and n <= MOST_COLUMNS else None
    if m % GROUP_ROWS or n % 8:
        return None
    if m % (2 * GROUP_ROWS) == 0:
        groups = (2, 1)
    elif n % 16 == 0 and n >= 64:
        groups = (1, 2)
    else:
        groups = (1, 1)
    return groups if n // groups[1] <= MOST_COLUMNS else None


def _sums_stay(ring: Ring, products: list[Op]) -> bool:
    """Whether the sums can stay in their registers while the products run: nothing else reads them.

    Every carried sum goes through one or more products and back to its place.
    """
    loop, body = ring.loop, ring.loop.regions[0]
    readers = uses(body)
    found = []
    for place, v in enumerate(body.args[1:]):
        chain: list[Op] = []
        at = v
        while len(readers.get(at, [])) == 1 and readers[at][0].name == "mma":
            op = readers[at][0]
            if at is not op.args[2]:
                return False
            chain.append(op)
            at = op.result
        if chain:
            if readers.get(at) != [body.ops[-1]] or body.ops[-1].args[place] is not at:
                return False
            found += chain
    m, n = products[0].result.shape
    carried = sum(1 for v in loop.results if v.op is loop and v.shape == (m, n))
    # Of few rows every warp has all sums.
    least = PERIOD if ring.thin else GROUP_ROWS
    sums = carried * max(m, least) * n // (WARP if ring.thin else ring.consumers)
    return set(found) == set(products) and sums <= MOST_SUMS


def _add_box(ring: Ring, value: Value, dtypes: tuple[DType, ...] = (bf16, f16)) -> bool:
    """Whether the copy engine can bring a tile of one of some types; if so, its box is added."""
    load = value.op
    if load is None or load.name != "load" or load not in ring.loop.regions[0].ops:
        return False
    param: Param = load.attrs["param"]
    access: tuple[Access, ...] = load.attrs["access"]
    vector = 16 // param.dtype.itemsize
    strides_fit = param.strides[-1] == 1 and all(
        s is not None and s > 0 and s % vector == 0 for s in param.strides[:-1]
    )
    box = tuple(1 if a.kind == "point" else a.size for a in access)
    kept = [a for a in access if a.kind != "point"]
    if (
        param.kind != "ref"
        or param.dtype not in dtypes
        or not param.aligned
        or not strides_fit
        or load.attrs["fill"] != 0
        or not 2 <= len(access) <= MOST_AXES
        or any(a.kind not in ("block", "span", "full", "point") for a in access)
        or len(kept) != 2
        or access[-1].kind == "point"
        or 0 in param.shape
    ):
        return False
    rows, cols = (a.size for a in kept)
    # Products of warpgroups take whole periods of the swizzle; sums need whole steps of k.
    width = ROW_BYTES // param.dtype.itemsize
    if rows > MOST_ROWS or cols % width or (rows % PERIOD and not ring.thin):
        return False
    extent = param.shape[-1]
    whole = extent is not None and extent % width == 0 and len(access) < MOST_AXES
    # One copy of all boxes takes the producer as long as one of a single box. It begins at a whole
    # one, as blocks do, and spans need not.
    whole = whole and access[-1].kind in ("block", "full")
    beside = cols // width if ring.few and whole and cols > width else 0
    spec = TensorMap(param.position, (*box[:-1], width), beside, LINE if ring.few else 2 * LINE)
    if spec not in ring.maps:
        ring.maps.append(spec)
    number = ring.maps.index(spec)
    ring.boxes[value] = Box(load, rows, cols, number, 0, beside > 0)
    return True


def _add_left(ring: Ring, value: Value) -> bool:
    """Whether a thin left operand is a tile that the copy engine can bring, or made of one; if so,
    it is noted."""
    body = ring.loop.regions[0].ops
    dtypes = (bf16, f16, f32) if ring.rows == SPLIT_ROWS else (bf16, f16)
    if value.dtype not in dtypes or value.shape[1] % (WARPS * 16):
        return False
    todo, seen = [value], set[Value]()
    while todo:
        v = todo.pop()
        op = v.op
        if v in seen or op not in body:
            continue
        seen.add(v)
        if op.name == "load" and v.shape == value.shape:
            if v in ring.boxes or _add_box(ring, v, (bf16, f16, f32)):
                ring.lefts.add(value)
                ring.read.add(v)
                return True
        elif op.name in ELEMENTWISE:
            todo += op.args
    return False


def plan_of(ring: Ring) -> Plan:
    """Layouts of those who compute."""
    if not ring.thin:
        return make_group_plan(ring.function, ring.groups)
    products = [op for op in ring.loop.regions[0].ops if op.name == "mma"]
    sums = {op: mma_swapped(op.result.shape[0], op.result.shape[1], WARPS) for op in products}
    lefts = {v: thin_left(v.shape[0], v.shape[1], WARPS) for v in ring.lefts}
    return make_share_plan(ring.function, ring.consumers, sums, lefts)


def wanted(ring: Ring) -> list[Value]:
    """What the producer has to know: how many steps there are, and where operands lie."""
    return [*ring.loop.args[:3], *(v for box in ring.boxes.values() for v in box.load.args)]


def scalars(function: Function, loop: Op, needs: list[Value]) -> tuple[list[Op], list[Op]] | None:
    """What whoever only copies computes as well: scalars before the loop, and in each step of it.

    None where one that it needs depends on more: on tiles, on what the loop carries, on a branch or
    on a `Mut`.
    """
    body = loop.regions[0]
    homes: dict[Value, Block] = {}
    for block in (function.body, body):
        homes |= {r: block for op in block.ops for r in op.results}
    needed: set[Op] = set()
    todo = list(needs)
    while todo:
        v = todo.pop()
        if v is body.args[0]:
            continue
        op = v.op
        if op is None or v not in homes or v.shape or op.regions or op.name == "load_piece":
            return None
        if op not in needed:
            needed.add(op)
            todo += op.args
    before = [op for op in function.body.ops if op in needed]
    return before, [op for op in body.ops if op in needed]


def _axes(ring: Ring, product: Op) -> tuple[int, int] | None:
    """Axes of the grid that number the rows and the columns of a product."""
    function, found = ring.function, []
    left = ring.boxes.get(source_of(product.args[0])[0]) or ring.boxes[next(iter(ring.read))]
    for load in (left.load, ring.right(product).load):
        access: Access = next(a for a in load.attrs["access"] if a.kind != "point")
        op = load.args[access.arg].op if access.kind == "block" else None
        if op is None or op.name != "program":
            return None
        found.append(op.attrs["axis"])
    rows, columns = found
    others = [i for i, n in enumerate(function.grid) if i not in found and n != 1]
    return (rows, columns) if rows != columns and len(others) <= 1 else None


def sums_of(loop: Op) -> list[Value]:
    """What the loop carries that products add to."""
    carried = zip(loop.results, loop.regions[0].ops[-1].args, strict=True)
    return [r for r, v in carried if v.op is not None and v.op.name == "mma"]


def turn_over(e: Emitter, stages: int, name: str = "") -> None:
    """Write the step to the next stage.

    Args:
        name: of the ring's side.
    """
    e.line(f"if (++{name}stage == {stages}) {{ {name}stage = 0; {name}turn ^= 1; }}")

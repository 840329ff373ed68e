"""The typed tile IR that the frontend builds and both backends read.

A function is one block of operations in SSA form; `for` and `if` nest blocks. Every value is a
tile of static shape (a scalar has shape `()`). Elementwise operations take operands of one shape:
broadcasts are explicit. What each operation means, the shapes and dtypes it takes and gives, is in
the table of `tilert.ops`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tilert.dtypes import DType

__all__ = [
    "Access",
    "Arg",
    "Block",
    "Function",
    "Loc",
    "Op",
    "Param",
    "TileType",
    "Value",
    "format_function",
    "walk",
]


@dataclass(frozen=True)
class Loc:
    """A place in the kernel's source: 1-based line, 0-based column."""

    filename: str
    line: int
    column: int


@dataclass(frozen=True)
class TileType:
    """Static shape and element type of a value."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


@dataclass(eq=False)
class Value:
    """One SSA value; `op` is None for a block argument."""

    type: TileType
    op: "Op | None" = None
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tile."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.type.dtype


@dataclass(frozen=True)
class Access:
    """How a load addresses one axis of an array.

    kind:
        "block"   element = arg * size + 0..size-1, axis kept
        "span"    element = arg + 0..size-1, axis kept
        "full"    element = 0..size-1 with size the whole (static) extent, axis kept
        "point"   element = arg, axis dropped
        "gather"  element = arg[j] for a 1-D tile arg of length size, axis kept
    arg: position of the index among the operation's operands, or -1 for "full".
    """

    kind: str
    size: int
    arg: int = -1


@dataclass(eq=False)
class Op:
    """One operation; its meaning is `tilert.ops.OPS[name]`."""

    name: str
    args: list[Value]
    attrs: dict[str, Any] = field(default_factory=dict)
    results: list[Value] = field(default_factory=list)
    regions: list["Block"] = field(default_factory=list)
    loc: Loc | None = None

    @property
    def result(self) -> Value:
        """The only result."""
        return self.results[0]


@dataclass(eq=False)
class Block:
    """Operations in order; the last is `yield` inside `for` and `if`."""

    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass(frozen=True)
class Param:
    """One array parameter of a specialised kernel.

    Attributes:
        position: index among the kernel's array parameters.
        kind: "mut" or "ref".
        shape: extents; None where run time.
        strides: in elements; None where run time.
        tile: piece shape of a Mut, None for a Ref.
        indexed: whether axis 0 of a Mut is placed through an index map (rule O7).
        aligned: whether the base address is a multiple of 16 bytes.
        accumulate: "add", "max" or "min" for a Mut that is only updated so (rules O2, O7).
        place: for each axis of a Mut the number of a program's piece, as (start, a step for each
            program coordinate); None where it is the program's coordinate on that axis.
    """

    name: str
    position: int
    kind: str
    dtype: DType
    shape: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    tile: tuple[int, ...] | None = None
    indexed: bool = False
    aligned: bool = True
    place: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    accumulate: str = ""


@dataclass(frozen=True)
class Arg:
    """One argument of the compiled kernel, in launch order.

    kind: "pointer" | "index" (pointer to the i32 index map of an indexed Mut) |
        "dim" (i32 extent) | "stride" (i64, elements) | "grid" (i32 extent of a grid axis).
    param: position of the array parameter (unused for "grid"). axis: for dim, stride and grid.
    """

    kind: str
    param: int = -1
    axis: int = -1


@dataclass(eq=False)
class Function:
    """A specialised kernel.

    Attributes:
        grid: extent of each grid axis, None where it is known only at launch.
    """

    name: str
    params: list[Param]
    grid: tuple[int | None, ...]
    body: Block
    filename: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def abi(self) -> list[Arg]:
        """The run-time arguments in the order in which every backend takes them."""
        args: list[Arg] = []
        for p in self.params:
            args.append(Arg("pointer", p.position))
            if p.indexed:
                args.append(Arg("index", p.position))
            args += [Arg("dim", p.position, i) for i, n in enumerate(p.shape) if n is None]
            args += [Arg("stride", p.position, i) for i, n in enumerate(p.strides) if n is None]
        args += [Arg("grid", -1, i) for i, n in enumerate(self.grid) if n is None]
        return args


def walk(block: Block) -> Iterator[Op]:
    """Every operation of a block and of the blocks inside it, in program order."""
    for op in block.ops:
        yield op
        for region in op.regions:
            yield from walk(region)


def format_function(function: Function) -> str:
    """The function as text: equal text means equal meaning."""
    names: dict[Value, str] = {}

    def name(value: Value) -> str:
        return names.setdefault(value, f"%{len(names)}")

    lines: list[str] = [f"kernel {function.name} grid={function.grid}"]
    for key in sorted(function.options):
        lines.append(f"  option {key} = {function.options[key]!r}")
    for p in function.params:
        lines.append(
            f"  {p.kind} {p.name}: {p.dtype.name} shape={p.shape} strides={p.strides}"
            f" tile={p.tile} indexed={p.indexed} aligned={p.aligned} place={p.place}"
            f" accumulate={p.accumulate!r}"
        )

    def emit(block: Block, depth: int) -> None:
        pad = "  " * depth
        if block.args:
            lines.append(pad + "^ " + ", ".join(f"{name(a)}: {a.type}" for a in block.args))
        for op in block.ops:
            left = ", ".join(f"{name(r)}: {r.type}" for r in op.results)
            attrs = " ".join(f"{k}={_shown(v)}" for k, v in sorted(op.attrs.items()))
            args = ", ".join(name(a) for a in op.args)
            lines.append(f"{pad}{left}{' = ' if left else ''}{op.name}({args}) {attrs}".rstrip())
            for region in op.regions:
                lines.append(pad + "{")
                emit(region, depth + 1)
                lines.append(pad + "}")

    emit(function.body, 1)
    return "\n".join(lines)


def _shown(attr: object) -> str:
    """An attribute; parameters, which the head describes, by name."""
    if isinstance(attr, Param):
        return attr.name
    if isinstance(attr, DType):
        return attr.name
    if isinstance(attr, Access):
        return f"{attr.kind} of {attr.size}" + (f" by args[{attr.arg}]" if attr.arg >= 0 else "")
    if isinstance(attr, tuple) and attr and isinstance(attr[0], Access):
        return f"[{', '.join(map(_shown, attr))}]"
    return repr(attr)

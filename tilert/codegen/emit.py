"""Writes a planned function as CUDA C++: values, elementwise work, control flow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilert.checks import Checks
from tilert.codegen.layout import Factor, Layout
from tilert.codegen.plan import Operand, Plan
from tilert.dtypes import DType, bf16, bool_, f8e4m3, f8e5m2, f16, f32, i8, i32, i64, u8, u32
from tilert.fault import Site
from tilert.ir import Block, Function, Op, Param, Value
from tilert.ops import FLOAT_FUNCTIONS

if TYPE_CHECKING:
    from tilert.codegen.ahead import Ahead

__all__ = ["Emitter", "c_name", "c_type"]

_C_TYPES = {
    f32: "float",
    bf16: "bf16",
    f16: "f16",
    f8e4m3: "f8e4m3",
    f8e5m2: "f8e5m2",
    i8: "i8",
    i32: "int",
    i64: "i64",
    u32: "u32",
    u8: "u8",
    bool_: "bool",
}
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
}
_CALL = {
    **{name: f"{name}f" for name in (*FLOAT_FUNCTIONS, "pow", "atan2")},
    "round": "rintf",
    "fma": "fmaf",
    "rsqrt": "op_rsqrt",
    "minimum": "op_minimum",
    "maximum": "op_maximum",
    "floordiv": "op_floordiv",
    "mod": "op_mod",
}
# Of operations that may be some ulps off, see `streaming.coarse`.
_COARSE = {"div": "quotient", "rsqrt": "rsqrtf"}
# Loops of at most this many known iterations are unrolled whole, longer ones by UNROLL.
WHOLE = 8
UNROLL = 4
# Operations of a loop body that is small.
SMALL_BODY = 12


def c_type(dtype: DType) -> str:
    """The C++ type of an element."""
    return _C_TYPES[dtype]


def c_name(param: Param) -> str:
    """The C++ name of a parameter; the prefix keeps users' names apart from generated ones."""
    return f"a_{param.name}"


class Emitter:
    """Lines of C++ for one function. Values are `name` (scalars) or `name[register]` (tiles).

    Attributes:
        checks: which checks are compiled in.
        sites: what each of them means.
        clean: whether nothing has used scratch so far.
        program: number of the present program, as C++.
        ahead: what comes before the wait for earlier kernels.
        early: whether it is a step that has its weights so that is written now.
        before_wait: lines that stand there.
        waits: the operation before which a kernel waits that reads ahead, and how.
        window: the registers of tiles that are written now, None for all. Whoever sets it sees to
            it that nothing written meanwhile needs another thread's elements.
    """

    def __init__(self, function: Function, plan: Plan, checks: Checks = Checks.NONE) -> None:
        self.function = function
        self.plan = plan
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[Value, str] = {}
        self.bases: dict[tuple[Layout, int], str] = {}
        self.head: list[str] = []
        self.scratch_bytes = 0
        self.clean = True
        self.counter = 0
        self.stage_of: dict[Operand, str] = {}
        self.gathers: dict[tuple[Value, tuple[Factor, ...]], tuple[str, Layout]] = {}
        self.loop_bounds: dict[Value, int] = {}
        self.helpers: set[str] = set()
        self.checks = checks
        self.sites: list[Site] = []
        self.program = "(int)blockIdx.x"
        self.window: tuple[int, int] | None = None
        self.ahead: Ahead | None = None
        self.early = False
        self.before_wait: list[str] = []
        self.waits: tuple[Op | None, list[str]] = None, []

    # -- text --------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Append a line at the present depth."""
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def braces(self, head: str = "") -> Iterator[None]:
        """A nested block."""
        self.line(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def fresh(self, prefix: str = "v") -> str:
        """A name not used before."""
        self.counter += 1
        return f"{prefix}{self.counter}"

    # -- values ------------------------------------------------------------------------------

    def fresh_for(self, v: Value) -> str:
        """A new name for a value that the caller declares."""
        name = self.names[v] = self.fresh()
        return name

    def layout(self, v: Value) -> Layout:
        """Layout of a tile."""
        return self.plan.layouts[v]

    def registers(self, v: Value) -> int:
        """Registers a thread needs for a value; 1 for a scalar."""
        return self.layout(v).registers if v.shape else 1

    def declare(self, v: Value) -> str:
        """Declare a value's variable."""
        name = self.names[v] = self.fresh()
        size = f"[{self.registers(v)}]" if v.shape else ""
        self.line(f"{c_type(v.dtype)} {name}{size};")
        return name

    def at(self, v: Value, register: str) -> str:
        """The element of a value that a register of its own layout holds."""
        return f"{self.names[v]}[{register}]" if v.shape else self.names[v]

    @contextmanager
    def each(self, count: int) -> Iterator[str]:
        """A fully unrolled loop over registers; yields the register variable."""
        if count == 1:
            yield "0"
            return
        first, end = self.window or (0, count)
        self.line("#pragma unroll")
        with self.braces(f"for (int r = {first}; r < {end}; ++r)"):
            yield "r"

    def index(self, layout: Layout, axis: int, register: str) -> str:
        """Index along an axis of the element in a register, as C++."""
        base, share = self.shares(layout, axis, register)
        return base if share == "0" else f"({base} + {share})"

    def shares(self, layout: Layout, axis: int, register: str) -> tuple[str, str]:
        """The two summands of `index`: the thread's and the register's."""
        if not layout.axes[axis]:
            return "0", "0"
        key = (layout, axis)
        if key not in self.bases:
            name = self.bases[key] = f"at{len(self.bases)}"
            self.head.append(
                f"  const int {name} = {layout.thread_expr(axis, '(int)threadIdx.x')};"
            )
        return self.bases[key], layout.register_expr(axis, register)

    def flat(self, layout: Layout, register: str) -> str:
        """Row-major position of an element within its tile, as C++."""
        text = "0"
        for axis, n in enumerate(layout.shape):
            i = self.index(layout, axis, register)
            text = i if text == "0" else f"({text} * {n} + {i})"
        return text

    def inside(self, layout: Layout, register: str) -> str:
        """C++ condition that a register holds an element of the tile, "" where all do."""
        parts = [
            f"{self.index(layout, i, register)} < {n}"
            for i, n in enumerate(layout.shape)
            if layout.padded(i)
        ]
        return " && ".join(parts)

    # -- blocks ------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        """Emit operations in order, up to a closing yield."""
        from tilert.codegen import movement

        ops = [op for op in block.ops if op.name != "yield"]
        while ops:
            together = self.joint(ops)
            if len(together) > 1:
                movement.reduce(self, *together)
            else:
                self.op(ops[0])
            del ops[: len(together) or 1]

    def joint(self, ops: list[Op]) -> list[Op]:
        """The reductions that operations begin with, of which none needs another."""
        found: list[Op] = []
        for op in ops:
            if op.name != "reduce" or any(other.result in op.args for other in found):
                break
            found.append(op)
        return found

    def op(self, op: Op) -> None:
        """Emit one operation."""
        from tilert.codegen import ahead, control, debug, grid, matmul, memory, movement, tile_moves

        if op is self.waits[0]:
            self.lines += self.waits[1]
        if self.early and self.ahead is not None and op in self.ahead.loads:
            ahead.take(self, self.ahead, op)
            return
        handlers: dict[str, Callable[[Emitter, Op], None]] = {
            "load": memory.load,
            "load_piece": memory.load_piece,
            "store_piece": memory.store_piece,
            "accumulate_piece": memory.accumulate_piece,
            "print": debug.print_,
            "check": debug.check,
            "mma": matmul.mma,
            "reduce": movement.reduce,
            "broadcast": movement.broadcast,
            "reshape": movement.reshape,
            "transpose": movement.transpose,
            "permute": tile_moves.permute,
            "slice": tile_moves.slice_,
            "concat": tile_moves.concat,
            "take": tile_moves.take,
            "scan": tile_moves.scan,
            "sort": tile_moves.sort,
            "for": control.for_loop,
            "if": control.if_else,
            "pieces": grid.pieces,
        }
        special = handlers.get(op.name)
        if special is not None:
            special(self, op)
        else:
            self.elementwise(op)

    def elementwise(self, op: Op) -> None:
        """Constants, coordinates and everything that works element by element."""
        result = op.result
        self.declare(result)
        factors = self.plan.triples.get(op)
        self.helpers |= {"triple"} if factors else set()
        with self.each(self.registers(result)) as r:
            args = [self.at(a, r) for a in factors or op.args]
            text = (
                f"product_of_three({', '.join(args)})" if factors else self.expression(op, args, r)
            )
            self.line(f"{self.at(result, r)} = {text};")

    def expression(self, op: Op, args: list[str], register: str) -> str:
        """C++ of one element of an elementwise result."""
        result = op.result
        if op.name == "const":
            return literal(op.attrs["value"], result.dtype)
        if op.name == "program":
            return f"p{op.attrs['axis']}"
        if op.name == "dim":
            return self.dim(op.attrs["param"], op.attrs["axis"])
        if op.name == "iota":
            return self.index(self.layout(result), 0, register)
        if op.name == "select":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if op.name in ("philox", "normal"):
            self.helpers.add(op.name)
            word = f".w[{op.attrs['word']}]" if op.name == "philox" else ""
            return f"{op.name}({', '.join(args)}){word}"
        if op.name == "cast":
            if op.args[0].dtype.is_float and result.dtype.is_int:
                self.helpers.add("cut")
            return convert(args[0], op.args[0].dtype, result.dtype)
        if op.name == "bitcast":
            return bitcast(args[0], op.args[0].dtype, result.dtype)
        operand = op.args[0].dtype
        narrow = operand.is_narrow
        if narrow:
            args = [f"f32_of({a})" for a in args]
        if op in self.plan.coarse:
            return f"{_COARSE[op.name]}({', '.join(args)})"
        if op.name == "rsqrt":
            self.helpers.add("rsqrt")
        text = _formula(op.name, args, operand)
        return (
            f"to<{c_type(operand)}>::from({text})" if narrow and result.dtype == operand else text
        )

    def dim(self, param: Param, axis: int) -> str:
        """Extent of an axis, as C++."""
        n = param.shape[axis]
        return str(n) if n is not None else f"{c_name(param)}_dim{axis}"

    def stride(self, param: Param, axis: int) -> str:
        """Stride of an axis in elements, as C++."""
        n = param.strides[axis]
        return f"{n}LL" if n is not None else f"{c_name(param)}_stride{axis}"

    # -- scratch -----------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> str:
        """C++ pointer to scratch in shared memory, for use between two barriers."""
        self.scratch_bytes = max(self.scratch_bytes, nbytes)
        self.clean = False
        return "scratch"

    def meet(self, nbytes: int) -> None:
        """Scratch of so many bytes, behind a barrier: threads may still read what it held. A first
        use needs none, where nothing comes around again."""
        if not (self.clean and self.plan.streams and self.depth == 1):
            self.line("__syncthreads();")
        self.scratch(nbytes)


def _formula(name: str, args: list[str], dtype: DType) -> str:
    if name in _INFIX:
        return f"{args[0]} {_INFIX[name]} {args[1]}"
    if name == "neg":
        return f"-{args[0]}"
    if name == "not":
        return f"!{args[0]}" if dtype == bool_ else f"~{args[0]}"
    if name == "isnan":
        return f"{args[0]} != {args[0]}"
    if name in ("isinf", "isfinite"):
        infinity = literal(float("inf"), f32)
        return f"fabsf({args[0]}) {'==' if name == 'isinf' else '<'} {infinity}"
    if name == "abs":
        return (
            f"fabsf({args[0]})" if dtype.is_float else f"({args[0]} < 0 ? -{args[0]} : {args[0]})"
        )
    return f"{_CALL[name]}({', '.join(args)})"


def literal(value: float | bool, dtype: DType) -> str:
    """A constant as C++."""
    if dtype == bool_:
        return "true" if value else "false"
    if dtype.is_int:
        if dtype == u32:
            return f"{int(value)}u"
        if dtype == i64:
            return f"{int(value)}LL"
        return f"(-{2**31 - 1} - 1)" if value == -(2**31) else str(int(value))
    if value != value:
        text = "__int_as_float(0x7fffffff)"
    elif value in (float("inf"), float("-inf")):
        text = f"__int_as_float({'0x7f800000' if value > 0 else '0xff800000'})"
    else:
        text = f"(float){float(value)!r}"
    return text if dtype == f32 else f"to<{c_type(dtype)}>::from({text})"


def convert(text: str, source: DType, target: DType) -> str:
    """A cast as C++."""
    if source == target:
        return text
    if source.is_float:
        text = f"f32_of({text})"
        if target.is_float:
            return text if target == f32 else f"to<{c_type(target)}>::from({text})"
        return f"{text} != 0.0f" if target == bool_ else f"cut<{c_type(target)}>::from({text})"
    if target.is_float:
        text = f"(float){text}"
        return text if target == f32 else f"to<{c_type(target)}>::from({text})"
    return f"{text} != 0" if target == bool_ else f"({c_type(target)}){text}"


def bitcast(text: str, source: DType, target: DType) -> str:
    """A reinterpretation as C++."""
    words = {(f32, u32): "__float_as_uint", (u32, f32): "__uint_as_float"}
    words |= {(f32, i32): "__float_as_int", (i32, f32): "__int_as_float"}
    if (source, target) in words:
        return f"{words[source, target]}({text})"
    if source.is_narrow or target.is_narrow:
        # Structures around the bits.
        bits = f"{text}.x" if source.is_narrow else f"(u8){text}"
        return f"{c_type(target)}{{{bits}}}" if target.is_narrow else f"({c_type(target)}){bits}"
    return f"({c_type(target)}){text}"

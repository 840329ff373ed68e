"""The table of operations read slowly, and comparisons of the cpu backend with it.

One program after the other, one operation at a time; sums and products in float64.
"""

import builtins
import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tilert.backends import cpu
from tilert.backends.cpu_numbers import normal as normal_deviate
from tilert.backends.cpu_numbers import philox_block
from tilert.dtypes import DType, dtype_of
from tilert.ir import Access, Block, Function, Op, Param
from tilert.ops import FLOAT_FUNCTIONS, make

__all__ = [
    "RNG",
    "Reference",
    "both",
    "compare",
    "elementwise_function",
    "ints",
    "normal",
    "params_of",
]


class Reference:
    """Runs a function program by program."""

    def __init__(self, function: Function, arrays: list, maps: dict, grid: tuple) -> None:
        self.function, self.arrays, self.maps, self.grid = function, arrays, maps, grid

    def run(self) -> None:
        with np.errstate(all="ignore"):
            for program in itertools.product(*(range(n) for n in self.grid)):
                self.block(self.function.body, {}, program)

    def block(self, block: Block, env: dict, program: tuple) -> list:
        for op in block.ops:
            args = [env[a] for a in op.args]
            if op.name == "yield":
                return args
            results = self.op(op, args, env, program)
            for value, result in zip(op.results, results, strict=True):
                env[value] = np.asarray(result).astype(value.dtype.numpy).reshape(value.shape)
        return []

    def op(self, op: Op, args: list, env: dict, program: tuple) -> list:
        at = op.attrs
        if op.name == "for":
            carried = args[3:]
            body = op.regions[0]
            for i in range(int(args[0]), int(args[1]), int(args[2])):
                env |= dict(zip(body.args, [np.int32(i), *carried], strict=True))
                carried = self.block(body, env, program)
            return carried
        if op.name == "if":
            return self.block(op.regions[0 if args[0] else 1], env, program)
        if op.name == "program":
            return [program[at["axis"]]]
        if op.name == "dim":
            return [self.arrays[at["param"].position].shape[at["axis"]]]
        if op.name == "load":
            return [self.load(at, args)]
        if op.name == "load_piece":
            return [self.piece(at["param"], program)]
        if op.name == "store_piece":
            self.store(at["param"], program, args[0])
            return []
        if op.name == "pieces":
            return self.block(op.regions[0], env, program)
        if op.name in ("print", "check"):
            return []
        if op.name == "sort":
            return sort(op, *args)
        return [PURE[op.name](op, *args)]

    def load(self, at: dict, args: list) -> np.ndarray:
        array = self.arrays[at["param"].position]
        index, kept = [], []
        for a in at["access"]:
            start = 0 if a.arg < 0 else args[a.arg].astype(np.int64)
            if a.kind == "gather":
                index.append(start)
            elif a.kind == "point":
                index.append(start.reshape(1))
            else:
                size = a.size if a.kind == "block" else 1
                index.append(start * size + np.arange(a.size))
            kept.append(a.kind != "point")
        out = np.full([len(i) for i in index], at.get("fill", 0), array.dtype)
        for where_ in np.ndindex(out.shape):
            at_ = tuple(int(i[j]) for i, j in zip(index, where_, strict=True))
            if all(0 <= x < n for x, n in zip(at_, array.shape, strict=True)):
                out[where_] = array[at_]
        return out.reshape([len(i) for i, k in zip(index, kept, strict=True) if k])

    def window(self, param: Param, program: tuple) -> tuple | None:
        array = self.arrays[param.position]
        cut = []
        for axis, (n, size) in enumerate(zip(array.shape, param.tile, strict=True)):
            start = program[axis] * size
            if axis == 0 and param.indexed:
                start = int(self.maps[param.position][program[0]])
                if not 0 <= start < n:
                    return None
            cut.append(slice(start, min(start + size, n)))
        return tuple(cut)

    def piece(self, param: Param, program: tuple) -> np.ndarray:
        out = np.zeros(param.tile, param.dtype.numpy)
        cut = self.window(param, program)
        if cut is not None:
            part = self.arrays[param.position][cut]
            out[tuple(slice(0, n) for n in part.shape)] = part
        return out

    def store(self, param: Param, program: tuple, value: np.ndarray) -> None:
        cut = self.window(param, program)
        if cut is not None:
            part = self.arrays[param.position][cut]
            part[...] = value[tuple(slice(0, n) for n in part.shape)]


def _f64(f: Callable) -> Callable:
    return lambda op, *args: f(*(a.astype(np.float64) for a in args))


def _ints(f: Callable) -> Callable:
    return lambda op, *args: f(*args)


def _wide(op: Op, x: np.ndarray) -> np.ndarray:
    dtype = op.args[0].dtype
    return x.astype(np.float64) if dtype.is_float else x.astype(np.int64) if dtype.is_int else x


def _reduce(op: Op, x: np.ndarray) -> np.ndarray:
    kind, axis = op.attrs["kind"], op.attrs["axis"]
    return getattr(np, kind)(_wide(op, x), axis)


def _scan(op: Op, x: np.ndarray) -> np.ndarray:
    meaning = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    return meaning[op.attrs["kind"]].accumulate(_wide(op, x), op.attrs["axis"])


def sort(op: Op, x: np.ndarray) -> list:
    """Line by line, by Python's own sort: NaN is the largest, equal elements keep their order."""
    axis, down = op.attrs["axis"], op.attrs["descending"]
    lines = np.moveaxis(_wide(op, x), axis, -1)
    places = np.empty(lines.shape, np.int64)
    for at in np.ndindex(lines.shape[:-1]):
        keys = [(bool(v != v), 0 if v != v else v) for v in lines[at].tolist()]
        # Sorting backwards keeps the order of equal elements too.
        places[at] = sorted(range(len(keys)), key=keys.__getitem__, reverse=down)
    places = np.moveaxis(places, -1, axis)
    return [np.take_along_axis(x, places, axis), places]


def _take(op: Op, x: np.ndarray, index: np.ndarray) -> np.ndarray:
    out = np.zeros(index.shape, x.dtype)
    axis = op.attrs["axis"]
    for at in np.ndindex(index.shape):
        i = int(index[at])
        if 0 <= i < x.shape[axis]:
            out[at] = x[(*at[:axis], i, *at[axis + 1 :])]
    return out


def _slice(op: Op, x: np.ndarray) -> np.ndarray:
    at = op.attrs
    places = [
        np.arange(n) * step + first
        for first, step, n in zip(at["start"], at["step"], at["shape"], strict=True)
    ]
    return x[np.ix_(*places)]


def _cast(op: Op, x: np.ndarray) -> np.ndarray:
    source, target = op.args[0].dtype, op.attrs["dtype"]
    if source.is_float and target.is_int:
        info = np.iinfo(target.numpy)
        whole = [0 if v != v else v for v in x.astype(np.float64).ravel().tolist()]
        cut = [int(builtins.min(builtins.max(v, info.min), info.max)) for v in whole]
        return np.array(cut, target.numpy).reshape(x.shape)
    if target.is_float and target.bits == 8:
        x = np.clip(x.astype(np.float64), -target.largest, target.largest)
    return x.astype(target.numpy)


def _philox(op: Op, k0: Any, k1: Any, c0: Any, c1: Any) -> np.ndarray:
    return philox_block((k0, k1), (c0, c1, 0, 0))[op.attrs["word"]]


def _mma(op: Op, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    wide = np.int64 if op.args[0].dtype.is_int else np.float64
    return a.astype(wide) @ b.astype(wide) + c


PURE: dict[str, Callable] = {
    "const": lambda op: np.asarray(op.attrs["value"]).astype(op.attrs["dtype"].numpy),
    "iota": lambda op: np.arange(op.attrs["size"]),
    "add": _ints(lambda a, b: a + b),
    "sub": _ints(lambda a, b: a - b),
    "mul": _ints(lambda a, b: a * b),
    "div": _f64(lambda a, b: a / b),
    "floordiv": _ints(lambda a, b: a // b),
    "mod": _ints(lambda a, b: a % b),
    "minimum": _ints(np.minimum),
    "maximum": _ints(np.maximum),
    "neg": _ints(np.negative),
    "abs": _ints(np.abs),
    **{n: _f64(getattr(np, n)) for n in FLOAT_FUNCTIONS if n not in ("erf", "rsqrt")},
    "erf": _f64(np.vectorize(math.erf, otypes=[float])),
    "rsqrt": _f64(lambda a: 1 / np.sqrt(a)),
    "pow": _f64(np.power),
    "atan2": _f64(np.arctan2),
    "fma": _f64(lambda a, b, c: a * b + c),
    "isnan": _f64(np.isnan),
    "isinf": _f64(np.isinf),
    "isfinite": _f64(np.isfinite),
    "and": _ints(lambda a, b: a & b),
    "or": _ints(lambda a, b: a | b),
    "xor": _ints(lambda a, b: a ^ b),
    "not": _ints(lambda a: ~a),
    "shl": _ints(lambda a, b: a << b),
    "shr": _ints(lambda a, b: a >> b),
    "eq": _ints(lambda a, b: a == b),
    "ne": _ints(lambda a, b: a != b),
    "lt": _ints(lambda a, b: a < b),
    "le": _ints(lambda a, b: a <= b),
    "gt": _ints(lambda a, b: a > b),
    "ge": _ints(lambda a, b: a >= b),
    "select": _ints(np.where),
    "cast": _cast,
    "bitcast": lambda op, x: x.view(op.attrs["dtype"].numpy),
    "broadcast": lambda op, x: np.broadcast_to(x, op.attrs["shape"]),
    "reshape": lambda op, x: x.reshape(op.attrs["shape"]),
    "transpose": lambda op, x: x.T,
    "permute": lambda op, x: x.transpose(op.attrs["axes"]),
    "slice": _slice,
    "concat": lambda op, *xs: np.concatenate(xs, op.attrs["axis"]),
    "take": _take,
    "reduce": _reduce,
    "scan": _scan,
    "philox": _philox,
    "normal": lambda op, *words: normal_deviate(*words),
    "mma": _mma,
}


def params_of(kernel: Any, arrays: list, tiled: dict[int, tuple], indexed: set[int]) -> tuple:
    """The parameter types of a call whose Muts (positions in `tiled`) have these pieces."""
    decls = [d for d in kernel.decls if d.kind != "const"]
    return tuple(
        Param(
            d.name,
            i,
            d.kind,
            dtype_of(a.dtype),
            tuple(None if axis in d.dyn else n for axis, n in enumerate(a.shape)),
            tuple(None for _ in a.strides),
            tiled.get(i),
            i in indexed,
        )
        for i, (d, a) in enumerate(zip(decls, arrays, strict=True))
    )


def both(
    kernel: Any,
    arrays: list,
    tiled: dict[int, tuple],
    maps: dict[int, np.ndarray] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    **consts: Any,
) -> list[np.ndarray]:
    """Runs a kernel on copies of the arrays on the backend and in the reference; compares all."""
    maps = maps or {}
    params = params_of(kernel, arrays, tiled, set(maps))
    first = next(iter(tiled))
    grid = tuple(-(-n // t) for n, t in zip(arrays[first].shape, tiled[first], strict=True))
    if first in maps:
        grid = (len(maps[first]), *grid[1:])
    # All Muts agree on the grid, which has trailing ones for the shorter of them.
    grid += (1,) * (builtins.max(len(t) for t in tiled.values()) - len(grid))
    function = kernel.specialize(params, grid, tuple(consts.items()))
    return compare(function, arrays, maps, grid, rtol, atol)


def compare(
    function: Function,
    arrays: list,
    maps: dict,
    grid: tuple,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> list[np.ndarray]:
    got = [a.copy() for a in arrays]
    want = [a.copy() for a in arrays]
    launch = cpu.compile(function).bind(got, maps, grid)
    launch()
    Reference(function, want, maps, grid).run()
    for g, w in zip(got, want, strict=True):
        if g.dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            g64, w64 = g.astype(np.float64), w.astype(np.float64)
            np.testing.assert_allclose(g64, w64, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(g, w)
    return got


RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(low: int, high: int, *shape: int) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(np.int32)


def elementwise_function(
    name: str, dtypes: list[DType], out: DType, form: str, attrs: dict
) -> tuple[Function, tuple[int, ...]]:
    """out[i] = op(inputs[i]) over one of: a uniform scalar, a scalar a program, tiles."""
    n, tile = (1, 1) if form == "uniform" else (12, 1 if form == "scalars" else 4)
    params = [
        Param("out", 0, "mut", out, (n,), (1,), (tile,)),
        *(Param(f"x{i}", i + 1, "ref", d, (n,), (1,)) for i, d in enumerate(dtypes)),
    ]
    block = Block()
    at = make("program", [], axis=0)
    block.ops.append(at)
    values = []
    for p in params[1:]:
        kind = "block" if form == "tiles" else "point"
        load = make("load", [at.result], param=p, access=(Access(kind, tile, 0),), fill=0)
        block.ops.append(load)
        values.append(load.result)
    op = make(name, values, **attrs)
    block.ops.append(op)
    value = op.result
    if form != "tiles":
        wide = make("broadcast", [value], shape=(tile,))
        block.ops.append(wide)
        value = wide.result
    block.ops.append(make("store_piece", [value], param=params[0]))
    return Function(name, params, (n // tile,), block), (n // tile,)

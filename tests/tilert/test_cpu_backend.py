"""The cpu backend against a slow reading of the table: one program, one operation at a time."""

import builtins
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilert
from tilert import Const, Dyn, Mut, Ref, bf16, f16, f32, i32, u8, u32
from tilert.backends import cpu
from tilert.dtypes import DType, bool_, dtype_of, i64
from tilert.ir import Access, Block, Function, Op, Param
from tilert.language import argmax, iota, max, mma, rsqrt, span, sum, tiles, where, zeros
from tilert.ops import make

# The meaning, in loops


class Reference:
    """Runs a function program by program; sums and products in float64."""

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


def _reduce(op: Op, x: np.ndarray) -> np.ndarray:
    kind, axis = op.attrs["kind"], op.attrs["axis"]
    if kind == "argmax":
        return np.argmax(x.astype(np.float64), axis)
    wide = x.astype(np.float64) if op.args[0].dtype.is_float else x.astype(np.int64)
    return {"sum": np.sum, "max": np.max, "min": np.min}[kind](wide, axis)


def _mma(op: Op, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64) + c


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
    "exp": _f64(np.exp),
    "exp2": _f64(np.exp2),
    "log": _f64(np.log),
    "log2": _f64(np.log2),
    "sqrt": _f64(np.sqrt),
    "rsqrt": _f64(lambda a: 1 / np.sqrt(a)),
    "sin": _f64(np.sin),
    "cos": _f64(np.cos),
    "tanh": _f64(np.tanh),
    "floor": _f64(np.floor),
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
    "cast": lambda op, x: x.astype(op.attrs["dtype"].numpy),
    "bitcast": lambda op, x: x.view(op.attrs["dtype"].numpy),
    "broadcast": lambda op, x: np.broadcast_to(x, op.attrs["shape"]),
    "reshape": lambda op, x: x.reshape(op.attrs["shape"]),
    "transpose": lambda op, x: x.T,
    "reduce": _reduce,
    "mma": _mma,
}


# Helpers


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


FLOATS, INTS = (f32, bf16, f16), (i32, u32)
UNARY = "neg abs exp exp2 log log2 sqrt rsqrt sin cos tanh floor".split()  # noqa: SIM905
BINARY_INT = "add sub mul floordiv mod minimum maximum and or xor shl shr".split()  # noqa: SIM905
CASES: list[tuple[str, list[DType], DType, dict]] = []
for _d in FLOATS:
    for _n in ["add", "sub", "mul", "div", "minimum", "maximum"]:
        CASES.append((_n, [_d, _d], _d, {}))
    for _n in UNARY:
        CASES.append((_n, [_d], _d, {}))
    for _n in ["eq", "ne", "lt", "le", "gt", "ge"]:
        CASES.append((_n, [_d, _d], bool_, {}))
    CASES.append(("select", [bool_, _d, _d], _d, {}))
    for _to in (f32, bf16, f16, i32, bool_):
        CASES.append(("cast", [_d], _to, {"dtype": _to}))
for _d in INTS:
    for _n in BINARY_INT:
        CASES.append((_n, [_d, _d], _d, {}))
    for _n in ("neg", "abs", "not"):
        CASES.append((_n, [_d], _d, {}))
    for _n in ["eq", "ne", "lt", "le", "gt", "ge"]:
        CASES.append((_n, [_d, _d], bool_, {}))
    CASES.append(("select", [bool_, _d, _d], _d, {}))
    for _to in (f32, bf16, i32, u32, i64, u8, bool_):
        CASES.append(("cast", [_d], _to, {"dtype": _to}))
for _n in ("and", "or", "xor", "eq"):
    CASES.append((_n, [bool_, bool_], bool_, {}))
CASES.append(("not", [bool_], bool_, {}))
CASES += [("cast", [bool_], d, {"dtype": d}) for d in (i32, f32)]
CASES += [
    ("bitcast", [a], b, {"dtype": b})
    for a, b in ((f32, u32), (u32, f32), (i32, u32), (u32, i32), (f32, i32))
]


def sample_values(name: str, position: int, dtype: DType, n: int) -> np.ndarray:
    if dtype == bool_:
        return RNG.integers(0, 2, n).astype(np.bool_)
    if dtype.is_float:
        x = RNG.standard_normal(n) * 3
        return (np.abs(x) if "log" in name or "sqrt" in name else x).astype(dtype.numpy)
    if name in ("shl", "shr") and position == 1:
        return RNG.integers(0, 32, n).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    wide = RNG.integers(info.min, info.max, n, endpoint=True).astype(dtype.numpy)
    if name in ("floordiv", "mod") and position == 1:
        small = RNG.integers(1, 9, n) * (RNG.choice([-1, 1], n) if dtype.kind == "i" else 1)
        return small.astype(dtype.numpy)
    return wide


@pytest.mark.parametrize("form", ["uniform", "scalars", "tiles"])
@pytest.mark.parametrize(
    ("name", "dtypes", "out", "attrs"),
    CASES,
    ids=[f"{n}-{'-'.join(d.name for d in ds)}-{o.name}" for n, ds, o, _ in CASES],
)
def test_elementwise(name: str, dtypes: list[DType], out: DType, attrs: dict, form: str) -> None:
    function, grid = elementwise_function(name, dtypes, out, form, attrs)
    n = function.params[0].shape[0]
    arrays = [np.zeros(n, out.numpy)]
    arrays += [sample_values(name, i, d, n) for i, d in enumerate(dtypes)]
    if name == "cast" and out in INTS and dtypes[0].is_float:
        arrays[1] = (normal(n) * 100).astype(dtypes[0].numpy)
    exact = out.bits == 16 and name not in ("sin", "cos", "tanh", "exp", "exp2", "log", "log2")
    # A 16-bit result is rounded once: the reference rounds the exact one.
    compare(function, arrays, {}, grid, rtol=0 if exact else 1e-2 if out.bits == 16 else 2e-6)


@pytest.mark.parametrize("form", ["uniform", "tiles"])
def test_nan_and_wrap_rules(form: str) -> None:
    n = 1 if form == "uniform" else 12
    nan, one = np.full(n, np.nan, np.float32), np.ones(n, np.float32)
    for name in ("minimum", "maximum"):
        for pair in ([nan, one], [one, nan]):
            function, grid = elementwise_function(name, [f32, f32], f32, form, {})
            out = np.zeros(n, np.float32)
            cpu.compile(function).bind([out, *pair], {}, grid)()
            assert np.isnan(out).all()
    function, grid = elementwise_function("add", [i32, i32], i32, form, {})
    out, top = np.zeros(n, np.int32), np.full(n, 2**31 - 1, np.int32)
    cpu.compile(function).bind([out, top, np.ones(n, np.int32)], {}, grid)()
    assert (out == -(2**31)).all()


@pytest.mark.parametrize("dtype", [f32, bf16, f16, i32, u32])
@pytest.mark.parametrize("kind", ["sum", "max", "min", "argmax"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("programs", [1, 3])
def test_reductions(dtype: DType, kind: str, axis: int, programs: int) -> None:
    shape, rest = (6, 5), ((5,), (6,))[axis]
    result = i32 if kind == "argmax" else dtype
    params = [
        Param("out", 0, "mut", result, (programs, *rest), (1, 1), (1, *rest)),
        Param("x", 1, "ref", dtype, (programs, *shape), (1, 1, 1)),
    ]
    block = Block()
    at = make("program", [], axis=0)
    access = (Access("point", 1, 0), Access("full", 6), Access("full", 5))
    load = make("load", [at.result], param=params[1], access=access, fill=0)
    reduce = make("reduce", [load.result], axis=axis, kind=kind)
    flat = make("reshape", [reduce.result], shape=(1, *rest))
    block.ops += [at, load, reduce, flat, make("store_piece", [flat.result], param=params[0])]
    function = Function("reduce", params, (programs, 1), block)
    x = RNG.integers(0, 4, (programs, *shape)).astype(dtype.numpy)
    out = np.zeros((programs, *rest), result.numpy)
    compare(function, [out, x], {}, (programs, 1))


def test_sum_of_bf16_accumulates_in_f32() -> None:
    @tilert.kernel
    def total(y: Mut, x: Ref):
        y.store(sum(x[:], axis=0, keepdims=True))

    x = np.full(1000, 1.0, ml_dtypes.bfloat16)
    y = np.zeros(1, ml_dtypes.bfloat16)
    got = both(total, [y, x], {0: (1,)})
    assert float(got[0][0]) == 1000.0


# Matrix products


@tilert.kernel
def linear(y: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=bk):
        acc = mma(x[m, k], w[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def product_nn(y: Mut[Dyn], a: Ref[Dyn], b: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=bk):
        acc = mma(a[m, k], b[k, n], acc)
    y.store(acc)


@tilert.kernel
def norm_linear(y: Mut[Dyn], x: Ref[Dyn], g: Ref, w: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    squares = zeros((y.shape[0],), f32)
    for k in tiles(x, axis=1, size=bk):
        v = x[m, k].to(f32)
        squares = squares + sum(v * v, axis=1)
        acc = mma((v * g[k][None, :].to(f32)).to(x.dtype), w[n, k].T, acc)
    y.store(acc * rsqrt(squares / x.shape[1] + 1e-5)[:, None])


def count_products(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, arrays: list, tiled: dict, **consts: Any
) -> list[tuple]:
    """Shapes of the operands of every matrix product of one launch."""
    from tilert.backends import cpu_runtime

    calls: list[tuple] = []

    def spy(name: str) -> Callable:
        plain = cpu_runtime.NAMESPACE[name]

        def call(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            calls.append(
                (name, a.shape, b.shape, b.base is not None and np.shares_memory(b, arrays[-1]))
            )
            return plain(a, b)

        return call

    for name in ("matmul", "batch_matmul"):
        monkeypatch.setitem(cpu_runtime.NAMESPACE, name, spy(name))
    params = params_of(kernel, arrays, tiled, set())
    grid = tuple(-(-n // t) for n, t in zip(arrays[0].shape, tiled[0], strict=True))
    function = kernel.specialize(params, grid, tuple(consts.items()))
    cpu.compile(function).bind(arrays, {}, grid)()
    return calls


@pytest.mark.parametrize("kernel", [linear, norm_linear])
@pytest.mark.parametrize("bm", [1, 2])
@pytest.mark.parametrize("k", [24, 20])
def test_a_tiled_product_is_one_call_on_the_weights_in_place(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, bm: int, k: int
) -> None:
    y, x, w = normal(6, 32), normal(6, k), normal(32, k)
    arrays = [y, x, w] if kernel is linear else [y, x, np.ones(k, np.float32), w]
    calls = count_products(monkeypatch, kernel, arrays, {0: (bm, 8)}, bk=8)
    assert calls == [("matmul", (6, k), (k, 32), True)]
    scale = 1 / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) if kernel is norm_linear else 1
    np.testing.assert_allclose(y, x @ w.T * scale, rtol=1e-4, atol=1e-4)


def test_a_product_with_columns_in_place_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    y, a, b = normal(4, 32), normal(4, 24), normal(24, 32)
    calls = count_products(monkeypatch, product_nn, [y, a, b], {0: (2, 8)}, bk=8)
    assert calls == [("matmul", (4, 24), (24, 32), True)]
    np.testing.assert_allclose(y, a @ b, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 20)] * 3),
    tile=st.tuples(*[st.integers(1, 9)] * 3),
    which=st.sampled_from([linear, product_nn, norm_linear]),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]),
)
def test_products_of_any_size(sizes: tuple, tile: tuple, which: Any, dtype: Any) -> None:
    (m, n, k), (bm, bn, bk) = sizes, tile
    y, x = normal(m, n), normal(m, k).astype(dtype)
    w = normal(*((k, n) if which is product_nn else (n, k))).astype(dtype)
    arrays = [y, x, normal(k).astype(dtype), w] if which is norm_linear else [y, x, w]
    both(which, arrays, {0: (bm, bn)}, rtol=1e-4, atol=1e-4, bk=bk)


def test_products_over_strided_arrays_read_them_at_every_run() -> None:
    y, x, w = normal(4, 8), normal(4, 12)[:, ::2], normal(6, 16)[:, ::2].T
    params = params_of(linear, [y, x, w], {0: (2, 4)}, set())
    function = linear.specialize(params, (2, 2), (("bk", 3),))
    launch = cpu.compile(function).bind([y, x, w], {}, (2, 2))
    for _ in range(2):
        launch()
        np.testing.assert_allclose(y, x @ w.T, rtol=1e-5, atol=1e-5)
        w *= 2
        x += 1


def test_a_large_ragged_operand_is_not_copied_whole() -> None:
    y, x, w = normal(1, 1030), normal(1, 80), normal(1030, 80)
    params = params_of(linear, [y, x, w], {0: (1, 64)}, set())
    function = linear.specialize(params, (1, 17), (("bk", 16),))
    kernel = cpu.compile(function)
    kernel.bind([y, x, w], {}, (1, 17))()
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-4, atol=1e-4)
    pads = [
        s for s in kernel.source([a.shape for a in (y, x, w)], (1, 17)).splitlines() if "pad(" in s
    ]
    assert len(pads) == 1
    assert "(64, 80)" in pads[0]


# Loads


@tilert.kernel
def rows_of(y: Mut[Dyn], ids: Ref[Dyn], table: Ref):
    t, _ = y.index
    y.store(table[ids[t], :])


@tilert.kernel
def elements_of(y: Mut[Dyn], ids: Ref[Dyn], other: Ref[Dyn], table: Ref):
    t, c = y.index
    at = other[t.number]
    y.store(table.load(at, c, ids[t], fill=-3.0).reshape(y.shape))


@pytest.mark.parametrize("bt", [1, 2, 4])
def test_gathers_fill_outside_and_never_wrap(bt: int) -> None:
    ids = np.array([0, 9, -1, 10, 3, -10, 2**31 - 1], np.int32)
    got = both(rows_of, [normal(7, 5), ids, normal(10, 5)], {0: (bt, 5)})[0]
    assert not got[[2, 3, 5, 6]].any()
    assert got[[0, 1, 4]].all()


def test_two_gathered_axes() -> None:
    ids, other = ints(-1, 7, 9), ints(-2, 5, 9)
    both(elements_of, [normal(9, 4), ids, other, normal(4, 4, 6)], {0: (1, 4)})
    both(elements_of, [normal(9, 4), ids, other, normal(4, 4, 6)], {0: (1, 1)})


@tilert.kernel
def windows(y: Mut[Dyn], x: Ref[Dyn], starts: Ref[Dyn], size: Const[int]):
    t, _ = y.index
    y.store(x.load(span(starts[t.number], size), fill=7.0)[None, :])


@settings(max_examples=40, deadline=None)
@given(
    starts=st.lists(st.integers(-20, 20), min_size=1, max_size=4),
    n=st.integers(0, 12),
    size=st.integers(1, 6),
)
def test_spans_at_any_start(starts: list[int], n: int, size: int) -> None:
    at = np.array(starts, np.int32)
    arrays = [normal(len(starts), size), normal(n), at]
    both(windows, arrays, {0: (1, size)}, size=size)


@tilert.kernel
def affine(y: Mut[Dyn], x: Ref[Dyn], a: Const[int], b: Const[int], size: Const[int]):
    t, _ = y.index
    i = t.number
    y.store((x[span(i * a + b, size)] + x[i * i + b] + x[(i + 1) // 2]).reshape(y.shape))


@settings(max_examples=60, deadline=None)
@given(
    programs=st.integers(1, 5),
    n=st.integers(1, 16),
    a=st.integers(-3, 4),
    b=st.integers(-3, 9),
    size=st.integers(1, 4),
)
def test_known_addresses(programs: int, n: int, a: int, b: int, size: int) -> None:
    both(affine, [normal(programs, size), normal(n)], {0: (1, size)}, a=a, b=b, size=size)


@tilert.kernel
def paged(y: Mut, pages: Ref[Dyn], table: Ref[Dyn, Dyn], rows: Ref, count: Const[int]):
    b, h, _ = y.index
    acc = zeros((y.shape[2],), f32)
    for j in tiles(table, axis=1, size=count):
        acc = acc + sum(sum(pages[table[rows[b.number], j], :, h.number, :], axis=0), axis=0)
    y.store(acc.reshape(y.shape))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_pages_through_a_table(slots: int, heads: int, count: int) -> None:
    table = ints(-1, 6, 4, 5)
    arrays = [normal(slots, heads, 3), normal(6, 2, heads, 3), table, ints(-1, 5, slots)]
    both(paged, arrays, {0: (1, 1, 3)}, count=count)


# Stores


@tilert.kernel
def scale_own(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn], c: Const[float]):
    m, n = y.index
    y.store(y.load() * c + x[m, n])


@settings(max_examples=40, deadline=None)
@given(shape=st.tuples(*[st.integers(0, 9)] * 2), tile=st.tuples(*[st.integers(1, 5)] * 2))
def test_ragged_and_empty_pieces(shape: tuple, tile: tuple) -> None:
    got = both(scale_own, [normal(*shape), normal(*shape)], {0: tile}, c=2.0)
    assert got[0].shape == shape


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stores_cover_their_piece_and_nothing_else(order: tuple) -> None:
    whole = np.full((9, 14), np.nan, np.float32)
    y = whole[1:8, 2:12].transpose(order)
    x = normal(*y.shape)
    y[...] = 0
    params = params_of(scale_own, [y, x], {0: (3, 4)}, set())
    grid = tuple(-(-n // t) for n, t in zip(y.shape, (3, 4), strict=True))
    function = scale_own.specialize(params, grid, (("c", 0.0),))
    cpu.compile(function).bind([y, x], {}, grid)()
    np.testing.assert_array_equal(y, x)
    assert np.isnan(whole).sum() == whole.size - y.size


@tilert.kernel
def append(cache: Mut[Dyn], x: Ref[Dyn], twice: Const[bool]):
    t, h, d = cache.index
    v = x[t.number, h, d]
    if twice:
        cache.store(cache.load() * 2.0 + v.reshape(cache.shape))
    else:
        cache.store(v.reshape(cache.shape))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("tile", [(1, 4, 3), (1, 2, 3), (1, 3, 2)])
@pytest.mark.parametrize("rows", [[3], [-1], [2, -1, 0, 6], [-1, -1], [9, 5]])
def test_indexed_pieces(rows: list[int], tile: tuple, twice: bool) -> None:
    index = np.array(rows, np.int32)
    arrays = [normal(7, 4, 3), normal(len(rows), 4, 3)]
    both(append, arrays, {0: tile}, {0: index}, twice=twice)


def test_index_maps_are_read_at_every_run() -> None:
    cache, x, index = np.zeros((5, 2, 2), np.float32), normal(2, 2, 2), np.array([0, 1], np.int32)
    params = params_of(append, [cache, x], {0: (1, 2, 2)}, {0})
    function = append.specialize(params, (2, 1, 1), (("twice", False),))
    launch = cpu.compile(function).bind([cache, x], {0: index}, (2, 1, 1))
    launch()
    index[:] = [4, -1]
    launch()
    np.testing.assert_array_equal(cache[[0, 1, 4]], x[[0, 1, 0]])
    assert not cache[[2, 3]].any()


# Control flow


@tilert.kernel
def run_lengths(y: Mut[Dyn], x: Ref[Dyn, Dyn], lo: Ref[Dyn], hi: Ref[Dyn], step: Const[int]):
    t, _ = y.index
    acc = zeros((4,), f32)
    last = x[0, 0] * 0.0
    count = t.number * 0
    for i in range(lo[t.number], hi[t.number], step):
        acc = acc * 0.5 + x[i, span(0, 4)]
        last = x[i, 0]
        count = count + i
    y.store((acc + last + count.to(f32)).reshape(y.shape))


@settings(max_examples=50, deadline=None)
@given(
    bounds=st.lists(st.tuples(st.integers(-3, 8), st.integers(-3, 8)), min_size=1, max_size=5),
    step=st.integers(1, 3),
)
def test_loops_whose_bounds_differ(bounds: list, step: int) -> None:
    lo, hi = (np.array(c, np.int32) for c in zip(*bounds, strict=True))
    arrays = [normal(len(bounds), 4), normal(6, 5), lo, hi]
    both(run_lengths, arrays, {0: (1, 4)}, step=step)


@tilert.kernel
def branches(y: Mut[Dyn], z: Mut[Dyn], x: Ref[Dyn], n: Ref[Dyn]):
    t = y.index[0].number
    v = x[t]
    k = n[t]
    if v > 0.0:
        for i in range(k):
            if i % 2 == 0:
                v = v + 1.0
                z.store(z.load() + 2.0 * v)
    else:
        v = v * 3.0
        k = k + 5
        if k > 6:
            z.store(zeros(z.shape, f32) + v)
    y.store(zeros(y.shape, f32) + v + k.to(f32))


@pytest.mark.parametrize("programs", [1, 2, 7])
def test_branches_store_only_where_they_are_taken(programs: int) -> None:
    for _ in range(5):
        arrays = [normal(programs) for _ in range(3)]
        both(branches, [*arrays, ints(-1, 5, programs)], {0: (1,), 1: (1,)})


@tilert.kernel
def masked_ragged(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn], flags: Ref[Dyn]):
    m, n = y.index
    if flags[m.number] > 0:
        y.store(x[m, n])


@pytest.mark.parametrize("shape", [(1, 3), (5, 3), (5, 8), (4, 7)])
def test_masked_stores_at_ragged_ends(shape: tuple) -> None:
    for _ in range(4):
        arrays = [normal(*shape), normal(*shape), ints(0, 2, shape[0])]
        both(masked_ragged, arrays, {0: (2, 3)})


@tilert.kernel
def masked_append(cache: Mut[Dyn], x: Ref[Dyn], flags: Ref[Dyn]):
    t = cache.index[0].number
    if flags[t] > 0:
        cache.store(x[t, :, :].reshape(cache.shape))


@pytest.mark.parametrize("rows", [[4], [1, -1, 0, 3]])
def test_masked_indexed_stores(rows: list[int]) -> None:
    index = np.array(rows, np.int32)
    for _ in range(4):
        arrays = [normal(5, 3, 2), normal(len(rows), 3, 2), ints(0, 2, len(rows))]
        both(masked_append, arrays, {0: (1, 3, 2)}, {0: index})


@tilert.kernel
def swap(y: Mut, x: Ref, n: Ref):
    a = x[0]
    b = x[1]
    t = y.index[0].number
    for _ in range(n[t]):
        c = a
        a = b
        b = c
    y.store(zeros((1,), f32) + a * 10.0 + b)


def test_carried_values_change_places_at_once() -> None:
    n = np.array([0, 1, 2, 5], np.int32)
    got = both(swap, [normal(4), np.array([1, 2], np.float32), n], {0: (1,)})
    np.testing.assert_array_equal(got[0], [12, 21, 12, 21])
    both(swap, [normal(1), np.array([1, 2], np.float32), n[1:2]], {0: (1,)})


@tilert.kernel
def masks_and_best(y: Mut[Dyn], best: Mut[Dyn], x: Ref[Dyn]):
    t, c = y.index
    v = x[t, c]
    seen = (t.offsets[:, None] >= iota(y.shape[1])[None, :]) & (v > -1.0)
    v = where(seen, v, float("-inf"))
    top = max(v, axis=1, keepdims=True)
    y.store(where(v == top, 1.0, zeros(y.shape, f32)))
    best.store(argmax(v, axis=1)[:, None])


@pytest.mark.parametrize("bt", [1, 3, 8])
def test_masks_and_argmax(bt: int) -> None:
    arrays = [normal(7, 6), np.zeros((7, 1), np.int32), np.round(normal(7, 6))]
    both(masks_and_best, arrays, {0: (bt, 6), 1: (bt, 1)})


def test_large_tiles_reuse_dead_temporaries_only() -> None:
    @tilert.kernel
    def chain(y: Mut, x: Ref):
        m, n = y.index
        v = x[m, n]
        a = v * 2.0
        b = a + 1.0
        c = b * a
        y.store(c - b + v)

    got = both(chain, [normal(4, 8192), normal(4, 8192)], {0: (4, 8192)})
    x = got[1]
    np.testing.assert_allclose(got[0], (2 * x + 1) * 2 * x - (2 * x + 1) + x, rtol=1e-4, atol=1e-4)


def test_empty_grids_do_nothing() -> None:
    y = normal(0, 4)
    params = params_of(scale_own, [y, y], {0: (2, 2)}, set())
    function = scale_own.specialize(params, (0, 2), (("c", 1.0),))
    cpu.compile(function).bind([y, y.copy()], {}, (0, 2))()


def test_code_is_kept_for_launches_of_one_shape() -> None:
    function, grid = elementwise_function("add", [f32, f32], f32, "tiles", {})
    kernel = cpu.compile(function)
    for _ in range(3):
        arrays = [normal(12) for _ in range(3)]
        kernel.bind(arrays, {}, grid)()
        np.testing.assert_array_equal(arrays[0], arrays[1] + arrays[2])
    assert len(kernel._variants) == 1

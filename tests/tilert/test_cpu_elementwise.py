"""Elementwise operations of the cpu backend against the table, over scalars and tiles."""

import numpy as np
import pytest

from tests.tilert.cpu_reference import RNG, compare, elementwise_function, normal
from tilert import bf16, f8e4m3, f8e5m2, f16, f32, i8, i32, u8, u32
from tilert.backends import cpu
from tilert.dtypes import DType, bool_, i64
from tilert.ops import FLOAT_FUNCTIONS

FLOATS, INTS = (f32, bf16, f16), (i32, u32)
UNARY = ["neg", "abs", *FLOAT_FUNCTIONS]
BINARY_INT = "add sub mul floordiv mod minimum maximum and or xor shl shr".split()  # noqa: SIM905
CASES: list[tuple[str, list[DType], DType, dict]] = []
for _d in FLOATS:
    for _n in ["add", "sub", "mul", "div", "minimum", "maximum"]:
        CASES.append((_n, [_d, _d], _d, {}))
    for _n in UNARY:
        CASES.append((_n, [_d], _d, {}))
    for _n in ["eq", "ne", "lt", "le", "gt", "ge"]:
        CASES.append((_n, [_d, _d], bool_, {}))
    for _n in ["isnan", "isinf", "isfinite"]:
        CASES.append((_n, [_d], bool_, {}))
    CASES += [("pow", [_d, _d], _d, {}), ("atan2", [_d, _d], _d, {}), ("fma", [_d] * 3, _d, {})]
    CASES.append(("select", [bool_, _d, _d], _d, {}))
    for _to in (f32, bf16, f16, f8e4m3, f8e5m2, i32, i8, bool_):
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
CASES += [("cast", [d], f32, {"dtype": f32}) for d in (f8e4m3, f8e5m2, i8)]
CASES += [("add", [d, d], d, {}) for d in (f8e4m3, f8e5m2, i8)]
CASES += [("philox", [u32] * 4, u32, {"word": 2}), ("normal", [u32] * 4, f32, {})]
CASES += [
    ("bitcast", [a], b, {"dtype": b})
    for a, b in ((f32, u32), (u32, f32), (i32, u32), (u32, i32), (f32, i32))
]


def sample_values(name: str, position: int, dtype: DType, n: int) -> np.ndarray:
    if dtype == bool_:
        return RNG.integers(0, 2, n).astype(np.bool_)
    if dtype.is_float:
        x = RNG.standard_normal(n) * 3
        if name in ("asin", "acos"):
            x = np.tanh(x)
        positive = "log" in name or "sqrt" in name or (name == "pow" and position == 0)
        return (np.abs(x) if positive else x).astype(dtype.numpy)
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
    if name == "cast" and out.is_int and dtypes[0].is_float:
        arrays[1] = (normal(n) * 100).astype(dtypes[0].numpy)
    inexact = {*FLOAT_FUNCTIONS, "pow", "atan2"} - {"floor", "ceil", "trunc", "round", "sqrt"}
    exact = out.is_narrow and name not in inexact - {"rsqrt"}
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

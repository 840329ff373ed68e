"""Elementwise operations as NumPy expressions.

Arrays keep their dtype: f32 stays f32 and i32 wraps, as NumPy does. Uniform integers are Python
ints and are wrapped by hand. Narrow floats are computed in f32 and rounded once.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilert.backends.cpu_value import Form
from tilert.dtypes import DType, f32
from tilert.ops import FLOAT_FUNCTIONS

__all__ = ["RANDOM", "elementwise", "passing_bytes", "random"]

# Elements from which on `choose` is faster than np.where.
_LARGE_SELECT = 1 << 10

_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
_COMPARE = {"eq", "ne", "lt", "le", "gt", "ge"}
_UFUNC = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}
_PREDICATES = {"isnan", "isinf", "isfinite"}
_FUNCTIONS = {name: f"{name}({{}})" for name in (*FLOAT_FUNCTIONS, *_PREDICATES)}
_FUNCTIONS |= {
    "rsqrt": "(ONE / sqrt({}))",
    "asin": "arcsin({})",
    "acos": "arccos({})",
    "atan": "arctan({})",
    "round": "rint({})",
    "neg": "(-{})",
    "abs": "absolute({})",
    "pow": "power({}, {})",
    "atan2": "arctan2({}, {})",
    "fma": "fma({}, {}, {})",
}
RANDOM = {"philox", "normal"}
# Bytes an element, as measured: helpers that compute in several steps, or in 64 bits.
_PASSING = {"philox": 80, "normal": 90, "fma": 72, "erf": 8, "select": 8}
# NumPy functions of that very name, which can write into an array.
_UFUNCS = set(FLOAT_FUNCTIONS) - {"rsqrt", "asin", "acos", "atan", "round", "erf"}


def _wrap(text: str, dtype: DType) -> str:
    """A Python int brought into the range of its dtype."""
    mask = (1 << dtype.bits) - 1
    if dtype.kind == "u":
        return f"(({text}) & {mask})"
    half = 1 << (dtype.bits - 1)
    return f"((({text}) + {half} & {mask}) - {half})"


def _scalar_int(name: str, args: list[Form], dtype: DType) -> str:
    """An operation on Python ints or bools."""
    a = args[0].text
    b = args[1].text if len(args) > 1 else ""
    if name in _COMPARE or (name in ("and", "or", "xor")):
        return f"({a} {_OPERATORS[name]} {b})"
    if name in ("minimum", "maximum"):
        return f"{name[:3]}({a}, {b})"
    if name == "not":
        return f"(not {a})" if dtype.kind == "b" else _wrap(f"~{a}", dtype)
    if name in ("neg", "abs"):
        return _wrap(f"-{a}" if name == "neg" else f"abs({a})", dtype)
    if name in ("floordiv", "mod"):
        return _wrap(f"int_{name}({a}, {b})", dtype)
    if name == "shl":
        return _wrap(f"{a} << min({b}, 64)", dtype)
    return _wrap(f"{a} {_OPERATORS[name]} {b}", dtype)


def _cast(x: Form, to: DType) -> str:
    if x.dtype == to:
        return x.text
    if to.is_float and to.bits == 8:
        return f"to_narrow({x.text}, T_{to.name})"
    if x.dtype.is_float and to.is_int:
        return f"to_integer({x.text}, T_{to.name})"
    if not x.uniform:
        return f"{x.text}.astype(T_{to.name})"
    if to.is_float:
        if x.dtype.is_float:
            return f"{x.text}.astype(T_{to.name})"
        return f"T_{to.name}.type({x.text})"
    if to.kind == "b":
        return f"bool({x.text} != 0)"
    return _wrap(f"int({x.text})", to)


def _bitcast(x: Form, to: DType) -> str:
    if not x.uniform:
        return f"{x.text}.view(T_{to.name})"
    typed = x.text if x.dtype.is_float else f"T_{x.dtype.name}.type({x.text})"
    return f"{typed}.view(T_{to.name})" if to.is_float else f"int({typed}.view(T_{to.name}))"


def _select(args: list[Form], to: DType) -> str:
    c, a, b = args
    if c.uniform:
        raise ValueError("a uniform select is chosen by the generator")
    texts = [f"T_{to.name}.type({x.text})" if x.uniform and to.is_int else x.text for x in (a, b)]
    large = math.prod(np.broadcast_shapes(c.shape, a.shape, b.shape)) >= _LARGE_SELECT
    name = "choose" if large and to.bits == 32 else "where"
    return f"{name}({c.text}, {texts[0]}, {texts[1]})"


def passing_bytes(name: str, args: list[Form], to: DType) -> int:
    """Bytes for each element that an operation takes while it runs, besides operands and result."""
    narrow = [dtype for dtype in (*(a.dtype for a in args), to) if dtype.is_narrow]
    return _PASSING.get(name, 0) + len(narrow) * f32.itemsize


def random(name: str, args: list[Form], attrs: Mapping[str, Any]) -> str:
    """The expression of a random number; scalars are Python numbers as ever."""
    words = ", ".join(a.text for a in args)
    scalar = all(a.uniform for a in args)
    if name == "philox":
        text = f"philox({words})[{attrs['word']}]"
        return f"int({text})" if scalar else text
    return f"normal({words}){'[()]' if scalar else ''}"


def elementwise(name: str, args: list[Form], to: DType, out: str = "") -> str:
    """The expression of one operation; `to` is the dtype of the result.

    Args:
        out: an f32 array that the result may overwrite, or "".
    """
    if name == "cast":
        return _cast(args[0], to)
    if name == "bitcast":
        return _bitcast(args[0], to)
    if name == "select":
        return _select(args, to)
    kind = args[0].dtype
    scalar = all(a.uniform for a in args)
    if scalar and not kind.is_float:
        return _scalar_int(name, args, kind)
    half = kind.is_narrow
    texts = [f"{a.text}.astype(T_f32)" if half else a.text for a in args]
    if out and name in _UFUNC:
        return f"{_UFUNC[name]}({texts[0]}, {texts[1]}, {out})"
    if out and name in _UFUNCS:
        return f"{name}({texts[0]}, {out})"
    if name in _OPERATORS:
        text = f"({texts[0]} {_OPERATORS[name]} {texts[1]})"
        if name in _COMPARE:
            return f"bool({text})" if scalar else text
    elif name in ("minimum", "maximum"):
        text = f"{name}({texts[0]}, {texts[1]})"
    elif name == "not":
        text = f"(~{texts[0]})"
    elif name in _PREDICATES:
        text = _FUNCTIONS[name].format(texts[0])
        return f"bool({text})" if scalar else text
    else:
        text = _FUNCTIONS[name].format(*texts)
    if not half:
        return text
    name = f"T_{kind.name}"
    return f"to_narrow({text}, {name})" if kind.bits == 8 else f"{text}.astype({name})"

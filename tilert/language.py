"""The words of the kernel language.

Import them into a module that holds kernels. Inside a kernel they build tile operations; called
from ordinary Python they raise. `range`, `abs`, `min`, `max` and `sum` also work under their
built-in names.
"""

from typing import Any

__all__ = [
    "Builtin",
    "abs",
    "argmax",
    "bitcast",
    "cdiv",
    "cos",
    "exp",
    "exp2",
    "floor",
    "full",
    "iota",
    "log",
    "log2",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mma",
    "rsqrt",
    "sin",
    "span",
    "sqrt",
    "static_range",
    "sum",
    "tanh",
    "tiles",
    "where",
    "zeros",
]


class Builtin:
    """A word of the language; `signature` is what its misuse messages show."""

    def __init__(self, name: str, signature: str) -> None:
        self.name = name
        self.signature = signature
        self.__doc__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.signature} works only inside a @tilert.kernel function")

    def __repr__(self) -> str:
        return self.signature


zeros = Builtin("zeros", "zeros(shape, dtype)")
full = Builtin("full", "full(shape, value, dtype)")
iota = Builtin("iota", "iota(size)")
tiles = Builtin("tiles", "tiles(array, axis, size, start=0, stop=None)")
static_range = Builtin("static_range", "static_range(stop)")
range_ = Builtin("range", "range(stop) or range(start, stop, step=1)")
span = Builtin("span", "span(start, size)")
mma = Builtin("mma", "mma(a, b, acc)")
exp = Builtin("exp", "exp(x)")
exp2 = Builtin("exp2", "exp2(x)")
log = Builtin("log", "log(x)")
log2 = Builtin("log2", "log2(x)")
sqrt = Builtin("sqrt", "sqrt(x)")
rsqrt = Builtin("rsqrt", "rsqrt(x)")
sin = Builtin("sin", "sin(x)")
cos = Builtin("cos", "cos(x)")
tanh = Builtin("tanh", "tanh(x)")
floor = Builtin("floor", "floor(x)")
abs = Builtin("abs", "abs(x)")
minimum = Builtin("minimum", "minimum(a, b)")
maximum = Builtin("maximum", "maximum(a, b)")
where = Builtin("where", "where(condition, a, b)")
cdiv = Builtin("cdiv", "cdiv(a, b)")
bitcast = Builtin("bitcast", "bitcast(x, dtype)")
sum = Builtin("sum", "sum(x, axis=None, keepdims=False)")
max = Builtin("max", "max(x, axis=None, keepdims=False)")
min = Builtin("min", "min(x, axis=None, keepdims=False)")
mean = Builtin("mean", "mean(x, axis=None, keepdims=False)")
argmax = Builtin("argmax", "argmax(x, axis)")

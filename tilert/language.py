"""The words of the kernel language.

Import them into a module that holds kernels. Inside a kernel they build tile operations; called
from ordinary Python they raise. `range`, `abs`, `min`, `max`, `sum`, `any`, `all`, `pow` and
`round` also work under their built-in names.
"""

from typing import Any

__all__ = [
    "Builtin",
    "abs",
    "acos",
    "all",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "asin",
    "atan",
    "atan2",
    "bitcast",
    "broadcast_to",
    "cdiv",
    "ceil",
    "clamp",
    "concatenate",
    "cos",
    "cosh",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "debug_assert",
    "device_print",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "fma",
    "full",
    "iota",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "log2",
    "log10",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mma",
    "philox",
    "pow",
    "prod",
    "random_bits",
    "random_normal",
    "random_uniform",
    "round",
    "rsqrt",
    "sin",
    "sinh",
    "sort",
    "span",
    "sqrt",
    "static_range",
    "sum",
    "take",
    "take_along",
    "tan",
    "tanh",
    "tiles",
    "topk",
    "trunc",
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
where = Builtin("where", "where(condition, a, b)")
cdiv = Builtin("cdiv", "cdiv(a, b)")
bitcast = Builtin("bitcast", "bitcast(x, dtype)")

exp = Builtin("exp", "exp(x)")
exp2 = Builtin("exp2", "exp2(x)")
expm1 = Builtin("expm1", "expm1(x)")
log = Builtin("log", "log(x)")
log2 = Builtin("log2", "log2(x)")
log10 = Builtin("log10", "log10(x)")
log1p = Builtin("log1p", "log1p(x)")
sqrt = Builtin("sqrt", "sqrt(x)")
rsqrt = Builtin("rsqrt", "rsqrt(x)")
sin = Builtin("sin", "sin(x)")
cos = Builtin("cos", "cos(x)")
tan = Builtin("tan", "tan(x)")
asin = Builtin("asin", "asin(x)")
acos = Builtin("acos", "acos(x)")
atan = Builtin("atan", "atan(x)")
atan2 = Builtin("atan2", "atan2(y, x)")
sinh = Builtin("sinh", "sinh(x)")
cosh = Builtin("cosh", "cosh(x)")
tanh = Builtin("tanh", "tanh(x)")
erf = Builtin("erf", "erf(x)")
floor = Builtin("floor", "floor(x)")
ceil = Builtin("ceil", "ceil(x)")
trunc = Builtin("trunc", "trunc(x)")
round = Builtin("round", "round(x)")
abs = Builtin("abs", "abs(x)")
pow = Builtin("pow", "pow(x, y)")
fma = Builtin("fma", "fma(a, b, c)")
minimum = Builtin("minimum", "minimum(a, b)")
maximum = Builtin("maximum", "maximum(a, b)")
clamp = Builtin("clamp", "clamp(x, low, high)")
isnan = Builtin("isnan", "isnan(x)")
isinf = Builtin("isinf", "isinf(x)")
isfinite = Builtin("isfinite", "isfinite(x)")

sum = Builtin("sum", "sum(x, axis=None, keepdims=False)")
prod = Builtin("prod", "prod(x, axis=None, keepdims=False)")
max = Builtin("max", "max(x, axis=None, keepdims=False)")
min = Builtin("min", "min(x, axis=None, keepdims=False)")
mean = Builtin("mean", "mean(x, axis=None, keepdims=False)")
any = Builtin("any", "any(x, axis=None, keepdims=False)")
all = Builtin("all", "all(x, axis=None, keepdims=False)")
argmax = Builtin("argmax", "argmax(x, axis, keepdims=False)")
argmin = Builtin("argmin", "argmin(x, axis, keepdims=False)")
cumsum = Builtin("cumsum", "cumsum(x, axis)")
cumprod = Builtin("cumprod", "cumprod(x, axis)")
cummax = Builtin("cummax", "cummax(x, axis)")
cummin = Builtin("cummin", "cummin(x, axis)")

sort = Builtin("sort", "sort(x, axis=-1, descending=False)")
argsort = Builtin("argsort", "argsort(x, axis=-1, descending=False)")
topk = Builtin("topk", "topk(x, k, axis=-1)")

broadcast_to = Builtin("broadcast_to", "broadcast_to(x, shape)")
concatenate = Builtin("concatenate", "concatenate(tiles, axis=0)")
take = Builtin("take", "take(x, index, axis)")
take_along = Builtin("take_along", "take_along(x, index, axis)")

device_print = Builtin("device_print", "device_print(text, *values)")
debug_assert = Builtin("debug_assert", "debug_assert(condition, message)")

philox = Builtin("philox", "philox(seed, counter)")
random_bits = Builtin("random_bits", "random_bits(seed, counter)")
random_uniform = Builtin("random_uniform", "random_uniform(seed, counter)")
random_normal = Builtin("random_normal", "random_normal(seed, counter)")

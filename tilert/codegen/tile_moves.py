"""Operations that look at other threads' elements through scratch: movement, scans, order.

Whoever uses scratch meets the other threads first, since they may still read what is there.
"""

from collections.abc import Callable
from math import prod

from tilert.codegen.bounds import Bounds, below
from tilert.codegen.emit import Emitter, c_type, convert, literal
from tilert.codegen.layout import Layout
from tilert.codegen.movement import combine
from tilert.dtypes import DType, f32, i64
from tilert.ir import Op, Value

__all__ = ["concat", "permute", "scan", "slice_", "sort", "take"]

Place = Callable[[str], str]


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _sum(terms: list[str]) -> str:
    return " + ".join(t for t in terms if t != "0") or "0"


def _at(e: Emitter, layout: Layout, register: str, strides: list[int], offset: int = 0) -> str:
    """C++ of the sum of a register's indices times strides."""
    terms = []
    for axis, stride in enumerate(strides):
        i = e.index(layout, axis, register)
        terms.append(i if i == "0" or stride == 1 else f"{i} * {stride}")
    return _sum([*terms, str(offset)])


def _write(e: Emitter, v: Value, place: Place) -> None:
    layout, ctype = e.layout(v), c_type(v.dtype)
    with e.each(layout.registers) as r:
        guard = e.inside(layout, r)
        target = f"(({ctype}*)scratch)[{place(r)}]"
        e.line(f"{f'if ({guard}) ' if guard else ''}{target} = {e.at(v, r)};")


def _read(e: Emitter, result: Value, place: Place, check: Place = lambda r: "") -> None:
    """Elements from scratch, 0 where `check` fails; padding is not looked at."""
    layout, ctype = e.layout(result), c_type(result.dtype)
    name = e.declare(result)
    with e.each(layout.registers) as r:
        guard = " && ".join(c for c in (e.inside(layout, r), check(r)) if c)
        value = f"(({ctype}*)scratch)[{place(r)}]"
        if guard:
            value = f"({guard}) ? {value} : {literal(0, result.dtype)}"
        e.line(f"{name}[{r}] = {value};")


def _exchange(e: Emitter, source: Value, result: Value, place: Place) -> None:
    """Write the source row-major, read the result's elements from wherever they are."""
    e.scratch(source.type.numel * source.dtype.itemsize)
    own = e.layout(source)
    e.line("__syncthreads();")
    _write(e, source, lambda r: e.flat(own, r))
    e.line("__syncthreads();")
    _read(e, result, place)


def permute(e: Emitter, op: Op) -> None:
    """Axes in another order."""
    source, result = op.args[0], op.result
    strides = _strides(source.shape)
    moved = [strides[axis] for axis in op.attrs["axes"]]
    layout = e.layout(result)
    _exchange(e, source, result, lambda r: _at(e, layout, r, moved))


def slice_(e: Emitter, op: Op) -> None:
    """Every `step`-th element from `start` on each axis."""
    source, result = op.args[0], op.result
    strides = _strides(source.shape)
    offset = sum(a * s for a, s in zip(op.attrs["start"], strides, strict=True))
    steps = [a * s for a, s in zip(op.attrs["step"], strides, strict=True)]
    layout = e.layout(result)
    _exchange(e, source, result, lambda r: _at(e, layout, r, steps, offset))


def concat(e: Emitter, op: Op) -> None:
    """Tiles one after the other along an axis."""
    result, axis = op.result, op.attrs["axis"]
    strides = _strides(result.shape)
    e.scratch(result.type.numel * result.dtype.itemsize)
    e.line("__syncthreads();")
    first = 0
    for part in op.args:
        own, offset = e.layout(part), first * strides[axis]
        _write(e, part, lambda r, own=own, offset=offset: _at(e, own, r, strides, offset))  # type: ignore[misc]
        first += part.shape[axis]
    e.line("__syncthreads();")
    layout = e.layout(result)
    _read(e, result, lambda r: e.flat(layout, r))


def take(e: Emitter, op: Op) -> None:
    """Elements by index along an axis; the index tile has the result's layout."""
    source, index = op.args
    result, axis = op.result, op.attrs["axis"]
    own, layout = e.layout(source), e.layout(result)
    strides = _strides(source.shape)
    word = "u64" if index.dtype == i64 else "u32"
    noted = Bounds(e, "reads", "", op.loc).outside(axis)

    def check(r: str) -> str:
        if noted:
            return below(e.at(index, r), str(source.shape[axis]), False, noted)
        return f"({word}){e.at(index, r)} < {source.shape[axis]}u"

    def place(r: str) -> str:
        terms = [
            f"{f'(int){e.at(index, r)}' if a == axis else e.index(layout, a, r)} * {s}"
            for a, s in enumerate(strides)
        ]
        return " + ".join(terms)

    e.scratch(source.type.numel * source.dtype.itemsize)
    e.line("__syncthreads();")
    _write(e, source, lambda r: e.flat(own, r))
    e.line("__syncthreads();")
    _read(e, result, place, check)


def scan(e: Emitter, op: Op) -> None:
    """Each place adds what lies 1, 2, 4, ... before it, which then stands for as many elements."""
    source, result = op.args[0], op.result
    kind, axis = op.attrs["kind"], op.attrs["axis"]
    layout = e.layout(source)
    working: DType = f32 if source.dtype.is_narrow else source.dtype
    ctype = c_type(working)
    n, stride = source.shape[axis], _strides(source.shape)[axis]
    total = e.fresh()
    e.line(f"{ctype} {total}[{layout.registers}];")
    with e.each(layout.registers) as r:
        e.line(f"{total}[{r}] = {convert(e.at(source, r), source.dtype, working)};")
    if n > 1:
        e.scratch(source.type.numel * working.itemsize)
        with e.braces(f"for (int d = 1; d < {n}; d *= 2)"):
            e.line("__syncthreads();")
            with e.each(layout.registers) as r:
                guard = e.inside(layout, r)
                target = f"(({ctype}*)scratch)[{e.flat(layout, r)}]"
                e.line(f"{f'if ({guard}) ' if guard else ''}{target} = {total}[{r}];")
            e.line("__syncthreads();")
            with e.each(layout.registers) as r:
                inside = e.inside(layout, r)
                guard = f"{e.index(layout, axis, r)} >= d"
                before = f"(({ctype}*)scratch)[{e.flat(layout, r)} - d * {stride}]"
                e.line(
                    f"if ({f'{inside} && ' if inside else ''}{guard})"
                    f" {total}[{r}] = {combine(kind, before, f'{total}[{r}]')};"
                )
    name = e.declare(result)
    with e.each(layout.registers) as r:
        e.line(f"{name}[{r}] = {convert(f'{total}[{r}]', working, result.dtype)};")


def sort(e: Emitter, op: Op) -> None:
    """A bitonic network over each line of the axis, padded to a power of two.

    Pairs of an element and its place are compared, so no two are equal, and what is in order comes
    out in the order that it had. Padding has the places past the end.
    """
    source, axis = op.args[0], op.attrs["axis"]
    values, places = op.results
    n = source.shape[axis]
    size = 1 << (n - 1).bit_length()
    lines = source.type.numel // n
    ctype = c_type(source.dtype)
    at = -(-lines * size * source.dtype.itemsize // 16) * 16
    e.scratch(at + lines * size * 4)
    keys, where, first = e.fresh("keys"), e.fresh("where"), e.fresh("first")
    e.line(f"{ctype}* const {keys} = ({ctype}*)scratch;")
    e.line(f"int* const {where} = (int*)(scratch + {at});")
    line = _line_strides(source.shape, axis, size)
    own = e.layout(source)
    e.line("__syncthreads();")
    with e.each(own.registers) as r:
        guard = e.inside(own, r)
        with e.braces(f"if ({guard})" if guard else ""):
            e.line(f"const int q = {_at(e, own, r, line)};")
            e.line(f"{keys}[q] = {e.at(source, r)}; {where}[q] = {e.index(own, axis, r)};")
    threads = e.plan.threads
    if size > n:
        with e.braces(f"for (int q = threadIdx.x; q < {lines * (size - n)}; q += {threads})"):
            e.line(f"const int i = {n} + q % {size - n}, p = q / {size - n} * {size} + i;")
            e.line(f"{keys}[p] = {literal(0, source.dtype)}; {where}[p] = i;")
    if n > 1:
        _before(e, first, source.dtype, n, op.attrs["descending"])
        _network(e, keys, where, first, ctype, lines, size)
    e.line("__syncthreads();")
    for result, held in ((values, keys), (places, where)):
        layout, kind = e.layout(result), c_type(result.dtype)
        name = e.declare(result)
        with e.each(layout.registers) as r:
            guard, place = e.inside(layout, r), _at(e, layout, r, line)
            place = f"({guard}) ? {place} : 0" if guard else place
            e.line(f"{name}[{r}] = (({kind}*){held})[{place}];")


def _line_strides(shape: tuple[int, ...], axis: int, size: int) -> list[int]:
    """Strides of a buffer whose lines along an axis are contiguous and `size` apart."""
    rest = [n for a, n in enumerate(shape) if a != axis]
    steps = [s * size for s in _strides(tuple(rest))]
    steps.insert(axis, 1)
    return steps


def _before(e: Emitter, name: str, dtype: DType, n: int, descending: bool) -> None:
    """Whether (a, i) comes before (b, j): a strict order of all pairs."""
    ctype = c_type(dtype)
    working = c_type(f32) if dtype.is_narrow else ctype
    a, b = (convert(x, dtype, f32) if dtype.is_narrow else x for x in ("va", "vb"))
    e.line(f"auto {name} = [&]({ctype} va, int i, {ctype} vb, int j) {{")
    e.line(f"  if (i >= {n} || j >= {n}) return i < j;")
    e.line(f"  const {working} a = {a}, b = {b};")
    if dtype.is_float:
        # NaN counts as the largest.
        e.line("  const bool na = a != a, nb = b != b;")
        e.line(f"  if (na || nb) return na && nb ? i < j : {'na' if descending else 'nb'};")
    more, less = ("a > b", "a < b") if descending else ("a < b", "a > b")
    e.line(f"  return {more} ? true : {less} ? false : i < j; }};")


def _network(
    e: Emitter, keys: str, where: str, first: str, ctype: str, lines: int, size: int
) -> None:
    half = size // 2
    e.line("#pragma unroll 1")
    with e.braces(f"for (int k = 2; k <= {size}; k *= 2)"):
        e.line("#pragma unroll 1")
        with e.braces("for (int j = k / 2; j > 0; j /= 2)"):
            e.line("__syncthreads();")
            with e.braces(f"for (int q = threadIdx.x; q < {lines * half}; q += {e.plan.threads})"):
                e.line(f"const int t = q % {half}, i = t / j * 2 * j + t % j;")
                e.line(f"const int a = q / {half} * {size} + i, b = a + j;")
                e.line(f"const {ctype} va = {keys}[a], vb = {keys}[b];")
                e.line(f"const int pa = {where}[a], pb = {where}[b];")
                # Runs of k go up and down in turn.
                with e.braces(f"if ({first}(vb, pb, va, pa) == ((i & k) == 0))"):
                    e.line(f"{keys}[a] = vb; {keys}[b] = va; {where}[a] = pb; {where}[b] = pa;")

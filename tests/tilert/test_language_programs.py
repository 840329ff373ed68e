"""Random programs of all words: every backend gives what the slow interpreter gives.

Floats hold small whole numbers, so that sums, products and totals are exact in any order and no
comparison hangs on a rounding; a function that rounds comes last, and within a tolerance.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.checks import Frame
from tests.tilert.cpu_reference import Reference, params_of
from tests.tilert.test_language_random import load
from tilert import f32, i32
from tilert.ops import FLOAT_FUNCTIONS

HEADER = """import tilert
from tilert import Dyn, Mut, Ref, bf16, bool_, f8e4m3, f8e5m2, f16, f32, i8, i32, i64, u8, u32
from tilert.language import *


@tilert.kernel
def program(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn], n: Ref[Dyn, Dyn]):
    i, j = y.index
    v0 = x[i, j]
    v1 = n[i, j]
"""
MOST = 1024
"""Elements of a tile."""

Shape = tuple[int, ...]


class Writer:
    """Statements of a program. A variable has a kind ("f", "i" or "b") and a shape."""

    def __init__(self, draw: Any, piece: Shape) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.variables: list[tuple[str, str, Shape]] = [("v0", "f", piece), ("v1", "i", piece)]

    def one(self, kinds: str, rank: int = 0) -> tuple[str, str, Shape]:
        """Any variable of these kinds with at least so many axes."""
        fits = [v for v in self.variables if v[1] in kinds and len(v[2]) >= rank]
        return fits[self.draw(st.integers(0, len(fits) - 1))]

    def choice(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def axis(self, shape: Shape) -> int:
        return self.draw(st.integers(0, len(shape) - 1))

    def add(self, text: str, kind: str, shape: Shape) -> None:
        if int(np.prod(shape)) > MOST:
            return
        if kind == "f":
            # Whole numbers below 64.
            text = f"clamp({text}, -63, 63)"
        name = f"v{len(self.variables)}"
        self.lines.append(f"{name} = {text}")
        self.variables.append((name, kind, shape))

    # Statements

    def unary(self) -> None:
        name, kind, shape = self.one("fib")
        text = {
            "f": ("-{0}", "abs({0})", "floor({0} * 0.5)", "round({0} * 0.5)", "ceil({0} * 0.25)",
                  "trunc({0} * 0.25)", "{0} ** 2", "{0}.to(bf16).to(f32)", "{0}.to(i32).to(f32)",
                  "{0}.to(f16).to(f32)", "fma({0}, 2.0, 1.0)", "round({0}.to(f8e4m3).to(f32))",
                  "round({0}.to(f8e5m2).to(f32))", "maximum({0}, 0.0)", "{0}.to(i8).to(f32)"),
            "i": ("-{0}", "abs({0})", "~{0}", "{0} << 3", "{0} >> 1", "{0} // 3", "{0} % 5",
                  "{0} ** 3", "{0}.to(u8).to(i32)", "{0}.to(i8).to(i32)", "{0} * 17", "{0} ^ 21",
                  "random_bits(5, {0}).to(i32)", "bitcast({0}, u32).to(i64).to(i32)",
                  "(random_uniform({0}[...].to(i64).reshape(-1)[0], {0}) * 8.0).to(i32)"
                  if shape else "{0}"),
            "b": ("~{0}", "{0} ^ True", "{0}.to(i32) > 0"),
        }[kind]  # fmt: skip
        self.add(self.choice(*text).format(name), kind, shape)

    def binary(self) -> None:
        name, kind, shape = self.one("fib")
        others = [v for v in self.variables if v[1] == kind and fits(v[2], shape)]
        other, _, more = others[self.draw(st.integers(0, len(others) - 1))]
        text = {
            "f": ("{0} + {1}", "{0} - {1}", "{0} * {1}", "maximum({0}, {1})", "minimum({0}, {1})",
                  "where({0} < {1}, {0}, {1} + 1)", "fma({0}, {1}, {1})"),
            "i": ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} & {1}", "{0} | {1}", "{0} ^ {1}",
                  "maximum({0}, {1})", "where({0} == {1}, {0}, {1})", "{0} // (abs({1}) % 7 + 1)"),
            "b": ("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "{0} == {1}"),
        }[kind]  # fmt: skip
        wide = np.broadcast_shapes(shape, more) if shape and more else shape or more
        self.add(self.choice(*text).format(name, other), kind, tuple(wide))

    def compare(self) -> None:
        name, _kind, shape = self.one("fi")
        operator = self.choice("<", "<=", ">", ">=", "==", "!=")
        self.add(f"{name} {operator} {self.draw(st.integers(-5, 5))}", "b", shape)

    def convert(self) -> None:
        name, kind, shape = self.one("fib")
        if kind == "i":
            self.add(f"({name} % 32).to(f32)", "f", shape)
        else:
            self.add(f"{name}.to({self.choice('i32', 'i32')})", "i", shape)

    def reduce(self) -> None:
        name, kind, shape = self.one("fib", 1)
        axis = self.choice(None, *range(len(shape)))
        keep = self.draw(st.booleans())
        word = self.choice(*(("any", "all") if kind == "b" else ("sum", "max", "min")))
        left = np.zeros(shape).sum(axis, keepdims=keep).shape
        self.add(f"{word}({name}, {axis}, keepdims={keep})", kind, left)

    def place(self) -> None:
        name, _kind, shape = self.one("fi", 1)
        axis = self.axis(shape)
        left = shape[:axis] + shape[axis + 1 :]
        self.add(f"{self.choice('argmax', 'argmin')}({name}, {axis})", "i", left)

    def scan(self) -> None:
        name, kind, shape = self.one("fi", 1)
        axis = self.axis(shape)
        word = self.choice("cumsum", "cummax", "cummin", "cumprod", "prod")
        if word == "prod":
            left = shape[:axis] + shape[axis + 1 :]
            self.add(f"prod(clamp({name}, -1, 1), {axis})", kind, left)
            return
        source = f"clamp({name}, -1, 1)" if word == "cumprod" else name
        self.add(f"{word}({source}, {axis})", kind, shape)

    def order(self) -> None:
        name, kind, shape = self.one("fi", 1)
        axis, down = self.axis(shape), self.draw(st.booleans())
        if self.draw(st.booleans()):
            k = self.draw(st.integers(1, shape[axis]))
            left = (*shape[:axis], k, *shape[axis + 1 :])
            at = self.draw(st.integers(0, 1))
            self.add(f"topk({name}, {k}, {axis})[{at}]", "i" if at else kind, left)
            return
        word = self.choice("sort", "argsort")
        self.add(f"{word}({name}, {axis}, {down})", kind if word == "sort" else "i", shape)

    def move(self) -> None:
        name, kind, shape = self.one("fib", 1)
        axis = self.axis(shape)
        what = self.choice("permute", "reshape", "insert", "slice", "concat", "spread", "index")
        if what == "permute":
            order = self.draw(st.permutations(range(len(shape))))
            self.add(f"{name}.permute({tuple(order)})", kind, tuple(shape[a] for a in order))
        elif what == "reshape":
            self.add(f"{name}.reshape(-1)", kind, (int(np.prod(shape)),))
        elif what == "insert" and len(shape) < 3:
            self.add(f"{name}[{':, ' * axis}None]", kind, (*shape[:axis], 1, *shape[axis:]))
        elif what == "slice":
            cut = slice(self.draw(st.integers(-shape[axis], shape[axis])), None,
                        self.choice(1, 2, -1))  # fmt: skip
            left = len(range(shape[axis])[cut])
            if left:
                text = f"{cut.start}::{cut.step}"
                self.add(f"{name}[{':, ' * axis}{text}]", kind,
                         (*shape[:axis], left, *shape[axis + 1 :]))  # fmt: skip
        elif what == "index":
            at = self.draw(st.integers(0, shape[axis] - 1))
            self.add(f"{name}[{':, ' * axis}{at}]", kind, shape[:axis] + shape[axis + 1 :])
        elif what == "concat":
            fits = [
                v for v in self.variables
                if v[1] == kind and len(v[2]) == len(shape)
                and v[2][:axis] + v[2][axis + 1 :] == shape[:axis] + shape[axis + 1 :]
            ]  # fmt: skip
            other, _, more = fits[self.draw(st.integers(0, len(fits) - 1))]
            size = shape[axis] + more[axis]
            self.add(f"concatenate(({name}, {other}), {axis})", kind,
                     (*shape[:axis], size, *shape[axis + 1 :]))  # fmt: skip
        elif what == "spread" and shape[axis] == 1:
            wide = (*shape[:axis], 3, *shape[axis + 1 :])
            self.add(f"broadcast_to({name}, {wide})", kind, wide)

    def take(self) -> None:
        name, kind, shape = self.one("fib", 1)
        axis = self.axis(shape)
        index, _, places = self.one("i")
        index = f"({index} % {shape[axis] + 2})"
        if len(places) == 1:
            self.add(f"take({name}, {index}, {axis})", kind,
                     (*shape[:axis], *places, *shape[axis + 1 :]))  # fmt: skip
        elif not places:
            self.add(f"take({name}, {index}, {axis})", kind, shape[:axis] + shape[axis + 1 :])
        elif len(places) == len(shape):
            rest = [a for a in range(len(shape)) if a != axis]
            if all(1 in (shape[a], places[a]) or shape[a] == places[a] for a in rest):
                wide = [max(m, n) for m, n in zip(shape, places, strict=True)]
                wide[axis] = places[axis]
                source = tuple(shape[axis] if a == axis else w for a, w in enumerate(wide))
                if int(np.prod(source)) <= MOST:
                    self.add(f"take_along({name}, {index}, {axis})", kind, tuple(wide))

    def mma(self) -> None:
        name, _, shape = self.one("f", 2)
        other, _, more = self.one("f", 2)
        dtype = self.choice("f32", "bf16", "f16", "i8")
        acc = "i32" if dtype == "i8" else "f32"
        if len(shape) == 2 and len(more) == 2 and shape[1] in more:
            turn = ".T" if shape[1] == more[1] else ""
            n = more[0] if turn else more[1]
            pair = f"{name}.to({dtype}), {other}.to({dtype}){turn}"
            text = f"mma({pair}, zeros(({shape[0]}, {n}), {acc}))"
            self.add(f"{text}.to(f32)", "f", (shape[0], n))

    def program(self) -> None:
        name, _kind, shape = self.one("i")
        self.add(f"{name} + i.number * 3 - j.start", "i", shape)

    def text(self, piece: Shape, last: str) -> str:
        """The program; its last variable fills the piece, repeated or cut."""
        name, kind, shape = self.variables[-1]
        count, size = piece[0] * piece[1], int(np.prod(shape))
        flat = f"{name}.to(f32)" if kind != "f" else name
        if kind == "i":
            flat = f"({name} % 4096).to(f32)"
        lines = [
            *self.lines,
            f"w = {flat if shape else f'full((1,), {flat}, f32)'}.reshape(-1)",
            f"w = take(w, iota({count}) % {size}, 0).reshape({piece})",
            f"y.store({last.format('w')})",
        ]
        return HEADER + "".join(f"    {line}\n" for line in lines)


STATEMENTS = [
    Writer.unary, Writer.unary, Writer.binary, Writer.binary, Writer.compare, Writer.convert,
    Writer.reduce, Writer.place, Writer.scan, Writer.order, Writer.move, Writer.move, Writer.move,
    Writer.take, Writer.mma, Writer.program,
]  # fmt: skip
LAST = ["{0}"] * 12 + [f"{name}({{0}} * 0.01)" for name in FLOAT_FUNCTIONS]
LAST += ["atan2({0}, 2.0)", "pow(abs({0}) + 1, 0.3)", "random_normal(3, {0}.to(i32))", "{0} / 3.0"]


def fits(a: Shape, b: Shape) -> bool:
    if not a or not b:
        return True
    return len(a) == len(b) and all(m == n or 1 in (m, n) for m, n in zip(a, b, strict=True))


@st.composite
def programs(draw: Any) -> tuple[str, np.ndarray, np.ndarray, Shape]:
    piece = (draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([1, 4, 5, 16])))
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 20)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.integers(-9, 10, shape).astype(np.float32)
    n = rng.integers(-9, 10, shape).astype(np.int32)
    writer = Writer(draw, piece)
    for _ in range(draw(st.integers(1, 10))):
        draw(st.sampled_from(STATEMENTS))(writer)
    return writer.text(piece, draw(st.sampled_from(LAST))), x, n, piece


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(programs())
def test_random_program(
    device: tilert.Device, case: tuple[str, np.ndarray, np.ndarray, Shape]
) -> None:
    text, x, n, piece = case
    kernel = load(text)
    y = Frame(device, x.shape, f32, margin=1)
    kernel(y.piece(*piece), *(tilert.from_numpy(v, device) for v in (x, n))).sync()
    want = np.zeros(x.shape, np.float32)
    arrays = [want, x, n]
    grid = tuple(-(-m // p) for m, p in zip(x.shape, piece, strict=True))
    function = kernel.specialize(params_of(kernel, arrays, {0: piece}, set()), grid, ())
    Reference(function, arrays, {}, grid).run()
    y.check(want, steps=16)


@pytest.mark.parametrize("seed", range(3))
def test_orders_of_one_row_agree(device: tilert.Device, seed: int) -> None:
    """sort, argsort, topk and take of the same long row."""
    x = np.random.default_rng(seed).integers(-50, 50, (2, 700)).astype(np.float32)
    y = Frame(device, (2, 700))
    places = Frame(device, (2, 700), i32)
    agreeing(y.piece(1, 700), places.piece(1, 700), tilert.from_numpy(x, device)).sync()
    y.check_exact(np.zeros((2, 700)))
    places.check_exact(np.argsort(-x, 1, kind="stable"))


@tilert.kernel
def agreeing(y: tilert.Mut[tilert.Dyn], places: tilert.Mut[tilert.Dyn], x: tilert.Ref[tilert.Dyn]):
    lang = tilert.language
    i, j = y.index
    v = x[i, j]
    best, at = lang.topk(v, 700)
    order = lang.argsort(v, 1, True)
    rest = lang.abs(lang.take_along(v, order, 1) - best) + lang.abs((at - order).to(f32))
    y.store(rest + lang.abs(lang.sort(v)[:, ::-1] - best))
    places.store(at)

"""Random small programs of elementwise work, broadcasts and reductions, against NumPy."""

import importlib.util
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.checks import Frame
from tilert import f32, i32

HEADER = """import tilert
from tilert import Mut, Ref, f32, i32
from tilert.language import exp, full, iota, maximum, minimum, tanh, where


@tilert.kernel
def program(y: Mut, x: Ref, n: Ref):
"""


@dataclass(frozen=True)
class Tile:
    """A variable of the program: its name, what it holds, and the size of its rounding errors."""

    name: str
    value: np.ndarray
    error: np.ndarray | float

    @property
    def exact(self) -> bool:
        return self.value.dtype == np.int64


UNIT = 2.0**-23
"""A relative error in f32 with room for functions, which round twice or so."""


class Program:
    """Statements as source text, with the float64 meaning and a bound of the error along them."""

    def __init__(self, x: np.ndarray, n: np.ndarray) -> None:
        self.lines: list[str] = []
        self.tiles = [
            self.new("x[:, :]", x.astype(np.float64), 0.0),
            self.new("n[:, :]", n.astype(np.int64), 0.0),
        ]

    def new(self, text: str, value: np.ndarray, error: Any) -> Tile:
        name = f"v{len(self.lines)}"
        self.lines.append(f"    {name} = {text}")
        return Tile(name, value, error)

    def add(self, text: str, value: np.ndarray, error: Any) -> None:
        """Keep a statement whose values stay of a moderate size."""
        if value.size <= 4096 and np.all(np.abs(value) < 1e5):
            own = 0.0 if value.dtype == np.int64 else UNIT * np.abs(value)
            self.tiles.append(self.new(text, value, own + error))

    def text(self) -> str:
        last = self.tiles[-1]
        shown = last.name if not last.exact else f"{last.name}.to(f32)"
        return HEADER + "\n".join(self.lines) + f"\n    y.store({shown})\n"


UNARY = {
    "-{0}": (np.negative, lambda x, e: e),
    "abs({0})": (np.abs, lambda x, e: e),
    "tanh({0})": (np.tanh, lambda x, e: e),
    "exp(minimum({0}, 3.0))": (
        lambda x: np.exp(np.minimum(x, 3)),
        lambda x, e: e * np.exp(np.minimum(x, 3)),
    ),
    "{0} * 0.5 + 1": (lambda x: x * 0.5 + 1, lambda x, e: e * 0.5 + UNIT),
    "{0}.to(f32)": (lambda x: x, lambda x, e: e),
}
BINARY = {
    "{0} + {1}": (np.add, lambda a, b, e, f: e + f),
    "{0} - {1}": (np.subtract, lambda a, b, e, f: e + f),
    "{0} * {1}": (np.multiply, lambda a, b, e, f: np.abs(a) * f + np.abs(b) * e + e * f),
    "maximum({0}, {1})": (np.maximum, lambda a, b, e, f: e + f),
    "minimum({0}, {1})": (np.minimum, lambda a, b, e, f: e + f),
    # Continuous where the condition flips, so that rounding cannot choose another value.
    "where({0} > {1}, {0}, {1})": (np.maximum, lambda a, b, e, f: e + f),
}
INTEGER = {"{0} + {1}", "{0} - {1}", "{0} * {1}", "maximum({0}, {1})", "minimum({0}, {1})"}
REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min}


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    if not a or not b:
        return True
    return len(a) == len(b) and all(m == n or 1 in (m, n) for m, n in zip(a, b, strict=True))


@st.composite
def programs(draw: Any) -> tuple[str, np.ndarray, np.ndarray, Tile]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.sampled_from([1, 2, 3, 7, 16, 33])), draw(st.sampled_from([1, 2, 5, 32, 70])))
    x = rng.uniform(-2, 2, shape).astype(np.float32)
    n = rng.integers(-4, 5, shape).astype(np.int32)
    program = Program(x, n)
    for _ in range(draw(st.integers(1, 8))):
        a = program.tiles[draw(st.integers(0, len(program.tiles) - 1))]
        kind = draw(st.sampled_from(["unary", "binary", "binary", "reduce", "shape", "iota"]))
        if kind == "unary" and not a.exact:
            text, (meaning, error) = draw(st.sampled_from(sorted(UNARY.items())))
            program.add(text.format(a.name), meaning(a.value), error(a.value, a.error))
        elif kind == "binary":
            fits = [
                t
                for t in program.tiles
                if t.exact == a.exact and broadcasts(t.value.shape, a.value.shape)
            ]
            b = draw(st.sampled_from(fits))
            text = draw(st.sampled_from(sorted(INTEGER if a.exact else BINARY)))
            meaning, error = BINARY[text]
            value = meaning(a.value, b.value)
            program.add(
                text.format(a.name, b.name), value, error(a.value, b.value, a.error, b.error)
            )
        elif kind == "reduce" and a.value.ndim:
            axis = draw(st.sampled_from([None, *range(a.value.ndim)]))
            keep = draw(st.booleans())
            name = draw(st.sampled_from(sorted(REDUCTIONS)))
            value = REDUCTIONS[name](a.value, axis=axis, keepdims=keep)
            spread = np.broadcast_to(a.error, a.value.shape)
            if name == "sum":
                error = np.sum(spread + UNIT * 8 * np.abs(a.value), axis=axis, keepdims=keep)
            else:
                error = np.max(spread, axis=axis, keepdims=keep)
            text = f"{name}({a.name}, axis={axis}, keepdims={keep})"
            program.add(text, np.asarray(value), 0.0 if a.exact else error)
        elif kind == "shape" and a.value.ndim:
            moved = reshaped(draw, a)
            if moved is not None:
                text, new = moved
                spread = np.broadcast_to(a.error, a.value.shape)
                error = spread.T if text.endswith(".T") else spread.reshape(new.shape)
                program.add(text, new, error)
        elif kind == "iota" and a.value.ndim == 1:
            value = np.arange(a.value.shape[0])
            program.add(f"iota({a.value.shape[0]})", value, 0.0)
    return program.text(), x, n, program.tiles[-1]


def reshaped(draw: Any, a: Tile) -> tuple[str, np.ndarray] | None:
    shape = a.value.shape
    options = ["flat"]
    if len(shape) == 1:
        options += ["column", "row"]
    if len(shape) == 2:
        options += ["transpose", "swapped", "split"]
    choice = draw(st.sampled_from(options))
    if choice == "column":
        return f"{a.name}[:, None]", a.value[:, None]
    if choice == "row":
        return f"{a.name}[None, :]", a.value[None, :]
    if choice == "transpose":
        return f"{a.name}.T", a.value.T
    if choice == "swapped":
        return f"{a.name}.reshape({shape[::-1]})", a.value.reshape(shape[::-1])
    if choice == "split":
        return f"{a.name}.reshape(1, {shape[0]}, -1)", a.value.reshape(1, *shape)
    return f"{a.name}.reshape(-1)", a.value.reshape(-1)


def load(text: str) -> tilert.Kernel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel: tilert.Kernel = module.program
        return kernel


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(programs())
def test_random_program(
    device: tilert.Device, case: tuple[str, np.ndarray, np.ndarray, Tile]
) -> None:
    text, x, n, last = case
    shape = last.value.shape or (1,)
    y = Frame(device, shape, f32, margin=1)
    load(text)(y.piece(*shape), *(tilert.from_numpy(v, device) for v in (x, n))).sync()
    want = np.broadcast_to(last.value, shape)
    # One more unit than the bound: storing an integer tile rounds it.
    error = np.broadcast_to(last.error, shape) + UNIT * np.abs(want)
    y.check(want, steps=1, scale=error / UNIT * 2 + np.finfo(np.float32).tiny)


@pytest.mark.parametrize("seed", range(3))
def test_random_grids(device: tilert.Device, seed: int) -> None:
    """The same program over pieces of every size."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        shape = tuple(int(v) for v in rng.integers(0, 40, 2))
        tile = tuple(int(2**v) for v in rng.integers(0, 6, 2))
        x = rng.integers(-99, 99, shape).astype(np.int32)
        y = Frame(device, shape, i32)
        block_sums(y.piece(*tile), tilert.from_numpy(x, device)).sync()
        want = x.astype(np.int64)
        grid = [math.ceil(n / t) for n, t in zip(shape, tile, strict=True)]
        for i in range(grid[0]):
            for j in range(grid[1]):
                cut = (
                    slice(i * tile[0], (i + 1) * tile[0]),
                    slice(j * tile[1], (j + 1) * tile[1]),
                )
                part = want[cut].copy()
                want[cut] = part - part.sum() + part.sum(0)[None] * 3 + i - j
        y.check(want)


@tilert.kernel
def block_sums(y: tilert.Mut[tilert.Dyn, tilert.Dyn], x: tilert.Ref[tilert.Dyn, tilert.Dyn]):
    i, j = y.index
    v = x[i, j]
    y.store(v - sum(v) + sum(v, axis=0, keepdims=True) * 3 + i.number - j.number)

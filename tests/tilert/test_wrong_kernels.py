"""One wrong kernel, one exact message, with the caret under the offending place. No GPU."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.wrong_decorations import AT_DECORATION
from tests.tilert.wrong_tiles import WHOLE_TILES
from tests.tilert.wrong_types import TYPES_AND_SHAPES
from tests.tilert.wrong_words import CONTROL_AND_WORDS
from tilert import Const, Dyn, KernelError, LaunchError, MovedError, Mut, OwnershipError, Ref
from tilert.dtypes import bf16, bool_, f32, i32, u32

AT_SPECIALISATION = TYPES_AND_SHAPES | CONTROL_AND_WORDS | WHOLE_TILES

HEADER = """import tilert
from tilert import Accumulate, Const, Dyn, Mut, Ref, bf16, f8e4m3, f8e5m2, f16, f32, i8, i32, u32
from tilert.language import *  # noqa: F403
"""
ARRAYS = {
    "x": ((8,), f32),
    "xx": ((8, 16), f32),
    "h": ((8, 16), bf16),
    "n": ((8,), i32),
    "u": ((8,), u32),
    "b": ((8,), bool_),
}
PIECES = {"y": ((8,), (4,)), "z": ((8,), (4,)), "yy": ((8, 8), (8, 8))}

# What nobody who only writes kernels has heard of.
INTERNAL = re.compile(
    r"\b(Value|Op|Tracer|Expressions|Builder|TileType|TileIndex|RefArg|MutArg|BoundMethod|Builtin"
    r"|Inline|NoneType|ast)\b|tilert\.(?!inline|kernel|from_numpy|language)|object at 0x|\b_[a-z]"
    r"|dataclass"
)


def module(folder: Path, text: str) -> ModuleType:
    path = folder / "wrong.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("wrong", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def call(kernel: tilert.Kernel) -> tilert.Op:
    dev = tilert.device("cpu")
    values: list[Any] = []
    for d in kernel.decls:
        if d.kind == "mut":
            shape, tile = PIECES[d.name]
            values.append(tilert.zeros(shape, f32, dev).partition(*tile))
        else:
            shape, dtype = ARRAYS[d.name]
            values.append(tilert.zeros(shape, dtype, dev))
    return kernel(*values)


def checked(folder: Path, source: str, message: str, stage: Callable[[ModuleType], Any]) -> None:
    text = HEADER + source.replace("\ndef k", "\n@tilert.kernel\ndef k").replace(
        "\n§def k", "\n@tilert.kernel\n§def k"
    )
    before = text[: text.index("§")]
    line, column = before.count("\n") + 1, len(before) - before.rindex("\n") - 1
    text = text.replace("§", "")
    with pytest.raises(KernelError) as caught:
        stage(module(folder, text))
    error = caught.value
    assert error.message == message
    shown = text.splitlines()[line - 1]
    assert str(error).splitlines()[-3:] == [
        f"  {folder / 'wrong.py'}:{line}",
        f"    {shown}",
        "    " + " " * column + "^",
    ]
    assert (error.line, error.column) == (line, column)
    assert not INTERNAL.search(message)
    assert "Traceback" not in str(error)


@pytest.mark.parametrize("case", AT_DECORATION)
def test_refused_at_decoration(case: str, tmp_path: Path) -> None:
    source, message = AT_DECORATION[case]
    checked(tmp_path, source, message, lambda loaded: loaded)


@pytest.mark.parametrize("case", AT_SPECIALISATION)
def test_refused_at_specialisation(case: str, tmp_path: Path) -> None:
    source, message = AT_SPECIALISATION[case]
    checked(tmp_path, source, message, lambda loaded: call(loaded.k))


def test_an_error_in_a_helper_says_who_called_it(tmp_path: Path) -> None:
    text = (
        HEADER
        + """
@tilert.inline
def inner(v):
    return v[8]

@tilert.inline
def outer(v):
    return inner(v)

@tilert.kernel
def k(y: Mut, x: Ref):
    y.store(outer(x[:]))
"""
    )
    with pytest.raises(KernelError) as caught:
        call(module(tmp_path, text).k)
    assert caught.value.line == 7
    assert caught.value.__notes__ == ["in a function that k() calls at line 15"]


def test_indented_kernels_point_at_the_right_column(tmp_path: Path) -> None:
    text = (
        HEADER
        + '''
def make():
    if True:
        @tilert.kernel
        def k(y: Mut, x: Ref):
            """A text that reaches
further left than the code."""
            y.store(1.0 + x[8])
        return k
'''
    )
    with pytest.raises(KernelError) as caught:
        call(module(tmp_path, text).make())
    assert (caught.value.line, caught.value.column) == (11, 26)


# Launches


@tilert.kernel
def scaled(y: Mut[Dyn], x: Ref[Dyn], scale: Const[float] = 1.0, repeat: Const[int] = 1):
    (i,) = y.index
    y.store(x[i] * scale * repeat)


@tilert.kernel
def two(y: Mut, z: Mut):
    y.store(0.0)
    z.store(0.0)


def array(*shape: int) -> tilert.Array:
    return tilert.zeros(shape, f32, tilert.device("cpu"))


LAUNCHES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a missing argument": (
        lambda: scaled(array(8).partition(4)),
        LaunchError,
        "kernel 'scaled': argument 'x' is missing",
    ),
    "a surplus argument": (
        lambda: scaled(array(8).partition(4), array(8), 1.0, 1, 5),
        LaunchError,
        "kernel 'scaled' takes 4 arguments, 5 are given",
    ),
    "an unknown keyword": (
        lambda: scaled(array(8).partition(4), array(8), factor=2.0),
        LaunchError,
        "kernel 'scaled' has no parameter 'factor'",
    ),
    "an argument given twice": (
        lambda: scaled(array(8).partition(4), array(8), 1.0, scale=2.0),
        LaunchError,
        "kernel 'scaled': argument 'scale' is given twice",
    ),
    "a constant of another type": (
        lambda: scaled(array(8).partition(4), array(8), repeat=2.5),
        LaunchError,
        "kernel 'scaled': 'repeat' is a compile-time int, got float 2.5",
    ),
    "a constant too large for a float": (
        lambda: scaled(array(8).partition(4), array(8), scale=10**400),
        LaunchError,
        "kernel 'scaled': 'scale' is an int too large for a float",
    ),
    "a constant of more than 64 bits": (
        lambda: scaled(array(8).partition(4), array(8), repeat=10**5000),
        LaunchError,
        "kernel 'scaled': 'repeat' must fit in 64 bits",
    ),
    "an array in place of a partition": (
        lambda: scaled(array(8), array(8)),
        LaunchError,
        "kernel 'scaled' writes 'y': pass y.partition(tile0), not the array",
    ),
    "a partition in place of an array": (
        lambda: scaled(array(8).partition(4), array(8).partition(4)),
        LaunchError,
        "argument 'x' of kernel 'scaled' must be an Array, got Partition; the kernel only reads"
        " it, so pass the array",
    ),
    "NumPy in place of an array": (
        lambda: scaled(array(8).partition(4), np.zeros(8)),
        LaunchError,
        "argument 'x' of kernel 'scaled' must be an Array, got ndarray;"
        " tilert.from_numpy(value, device) copies host data to a device",
    ),
    "too few axes": (
        lambda: scaled(array(8).partition(4), array()),
        LaunchError,
        "argument 'x' of kernel 'scaled' is declared with a run-time axis 0, got shape []",
    ),
    "a tile of another rank": (
        lambda: array(8).partition(4, 4),
        LaunchError,
        "partition takes one size for each axis: got 2 sizes, [4, 4], for an array of shape [8]",
    ),
    "a piece that is too large": (
        lambda: array(8).partition(2**40),
        LaunchError,
        "a piece of [1099511627776] is too large: it has at most 67108864 elements",
    ),
    "a tile that is no int": (
        lambda: array(8).partition(2.0),  # type: ignore[arg-type]
        LaunchError,
        "the sizes of a tile are ints, got (2.0,)",
    ),
    "grids that disagree": (
        lambda: two(array(8).partition(4), array(8).partition(2)),
        OwnershipError,
        "O2 disjoint pieces: the Muts of kernel 'two' disagree on the grid: 'y' has [2] pieces and"
        " 'z' [4]",
    ),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_refused_at_launch(case: str) -> None:
    launch, kind, message = LAUNCHES[case]
    with pytest.raises(kind) as caught:
        launch()
    assert str(caught.value) == message
    assert not INTERNAL.search(message)


ALIAS = (
    "O3 alias xor mutate: argument 'x' of kernel 'scaled' overlaps the memory that 'y' writes;"
    " copy one of them into its own array"
)
MOVED = "O5 move: array of shape [8] is held by op 'scaled' created at "
REPEATED = "O7 indexed pieces: row 3 occurs twice in the index map, at entries 0 and 2"


def test_aliases_are_refused_at_launch() -> None:
    a = array(16)
    with pytest.raises(OwnershipError) as caught:
        scaled(a[:8].partition(4), a[4:12])
    assert str(caught.value) == ALIAS
    scaled(a[:8].partition(4), a[8:]).run()


def test_a_moved_array_is_refused() -> None:
    a, b = array(8), array(8)
    op = scaled(a.partition(4), b)
    with pytest.raises(MovedError) as caught:
        scaled(b.partition(4), a)
    assert str(caught.value).startswith(MOVED)
    assert str(caught.value).endswith("; use what its .run() or .sync() returns")
    assert op.run() is a
    a.numpy()


def test_a_repeated_row_is_refused() -> None:
    with pytest.raises(OwnershipError) as caught:
        tilert.UniqueIndex.checked(np.array([3, 0, 3]), tilert.device("cpu"))
    assert str(caught.value) == REPEATED


def test_words_called_outside_a_kernel() -> None:
    from tilert.language import exp

    with pytest.raises(RuntimeError, match=r"^exp\(x\) works only inside a @tilert.kernel"):
        exp(1.0)


STORES = """
import types

@tilert.inline
def put(y, v):
    y.store(v)

@tilert.inline
def both(pair):
    y, v = pair
    put(v=v, y=y)

@tilert.inline
def same(y):
    return y

names = types.SimpleNamespace(put=put)

@tilert.kernel
def k(y: Mut, x: Ref):
    {}
"""


@pytest.mark.parametrize(
    "body",
    [
        "put(y, x.tile_like(y))",
        "names.put(y, x.tile_like(y))",
        "both((y, x.tile_like(y)))",
        "both(pair=(y, x.tile_like(y)))",
        "put(*(y, x.tile_like(y)))",
        "z = y; z.store(x.tile_like(z))",
        "z, v = y, x.tile_like(y); z.store(v)",
        "z = same(y); z.store(x.tile_like(z))",
        "keep = y.store; keep(x.tile_like(y))",
        "f = put; f(y, x.tile_like(y))",
    ],
)
def test_a_store_under_another_name(body: str, tmp_path: Path) -> None:
    k = module(tmp_path, HEADER + STORES.format(body)).k
    dev = tilert.device("cpu")
    x = tilert.full(8, 3.0, f32, dev)
    y = k(tilert.zeros(8, f32, dev).partition(4), x).sync()
    assert (y.numpy() == 3).all()

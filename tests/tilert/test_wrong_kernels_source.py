"""What is not a function in a file cannot be a kernel: one readable error for each kind."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.test_wrong_kernels import HEADER, module
from tilert import Const, KernelError, Mut, Ref, f32

dev = tilert.device("cpu")
ROOT = Path(__file__).parents[2]


def plain(y: Mut) -> None:
    y.store(0.0)


async def waits(y: Mut) -> None:
    y.store(0.0)


@functools.wraps(plain)
def wrapper(*args: Any, **kwargs: Any) -> None:
    plain(*args, **kwargs)


class Holder:
    def method(self, y: Mut) -> None:
        y.store(0.0)


@tilert.kernel
def ready(y: Mut):
    y.store(0.0)


TAKES = "{} takes a plain `def` function, got "
OTHERS: dict[str, tuple[Any, str]] = {
    "partial": (functools.partial(plain), TAKES + "a partial"),
    "lambda": (lambda y: None, TAKES + "a lambda"),
    "a built-in": (len, TAKES + "a builtin_function_or_method 'len'"),
    "a class": (Holder, TAKES + "a class 'Holder'"),
    "a method": (Holder().method, TAKES + "a method 'method'"),
    "a string": ("k", TAKES + "a str"),
    "a kernel": (ready, TAKES + "a Kernel"),
    "async": (waits, TAKES + "an async one"),
    "a wrapper": (wrapper, "'plain' is what another decorator made; put @{} next to the def"),
}


@pytest.mark.parametrize("decorator", [tilert.kernel, tilert.inline])
@pytest.mark.parametrize("case", OTHERS)
def test_only_a_plain_function(case: str, decorator: Callable[..., Any]) -> None:
    given, message = OTHERS[case]
    with pytest.raises(TypeError) as caught:
        decorator(given)
    assert str(caught.value) == message.format(f"tilert.{decorator.__name__}")


def test_no_file() -> None:
    scope: dict[str, Any] = {}
    exec("def made(y):\n    pass", scope)
    with pytest.raises(KernelError, match=r"^the source of 'made' is not at hand"):
        tilert.kernel(scope["made"])


@pytest.mark.parametrize("given", ["-c", "-"])
def test_a_kernel_that_is_in_no_file(given: str) -> None:
    text = "import tilert\n@tilert.kernel\ndef typed(y: tilert.Mut):\n    y.store(1.0)\n"
    command = [sys.executable, *(["-c", text] if given == "-c" else ["-"])]
    ran = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 1
    said = ran.stderr[ran.stderr.index("KernelError: ") :].splitlines()
    assert said[0] == (
        "KernelError: the source of 'typed' is not at hand: tilert.kernel reads it from a file, and"
        " what is typed at a prompt, given to python -c or on stdin, or made by exec() is in none;"
        " put it in a .py file, and run or import that"
    )
    assert said[1] == f"  {'<string>' if given == '-c' else '<stdin>'}:2"


BODY = """
@tilert.kernel
def k(y: Mut, x: Ref, c: Const[float] = 2.0):
    i = y.index[0]
    y.store(x[i] * c + 1.5)
"""
CHANGES = {
    "another operator": ("x[i] * c", "x[i] - c"),
    "another number": ("1.5", "2.5"),
    "a zero of another sign": ("+ 1.5", "+ 1.5 * -0.0"),
    "another name": ("x[i]", "y.load()"),
    "another function": ("def k", "def other"),
    "other parameters": ("x: Ref, c", "x: Ref, d"),
    "more statements": ("    i =", "    y.store(0.0)\n    i ="),
}


@pytest.mark.parametrize("case", CHANGES)
def test_text_of_another_function(case: str, tmp_path: Path) -> None:
    """exec() of a text under the name of a file that holds another one."""
    path = tmp_path / "k.py"
    path.write_text(HEADER + BODY)
    old, new = CHANGES[case]
    made = compile(HEADER + BODY.replace(old, new), str(path), "exec")
    want = (
        rf"^the text at {re.escape(str(path))}:\d+ is not the source of '(k|other)': the file has"
    )
    with pytest.raises(TypeError, match=want):
        exec(made, {})


def test_the_same_text_under_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "k.py"
    path.write_text(HEADER + BODY)
    scope: dict[str, Any] = {}
    exec(compile(HEADER + BODY, str(path), "exec"), scope)
    x = tilert.full(4, 3.0, f32, dev)
    y = scope["k"](tilert.empty(4, f32, dev).partition(2), x).sync()
    assert (y.numpy() == 7.5).all()


def test_a_changed_file(tmp_path: Path) -> None:
    text = HEADER + "\ndef k(y: Mut):\n    y.store(1.0)\n"
    loaded = module(tmp_path, text)
    (tmp_path / "wrong.py").write_text(text.replace("1.0", "-1.0"))
    with pytest.raises(TypeError, match="the file has changed since it was imported"):
        tilert.kernel(loaded.k)


def test_shapes_of_source_that_are_fine(tmp_path: Path) -> None:
    """Closures, defaults, nesting, docstrings and asserts."""
    text = (
        HEADER
        + """
def make(scale, table):
    class Inside:
        if True:
            @tilert.kernel
            def k(y: Mut, *, c: Const[float] = 1.0):
                '''Text.'''
                assert y.shape[0] == 2, "two"
                a, b = table
                y.store(0.0)
                if c > 0:
                    assert b > a
                    y.store((a + b) * scale * c)
    return Inside.k
"""
    )
    k = module(tmp_path, text).make(3.0, (1, 2))
    y = k(tilert.empty(4, f32, dev).partition(2), c=2.0).sync()
    assert (y.numpy() == 18).all()


def test_rewritten_asserts() -> None:
    """pytest has rewritten the asserts of this very file."""

    @tilert.kernel
    def k(y: Mut, x: Ref, n: Const[int] = 2):
        assert y.shape[0] == n, "pieces of n"
        assert n > 1
        y.store(x[y.index[0]] * n)

    y = k(tilert.empty(4, f32, dev).partition(2), tilert.full(4, 1.5, f32, dev)).sync()
    np.testing.assert_array_equal(y.numpy(), 3.0)


WORDS_OF_MODULES = """
import math
import numpy as np
import tilert.language
import tilert.language as tl
from tilert import language as tl2

@tilert.kernel
def k(y: Mut, x: Ref):
    v = {}(x.tile_like(y))
    y.store(v + tl2.exp2(v))
"""


@pytest.mark.parametrize("word", ["tl.abs", "tl2.abs", "tilert.language.abs"])
def test_words_through_an_imported_module(word: str, tmp_path: Path) -> None:
    """Calling an attribute of an import is another instruction than calling a method."""
    k = module(tmp_path, HEADER + WORDS_OF_MODULES.format(word)).k
    x = tilert.full(8, -2.0, f32, dev)
    y = k(tilert.zeros(8, f32, dev).partition(4), x).sync()
    assert (y.numpy() == 6).all()


@pytest.mark.parametrize("word", ["np.exp", "math.exp"])
def test_words_of_other_modules(word: str, tmp_path: Path) -> None:
    k = module(tmp_path, HEADER + WORDS_OF_MODULES.format(word)).k
    y, x = (tilert.zeros(8, f32, dev) for _ in range(2))
    with pytest.raises(tilert.KernelError) as caught:
        k(y.partition(4), x)
    assert caught.value.message == (
        f"{word} is not a word of the language; use exp of tilert.language"
    )
    assert caught.value.column == len("    v = ")


def test_another_word_of_a_module_is_another_text(tmp_path: Path) -> None:
    text = HEADER + WORDS_OF_MODULES.format("tl.exp")
    path = tmp_path / "k.py"
    path.write_text(text)
    with pytest.raises(TypeError, match="is not the source of 'k'"):
        exec(compile(text.replace("tl.exp", "tl.sin"), str(path), "exec"), {})

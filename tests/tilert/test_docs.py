"""The examples of docs/language.md run, and its errors are those that kernels give."""

import importlib.util
import itertools
import re
from pathlib import Path

import pytest

import tilert
from tests.tilert.test_language_accumulate import MAY_REPEAT
from tests.tilert.test_wrong_kernels import ALIAS, AT_SPECIALISATION, LAUNCHES, MOVED, REPEATED
from tests.tilert.wrong_decorations import AT_DECORATION
from tilert import annotations, language

PAGE = Path(__file__).resolve().parents[2] / "docs" / "language.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(.*?)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
HEADER = BLOCKS[0][1]
EXAMPLES = [text for kind, text in BLOCKS if kind == "python"]
WRONG = [(a[1], b[1]) for a, b in itertools.pairwise(BLOCKS) if a[0] == "python error"]


def run(folder: Path, text: str) -> None:
    path = folder / "example.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int, tmp_path: Path) -> None:
    run(tmp_path, HEADER + EXAMPLES[number])


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_error_example(number: int, tmp_path: Path) -> None:
    source, shown = WRONG[number]
    with pytest.raises(tilert.KernelError) as caught:
        run(tmp_path, HEADER + source)
    lines = str(caught.value).splitlines()
    place = next(i for i, line in enumerate(lines) if line.endswith(f":{caught.value.line}"))
    # The page shows the message, the line and the caret, but no file name.
    kept = [*lines[:place], *(line.removeprefix("    ") for line in lines[place + 1 :])]
    assert kept == shown.splitlines()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 10 and len(WRONG) == 2


def test_every_word_is_described() -> None:
    missing = [w for w in language.__all__ if w != "Builtin" and not re.search(rf"\b{w}\b", TEXT)]
    assert not missing
    assert not [w for w in annotations.__all__ if w not in TEXT]


QUOTED = [
    " ".join(m.replace("\\`", "`").split())
    for m in re.findall(
        r"(?<!\*)\*([^*`\n][^*]*?[^*\s])\*(?!\*)", re.sub(r"```.*?```", "", TEXT, flags=re.S)
    )
]
KNOWN = [
    *(message for _, message in (AT_DECORATION | AT_SPECIALISATION).values()),
    *(message for _, _, message in LAUNCHES.values()),
    ALIAS,
    MOVED + "file.py:12; use what its .run() or .sync() returns",
    REPEATED,
    MAY_REPEAT,
]


def test_quoted_errors_are_real() -> None:
    """Errors quoted on the page are ones that the tests of wrong kernels produce."""
    quoted = [q for q in QUOTED if q.count(" ") > 1]
    assert len(quoted) > 40
    unknown = [q for q in quoted if not any(q in message for message in KNOWN)]
    assert not unknown

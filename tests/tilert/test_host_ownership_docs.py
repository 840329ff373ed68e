"""The examples of docs/ownership.md run, its messages are those that they give, and every rule has
its name in the code, in a message and in a test."""

import gc
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilert import TilertError, opt_out

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "ownership.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([a-z ]+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
HEADER = BLOCKS[0][1]
EXAMPLES = [text for kind, text in BLOCKS[1:] if kind == "python"]
WRONG = [(a[1], b[1]) for a, b in itertools.pairwise(BLOCKS) if a[0] == "python error"]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(opt_out, "_known", {})
    yield
    sys.modules.pop("kernels", None)
    gc.collect()


def run(folder: Path, source: str) -> None:
    path = folder / "kernels.py"
    path.write_text(HEADER + source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int, tmp_path: Path) -> None:
    run(tmp_path, EXAMPLES[number])


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_error(number: int, tmp_path: Path) -> None:
    source, shown = WRONG[number]
    with pytest.raises(TilertError) as caught:
        run(tmp_path, source)
    path = re.escape(str(tmp_path / "kernels.py"))
    first = HEADER.count("\n")
    got = re.sub(path + r":(\d+)", lambda m: f"kernels.py:{int(m[1]) - first}", str(caught.value))
    assert got == shown.rstrip("\n")


def test_every_rule_is_named_everywhere() -> None:
    rules = dict(re.findall(r"^\| (O\d) ([a-z -]+?) \|", TEXT, re.MULTILINE))
    assert sorted(rules) == [f"O{n}" for n in range(1, 10)]
    code = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tilert").rglob("*.py"))
    tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    for rule, name in rules.items():
        assert rule in tests, rule
        if rule != "O4":
            assert f"{rule} {name}" in code, rule
    shown = {message.split()[0] for _, message in WRONG}
    assert shown >= {"O1", "O2", "O3", "O5", "O7", "O8", "O9"}

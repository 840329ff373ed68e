"""The examples of docs/ownership.md and docs/host-execution.md run, their messages are those that
they give, and every rule has its name in the code, in a message and in a test."""

import gc
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tilert import TilertError, opt_out

ROOT = Path(__file__).resolve().parents[2]


class Page:
    """A page of examples, which run after its first one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        blocks = re.findall(r"^```([a-z ]+)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        self.header = blocks[0][1]
        self.examples = [text for kind, text in blocks[1:] if kind == "python"]
        self.wrong = [(a[1], b[1]) for a, b in itertools.pairwise(blocks) if a[0] == "python error"]


RULES = Page("ownership.md")
PAGES = (RULES, Page("host-execution.md"))
EXAMPLES = [(page, number) for page in PAGES for number in range(len(page.examples))]
WRONG = [(page, number) for page in PAGES for number in range(len(page.wrong))]


def named(value: object) -> str:
    return value.name if isinstance(value, Page) else str(value)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(opt_out, "_known", {})
    yield
    sys.modules.pop("kernels", None)
    gc.collect()


def run(folder: Path, source: str) -> None:
    path = folder / "kernels.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(("page", "number"), EXAMPLES, ids=named)
def test_example(page: Page, number: int, tmp_path: Path) -> None:
    run(tmp_path, page.header + page.examples[number])


@pytest.mark.parametrize(("page", "number"), WRONG, ids=named)
def test_error(page: Page, number: int, tmp_path: Path) -> None:
    source, shown = page.wrong[number]
    with pytest.raises(TilertError) as caught:
        run(tmp_path, page.header + source)
    path = re.escape(str(tmp_path / "kernels.py"))
    first = page.header.count("\n")
    got = re.sub(path + r":(\d+)", lambda m: f"kernels.py:{int(m[1]) - first}", str(caught.value))
    assert got == shown.rstrip("\n")


def test_every_rule_is_named_everywhere() -> None:
    rules = dict(re.findall(r"^\| (O\d) ([a-z -]+?) \|", RULES.text, re.MULTILINE))
    assert sorted(rules) == [f"O{n}" for n in range(1, 10)]
    code = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tilert").rglob("*.py"))
    tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    for rule, name in rules.items():
        assert rule in tests, rule
        assert f"{rule} {name}" in code, rule
    shown = {message.split()[0] for page in PAGES for _, message in page.wrong}
    assert shown >= set(rules)


def test_the_picture_names_what_the_page_tells() -> None:
    tree = ElementTree.parse(ROOT / "docs" / "buffer-life.svg")
    words = " ".join(text.strip() for text in tree.getroot().itertext())
    for word in ("allocated", "moved (O5)", "in flight (O4)", "captured (O6)", "lent", "freed"):
        assert word in words
    assert "](buffer-life.svg)" in PAGES[1].text

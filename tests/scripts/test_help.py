"""What --help of the scripts says."""

import argparse
import importlib
import inspect
from pathlib import Path
from typing import Any, NoReturn

import pytest

FOLDER = Path(__file__).parents[2] / "scripts"
SCRIPTS = sorted(p.stem for p in FOLDER.glob("*.py") if "ArgumentParser(" in p.read_text())


class Parsed(Exception):
    """Carries the parser that a script made."""


def parser_of(name: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *args: Any, **options: Any) -> NoReturn:
        raise Parsed(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    script = importlib.import_module(f"scripts.{name}")
    with pytest.raises(Parsed) as caught:
        script.main(*[[]][: len(inspect.signature(script.main).parameters)])
    parser = caught.value.args[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_option_has_a_help_text_with_its_default(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = parser_of(name, monkeypatch)
    parser.format_help()
    for action in parser._actions:
        assert action.help is not None or action.choices is not None, action.option_strings
        told = action.nargs == 0 or action.default in (None, [], {}, argparse.SUPPRESS)
        assert told or "%(default)s" in (action.help or ""), action.option_strings

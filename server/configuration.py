"""Options of `grout serve` from its command line, the environment and a file, in that order."""

import argparse
import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from server.exceptions import CommandError

__all__ = ["DEFAULTS", "PREFIX", "doubts", "resolve"]

PREFIX = "GROUT_"

OTHERS = ("GROUT_CACHE",)
"""Variables that are no options."""

DEFAULTS: dict[str, Any] = {
    "model": None,
    "host": "127.0.0.1",
    "port": 8000,
    "api_key": [],
    "served_model_name": [],
    "cors_origin": [],
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "max_body_bytes": 32 * 1024 * 1024,
    "shutdown_timeout": 30.0,
    "log_requests": "summary",
}
"""Of the options that are not the engine's, which has defaults of its own."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def resolve(
    given: argparse.Namespace, parser: argparse.ArgumentParser, environ: Mapping[str, str]
) -> argparse.Namespace:
    """Return all options; raises CommandError naming the variable or file entry at fault.

    given: what was on the command line. parser: of the options of `serve`, without defaults.
    """
    options = {action.dest: action for action in parser._actions if action.dest != "help"}
    merged = dict(DEFAULTS)
    path = getattr(given, "config", None) or environ.get(f"{PREFIX}CONFIG")
    if path:
        for name, value in _read(Path(path)).items():
            where = f"{path}: {name}"
            option = options.get(name.replace("-", "_"))
            if option is None or option.dest == "config":
                raise CommandError(f"{where}: there is no such option")
            merged |= _parsed(parser, list(_arguments(option, value, where)), where)
    for name, option in options.items():
        variable = PREFIX + name.upper()
        if variable in environ and name != "config":
            value = _of_variable(option, environ[variable], variable)
            merged |= _parsed(parser, list(_arguments(option, value, variable)), variable)
    return argparse.Namespace(**merged | vars(given))


def doubts(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    """What to say of variables that look like options and are none.

    They are no error: Kubernetes sets GROUT_SERVICE_HOST and more where a service is called grout.
    """
    known = [*OTHERS, *(PREFIX + action.dest.upper() for action in parser._actions)]
    out = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.85)
            hint = f"; did you mean {near[0]}?" if near else ""
            out.append(f"warning: the variable {name} is no option of serve, and is ignored{hint}")
    return out


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"--config {path}: it is not TOML: {error}") from None


def _of_variable(option: argparse.Action, text: str, where: str) -> Any:
    if option.nargs == 0:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise CommandError(f"{where}: {text!r} is neither true nor false")
        return text.lower() in _TRUE
    if _takes_several(option):
        return [part.strip() for part in text.split(",")]
    return text


def _arguments(option: argparse.Action, value: Any, where: str) -> Iterator[str]:
    """The command line that would say the same."""
    flag = option.option_strings[0] if option.option_strings else None
    if option.nargs == 0:
        if not isinstance(value, bool):
            raise CommandError(f"{where}: it must be true or false")
        yield option.option_strings[0 if value else -1]
        return
    values = value if isinstance(value, list) and _takes_several(option) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise CommandError(f"{where}: {item!r} is not a value of this option")
    if flag is None:
        yield from ("--", *map(str, values))
    elif option.nargs == "+":
        yield from (flag, *map(str, values))
    else:
        yield from (f"{flag}={item}" for item in values)


def _takes_several(option: argparse.Action) -> bool:
    return option.nargs == "+" or isinstance(option, argparse._AppendAction)


def _parsed(parser: argparse.ArgumentParser, arguments: list[str], where: str) -> dict[str, Any]:
    try:
        return vars(parser.parse_args(arguments))
    except CommandError as error:
        raise CommandError(f"{where}: {error}") from None

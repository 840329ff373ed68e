"""What an answer must match: `response_format`, `structured_outputs`, `guided_*`, `grammar`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from grout.errors import GrammarError
from grout.gbnf import is_gbnf, to_lark
from grout.grammar import Grammar
from server.errors import ApiError, invalid, not_unicode
from server.schemas.generation import GenerationRequest
from server.strict_json import lone_surrogate, parse_strict

__all__ = ["Structure", "structure"]

Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A well-formed constraint, and the parameter it came from.

    value: a JSON schema as a dict or bool, a pattern, a list of texts, or a grammar, in Lark.
    """

    kind: Kind
    value: Any
    param: str
    grammar: Grammar


def structure(
    request: GenerationRequest, format_param: str = "response_format"
) -> Structure | None:
    """Return what the answer must match, if anything; raises ApiError 400 naming the place.

    format_param: what the client knows `response_format` as.
    """
    found = [
        *_from_format(request.response_format, format_param),
        *_from_structured(request.structured_outputs),
        *_from_guided(request),
    ]
    if len(found) > 1:
        raise invalid(
            found[1][2], f"'{found[1][2]}' and '{found[0][2]}' cannot be asked for together."
        )
    return _made(*found[0]) if found else None


Found = tuple[Kind, Any, str]


def _from_format(value: dict[str, Any] | None, param: str) -> list[Found]:
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return []
    if kind == "json_object":
        return [("json", {"type": "object"}, param)]
    if kind != "json_schema":
        raise invalid(
            f"{param}.type",
            f"'{param}.type' must be 'text', 'json_object' or 'json_schema'.",
            "invalid_value" if isinstance(kind, str) else "invalid_type",
        )
    nested = "json_schema" in value
    where = f"{param}.json_schema" if nested else param
    holder = value["json_schema"] if nested else value
    if not isinstance(holder, dict):
        raise invalid(where, f"'{where}' must be an object.", "invalid_type")
    for name in holder:
        known = name in ("type", "name", "description", "strict", "schema")
        if not known and holder[name] is not None:
            shown = f"{where}.{name[:60]}"
            raise invalid(shown, f"Unknown parameter: '{shown}'.", "unknown_parameter")
    schema = holder.get("schema")
    if schema is None:
        missing = f"{where}.schema"
        raise invalid(
            missing, f"Missing required parameter: '{missing}'.", "missing_required_parameter"
        )
    return [("json", schema, f"{where}.schema")]


def _from_structured(value: dict[str, Any] | None) -> list[Found]:
    found: list[Found] = []
    for name, item in (value or {}).items():
        where = f"structured_outputs.{name[:60]}"
        if item is None or item is False:
            continue
        if name in ("json", "regex", "choice", "grammar"):
            found.append((name, item, where))  # type: ignore[arg-type]  # one of Kind
        elif name == "json_object" and item is True:
            found.append(("json", {"type": "object"}, where))
        else:
            raise invalid(where, f"Unknown parameter: '{where}'.", "unknown_parameter")
    return found


def _from_guided(request: GenerationRequest) -> list[Found]:
    given: list[Found] = [
        ("json", request.guided_json, "guided_json"),
        ("regex", request.guided_regex, "guided_regex"),
        ("choice", request.guided_choice, "guided_choice"),
        ("grammar", request.guided_grammar, "guided_grammar"),
        ("grammar", request.grammar, "grammar"),
    ]
    return [found for found in given if found[1] is not None]


def _made(kind: Kind, value: Any, param: str) -> Structure:
    if kind == "json" and isinstance(value, str):
        source = value
        try:
            value = parse_strict(source)
        except (ValueError, RecursionError):
            raise invalid(param, f"Invalid '{param}': it is not JSON.") from None
        if lone_surrogate(value, source) is not None:
            raise not_unicode((param,))
    wanted = {"json": dict | bool, "regex": str, "choice": list, "grammar": str}[kind]
    if not isinstance(value, wanted):
        raise _wrong_type(param, kind)
    makers: dict[Kind, Callable[[Any], Grammar]] = {
        "json": Grammar.json_schema,
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
    }
    try:
        if kind == "grammar" and isinstance(value, str) and is_gbnf(value):
            value = to_lark(value)
        return Structure(kind, value, param, makers[kind](value).named(param))
    except GrammarError as error:
        raise invalid(param, f"Invalid '{param}': {error}.") from None


def _wrong_type(param: str, kind: Kind) -> ApiError:
    wanted = {"json": "a JSON schema", "choice": "an array of strings"}.get(kind, "a string")
    return invalid(param, f"Invalid '{param}': send {wanted}.", "invalid_type")

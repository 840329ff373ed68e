"""What all request models share: strictness, and OpenAI's errors for what does not validate."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from server.errors import ApiError, invalid
from server.parameters import Neutral, implemented
from server.paths import join_path

__all__ = ["MAX_STOPS", "Limit", "Seed", "Stop", "Strict", "TokenId", "validated"]

MAX_STOPS = 16
"""Most stop strings a request may have (OpenAI's own limit is 4)."""

MAX_STOP_CHARACTERS = 1024

MAX_TOKEN_ID = 2**31 - 1


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]
Limit = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class Strict(BaseModel):
    """A model that converts nothing and knows all its fields."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """What is unknown and null asks for nothing."""
        if not isinstance(value, dict) or value.keys() <= cls.model_fields.keys():
            return value
        return {k: v for k, v in value.items() if v is not None or k in cls.model_fields}


ModelT = TypeVar("ModelT", bound=Strict)


def validated(
    model: type[ModelT],
    body: dict[str, Any],
    *,
    neutral: Neutral | None = None,
) -> ModelT:
    """Return `body` as a model; raises ApiError 400 naming the first parameter at fault.

    neutral: parameters that are not fields, `server.parameters.NEUTRAL` unless given.
    """
    body = implemented(body, model.model_fields, neutral)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _from_pydantic(error.errors(include_url=False)[0]) from None


def _from_pydantic(detail: ErrorDetails) -> ApiError:
    param = join_path(detail["loc"])
    shown = param if len(param) <= 100 else param[:97] + "..."
    kind = detail["type"]
    if kind == "missing":
        return invalid(
            shown, f"Missing required parameter: '{shown}'.", "missing_required_parameter"
        )
    if kind == "extra_forbidden":
        return invalid(shown, f"Unknown parameter: '{shown}'.", "unknown_parameter")
    if kind in ("too_long", "too_short"):
        return invalid(shown, f"Invalid '{shown}': {_count(kind, detail)}.", "invalid_value")
    wrong_type = kind.endswith("_type") or kind == "int_from_float"
    rule = detail["msg"].removeprefix("Input ")
    return invalid(
        shown,
        f"Invalid '{shown}': {rule} (got {_shown(detail['input'])}).",
        "invalid_type" if wrong_type else "invalid_value",
    )


def _count(kind: str, detail: ErrorDetails) -> str:
    """What is wrong with how many items an array or an object has."""
    context, given = detail.get("ctx", {}), detail["input"]
    most = kind == "too_long"
    bound = context.get("max_length" if most else "min_length")
    got = f", got {len(given)}" if isinstance(given, list | dict) else ""
    items = "item" if bound == 1 else "items"
    return f"it takes at {'most' if most else 'least'} {bound} {items}{got}"


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a very large integer"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

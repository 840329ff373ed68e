"""Typed reading of the fields of configuration files and GGUF metadata.

Every function takes a mapping and a key, treats null as absent, and raises ConfigError naming the
key and the value. `naming` puts the file in front.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from models.errors import ConfigError
from models.files import shown

# Sizes, positions and token ids are int32 on the device.
LARGEST = 2**31 - 1
# Well within float32, in which the device computes.
LARGEST_NUMBER = 1e30

Values = Mapping[str, Any]


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Puts `where`, a file or a section of one, in front of every ConfigError from the body."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def integer(
    values: Values, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST
) -> int:
    """A whole number from `least` to `most`; 32.0 is one, True is not."""
    value = _given(values, key, default)
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(whole, int) or isinstance(whole, bool):
        raise ConfigError(f"{key} must be an integer, not {shown(value)}")
    if not least <= whole <= most:
        raise ConfigError(f"{key} must be an integer from {least} to {most}, not {shown(value)}")
    return whole


def number(
    values: Values,
    key: str,
    default: float | None = None,
    *,
    above: float | None = None,
    least: float = 0.0,
    most: float = LARGEST_NUMBER,
) -> float:
    """A finite number: greater than `above` if that is given, else at least `least`."""
    value = _given(values, key, default)
    real = isinstance(value, int | float) and not isinstance(value, bool)
    # Not the other way round: every comparison with NaN is false.
    if not (real and (value >= least if above is None else value > above) and value <= most):
        low = f"of at least {least:g}" if above is None else f"above {above:g}"
        raise ConfigError(f"{key} must be a number {low} and at most {most:g}, not {shown(value)}")
    return float(value)


def optional_number(values: Values, key: str, *, most: float = LARGEST_NUMBER) -> float | None:
    """A finite number above 0, or None where it is absent."""
    return None if values.get(key) is None else number(values, key, above=0.0, most=most)


def flag(values: Values, key: str, default: bool = False) -> bool:
    """True or false; neither 1 nor "true" will do."""
    value = _given(values, key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, not {shown(value)}")
    return value


def text(values: Values, key: str, default: str | None = None) -> str:
    """A string."""
    value = _given(values, key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, not {shown(value)}")
    return value


def texts(values: Values, key: str) -> list[str]:
    """A list of strings, empty where it is absent."""
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{key} must be a list of strings, not {shown(value)}")
    return value


def integers(values: Values, key: str) -> list[int]:
    """A list of whole numbers, empty where it is absent."""
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ConfigError(f"{key} must be a list of integers, not {shown(value)}")
    return value


def token_ids(values: Values, key: str) -> list[int]:
    """A token id or a list of them, as a list; empty where it is absent."""
    value = values.get(key)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not (whole and 0 <= token <= LARGEST):
            raise ConfigError(f"{key} must be a token id or a list of them, not {shown(value)}")
    return list(ids)


def _given(values: Values, key: str, default: object) -> Any:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{key} is missing")
    return value

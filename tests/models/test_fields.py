import math
from collections.abc import Callable
from typing import Any

import pytest

from models import ConfigError
from models.fields import (
    flag,
    integer,
    integers,
    naming,
    number,
    optional_number,
    text,
    texts,
    token_ids,
)
from models.files import shown

Reader = Callable[[dict[str, Any], str], object]


def above_zero(values: dict[str, Any], key: str) -> float:
    return number(values, key, above=0.0, most=8.0)


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (integer, 5, 5),
        (integer, 32.0, 32),
        (integer, 2**31 - 1, 2**31 - 1),
        (number, 0, 0.0),
        (number, 1e-6, 1e-6),
        (above_zero, 8, 8.0),
        (optional_number, None, None),
        (optional_number, 2, 2.0),
        (flag, None, False),
        (flag, True, True),
        (text, "", ""),
        (texts, None, []),
        (texts, ["a"], ["a"]),
        (integers, [3, -1], [3, -1]),
        (integers, None, []),
        (token_ids, None, []),
        (token_ids, 0, [0]),
        (token_ids, [1, 2], [1, 2]),
    ],
)
def test_good_values(read: Reader, value: Any, expected: Any) -> None:
    found = read({"key": value}, "key")
    assert found == expected and type(found) is type(expected)


BAD: list[tuple[Reader, list[Any]]] = [
    (integer, [0, -1, 2**31, 10**400, 1.5, math.nan, math.inf, True, "5", [5], {}]),
    (number, [-1, -1e-9, math.nan, math.inf, -math.inf, 1e308, 10**400, True, "1", [1.0]]),
    (above_zero, [0, 0.0, 8.1, math.nan, math.inf]),
    (optional_number, [0, -1, math.nan, "x"]),
    (flag, [0, 1, "true", [], 1.0]),
    (text, [5, True, ["a"], math.nan]),
    (texts, ["a", 5, [5], [["a"]], {"a": 1}]),
    (integers, [5, [True], [1.0], ["a"], {}]),
    (token_ids, [-1, True, 1.0, "1", [1, -1], [None], [[1]], 2**31, {}]),
]


@pytest.mark.parametrize(("read", "value"), [(read, bad) for read, some in BAD for bad in some])
def test_bad_values_are_named(read: Reader, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^file: key must be ") as caught, naming("file"):
        read({"key": value}, "key")
    assert str(caught.value).endswith(f"not {shown(value)}")


@pytest.mark.parametrize("read", [integer, number, text])
@pytest.mark.parametrize("values", [{}, {"key": None}])
def test_missing_values_are_named(read: Reader, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^key is missing$"):
        read(values, "key")


def test_sections_nest() -> None:
    expected = pytest.raises(ConfigError, match=r"^file: section: key must be")
    with expected as caught, naming("file"), naming("section"):
        integer({"key": "x" * 10_000 + "\n"}, "key")
    assert len(str(caught.value)) < 150 and "\n" not in str(caught.value)

"""What tests of malformed files share: values, and what is checked of each refusal."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models import LoadError, open_checkpoint
from models.errors import ModelError

__all__ = ["INF", "NAN", "MakeFolder", "MakeGGUF", "load", "refusal", "rewrite"]

MakeFolder = Callable[..., Path]
MakeGGUF = Callable[..., Path]
NAN, INF = math.nan, math.inf


def refusal(action: Callable[[], object], named: str, kind: type[ModelError] = LoadError) -> str:
    """The message of the error: a single line that names the file once."""
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert message.count(named) == 1, message
    return message


def rewrite(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not ...}
    file.write_text(json.dumps(kept))


def load(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.tokenizer()
    checkpoint.chat_template()

"""How much a device checks while kernels run."""

import os
from enum import IntEnum
from typing import Literal, TypeAlias

from tilert.errors import DeviceError

__all__ = ["Check", "Checks", "checks_of"]

Check: TypeAlias = bool | Literal["strict"] | None
"""What a caller asks for: yes, no, strictly, or whatever TILERT_CHECK says."""


class Checks(IntEnum):
    """NONE; RULES: what breaks a rule; STRICT: reads that lie outside of what they read, too."""

    NONE = 0
    RULES = 1
    STRICT = 2


_SETTINGS = {"": Checks.NONE, "0": Checks.NONE, "1": Checks.RULES, "strict": Checks.STRICT}


def checks_of(check: Check) -> Checks:
    """What is asked for.

    Raises:
        DeviceError: if TILERT_CHECK is none of 0, 1 and strict.
    """
    if check == "strict":
        return Checks.STRICT
    if check is not None:
        return Checks.RULES if check else Checks.NONE
    setting = os.environ.get("TILERT_CHECK", "")
    if setting not in _SETTINGS:
        raise DeviceError(f"TILERT_CHECK={setting!r}; use 0, 1 or strict")
    return _SETTINGS[setting]

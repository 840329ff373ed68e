"""Elementwise functions that kernels inline."""

from typing import Any

import tilert
from tilert.language import exp

__all__ = ["silu"]


@tilert.inline
def silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    return x / (exp(-x) + 1.0)

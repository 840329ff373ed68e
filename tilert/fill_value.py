"""What an array is filled with."""

from typing import Any

import numpy as np

from tilert.dtypes import DType

__all__ = ["fill_value"]


def fill_value(value: Any, dtype: DType) -> np.ndarray[Any, Any]:
    """The value as a 0-d array of the dtype. Floats round; integers must be there.

    Raises:
        ValueError: if it is no number, or does not fit.
    """
    given = np.asarray(value)
    number = given.item() if given.ndim == 0 else value
    if isinstance(number, bool):
        number = int(number)
    if not isinstance(number, int | float):
        raise ValueError(f"an array is filled with a number, got {type(value).__name__}")
    if dtype.is_float:
        try:
            with np.errstate(over="ignore"):
                return np.asarray(float(number)).astype(dtype.numpy)
        except OverflowError:
            fits = False
    elif dtype.is_int:
        info = np.iinfo(dtype.numpy)
        fits = info.min <= number <= info.max and number == int(number)
    else:
        fits = number in (0, 1)
    if not fits:
        # Python refuses to write out very long ints.
        bits = number.bit_length() if isinstance(number, int) else 0
        shown = f"an int of {bits} bits" if bits > 256 else repr(number)
        raise ValueError(f"an array of {dtype.name} cannot be filled with {shown}")
    return np.asarray(int(number)).astype(dtype.numpy)

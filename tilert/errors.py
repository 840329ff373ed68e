"""Exceptions of the tile runtime."""

import linecache

__all__ = [
    "CheckError",
    "CompileError",
    "DeviceError",
    "KernelError",
    "LaunchError",
    "MovedError",
    "OwnershipError",
    "TilertError",
]


class TilertError(Exception):
    """Base of every error that tilert raises on purpose."""


class DeviceError(TilertError):
    """A device is missing, unusable or out of memory."""


class OwnershipError(TilertError):
    """A program breaks one of the ownership rules O1..O9; the message begins with the rule."""


class MovedError(OwnershipError):
    """A buffer is used while an operation holds it (rule O5)."""


class LaunchError(TilertError):
    """A kernel was called with arguments that do not fit its signature."""


class CompileError(TilertError):
    """The device compiler refused generated code; carries the compiler's log."""


class KernelError(TilertError):
    """A kernel's source is wrong. The message shows the user's line with a caret.

    Args:
        message: what is wrong and what to do.
        filename: the file that holds the kernel.
        line: 1-based line in the file.
        column: 0-based column.
        text: the source line.
    """

    def __init__(self, message: str, filename: str, line: int, column: int, text: str) -> None:
        self.message = message
        self.filename = filename
        self.line = line
        self.column = column
        self.text = text
        shown = text.rstrip("\n")
        caret = " " * column + "^"
        super().__init__(f"{message}\n  {filename}:{line}\n    {shown}\n    {caret}")


class CheckError(OwnershipError):
    """The checker found a kernel that breaks a rule while it ran; see `tilert.checking`.

    Args:
        message: begins with the rule.
        places: what happens where: a phrase, the file, its 1-based line and 0-based column. The
            message shows the lines with carets.
    """

    def __init__(self, message: str, *places: tuple[str, str, int, int]) -> None:
        self.message = message
        self.places = places
        parts = [message]
        for does, filename, line, column in places:
            text = linecache.getline(filename, line).rstrip("\n")
            parts.append(f"  {does}, {filename}:{line}\n    {text}\n    {' ' * column}^")
        super().__init__("\n".join(parts))

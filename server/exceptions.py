"""Base of this package's errors, apart from FastAPI so that the command starts fast."""

__all__ = ["PACKAGES", "CommandError", "ServerError", "is_for_people"]

PACKAGES = ("grout", "models", "server", "tilert")


class ServerError(Exception):
    """Base of the errors of `server`."""


class CommandError(ServerError):
    """The `grout` command cannot do what it was asked to; the message is for its user."""


def is_for_people(error: BaseException) -> bool:
    """Return whether a Grout package defines the error's class or one of its bases.

    Such errors have a message to show; any other exception is a bug.
    """
    return any(base.__module__.partition(".")[0] in PACKAGES for base in type(error).__mro__)

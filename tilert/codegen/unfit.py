"""Why a schedule does not take a kernel."""

__all__ = ["Unfit"]


class Unfit(Exception):
    """A kernel is not of a schedule's form: the message goes on after "not NAME:", for people."""

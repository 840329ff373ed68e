"""Which Grout this is."""

from importlib import metadata

__all__ = ["DISTRIBUTION", "version"]

DISTRIBUTION = "grout-llm"


def version() -> str:
    """Return the installed version, or "unknown" when run from a source tree."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"

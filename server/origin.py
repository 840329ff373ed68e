"""Where the four packages come from: `server` and `models` are names that others use as well."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

from server.exceptions import PACKAGES, CommandError

__all__ = ["check_origin"]


def check_origin() -> Path:
    """Return the folder all four packages are in; raises CommandError naming one that is not."""
    home = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        found = _folder(importlib.util.find_spec(name))
        if found is None:
            raise CommandError(
                f"the package '{name}' is missing from {home}; install grout-llm again"
            )
        if found.parent != home:
            raise CommandError(
                f"the import name '{name}' belongs to {found}, which shadows Grout's own "
                f"{home / name}; remove or rename it, or start grout from another folder"
            )
    return home


def _folder(spec: ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    # A plain module, `models.py` in the folder grout was started from for one.
    return Path(spec.origin).resolve() if spec.origin else None

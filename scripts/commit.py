"""Which state of the source a figure is of."""

import subprocess
from pathlib import Path

__all__ = ["commit"]


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit that is checked out, with "+changes" where its files are not as they are in it.

    Files that it does not have, such as results, are no change. None outside of a repository, in
    one without commits, and where there is no git.
    """
    head = _git(folder, "rev-parse", "--verify", "HEAD")
    if head is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return head if changed == "" else f"{head}+changes"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        made = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=folder
        )
    except OSError:
        return None
    return made.stdout.strip() if made.returncode == 0 else None

"""Figures name the commit that they are of, and say where files were not as they are in it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.commit import commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    made = subprocess.run(
        ["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return made.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "kernel.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_a_commit_as_it_is(folder: Path) -> None:
    assert commit(folder) == git(folder, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("name", "staged"), [("kernel.py", False), ("kernel.py", True), ("new.py", True)]
)
def test_changes_are_told(folder: Path, name: str, staged: bool) -> None:
    (folder / name).write_text("2\n")
    if staged:
        git(folder, "add", name)
    assert commit(folder) == git(folder, "rev-parse", "HEAD") + "+changes"


def test_results_are_no_change(folder: Path) -> None:
    (folder / "kernels.json").write_text("{}")
    assert commit(folder) == git(folder, "rev-parse", "HEAD")


def test_none_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) is None

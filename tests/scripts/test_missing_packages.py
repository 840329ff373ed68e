"""Scripts where a tool or package that they need is missing: one line that says what to do."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts import check_kernels, lock

ROOT = Path(__file__).parents[2]


def test_check_kernels_without_the_disassembler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told at once: no kernel has been compiled by then."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(check_kernels, "serve", lambda *_: pytest.fail("something was compiled"))
    assert check_kernels.main(["sm_80"]) == 2
    assert capsys.readouterr() == (
        "",
        "check_kernels: error: machine code cannot be read without nvdisasm; install it with"
        " `pip install nvidia-cuda-nvdisasm`\n",
    )


def test_check_kernels_with_a_table_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_kernels, "TABLE", tmp_path / "table.csv")
    monkeypatch.setattr("tilert.sass.disassembler", lambda: "nvdisasm")
    check_kernels.TABLE.write_text("target, kernel\n")
    assert check_kernels.main(["sm_80"]) == 2
    assert capsys.readouterr().err.startswith(
        "check_kernels: error: table.csv:1: the columns are target, kernel"
    )


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_make_fixtures_without_the_oracles(absent: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "transformers.py").touch()
    message = f"No module named '{absent}'"
    (tmp_path / f"{absent}.py").write_text(f"raise ModuleNotFoundError({message!r})\n")
    target = tmp_path / "fixtures"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_fixtures.py"), str(target)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and not target.exists()
    assert done.stderr == (
        f"make_fixtures: error: {message}; install what computes the expectations with "
        "`pip install torch transformers`\n"
    )


def test_lock_without_pip_tools(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "find_spec", lambda _: None)
    monkeypatch.setattr(lock, "compile_lock", lambda *_: pytest.fail("it was asked to resolve"))
    assert lock.main([]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lock: error: ") and err.count("\n") == 1
    assert "`pip install pip-tools`" in err


def test_lock_with_packages_that_cannot_be_resolved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "find_spec", lambda _: object())
    monkeypatch.setattr(lock, "COMPILE", [sys.executable, "-c", "raise SystemExit(3)"])
    assert lock.main([]) == 2
    assert capsys.readouterr().err == "lock: error: pip-tools ended with status 3\n"

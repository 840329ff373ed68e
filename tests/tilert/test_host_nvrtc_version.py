"""NVRTC's version is known from an earlier process for as long as nothing has changed."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tilert import CompileError, entries, nvrtc, nvrtc_version


class Library:
    """Stands for NVRTC, in a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("library")
        self.installed = "13.0"
        self.loaded = False
        self.loads = 0

    def version(self) -> str:
        self.loads += not self.loaded
        self.loaded = True
        return self.installed

    def start(self) -> str:
        """The version in a new process, and whether it had to load the library."""
        self.loaded = False
        nvrtc_version._noted.cache_clear()
        return nvrtc_version.version()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("GROUT_CACHE", str(tmp_path / "cache"))
    made = Library(tmp_path / "libnvrtc.so.13")
    monkeypatch.setattr(nvrtc, "version", made.version)
    monkeypatch.setattr(nvrtc, "is_loaded", lambda: made.loaded)
    monkeypatch.setattr(nvrtc, "library", lambda: str(made.path))
    packages = tmp_path / "packages"
    (packages / "nvidia").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    return made


def test_a_second_process_does_not_load_it(library: Library) -> None:
    assert [library.start() for _ in range(3)] == ["13.0"] * 3
    assert library.loads == 1


def install(library: Library) -> None:
    library.path.write_text("another")


def replace(library: Library) -> None:
    """A file of the same size and time."""
    before = library.path.stat()
    other = library.path.with_suffix(".new")
    other.write_text("LIBRARY")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, library.path)


def touch_packages(library: Library) -> None:
    (library.path.parent / "packages" / "nvidia_cuda_nvrtc-13.1.dist-info").mkdir()


def search_elsewhere(library: Library) -> None:
    os.environ["LD_LIBRARY_PATH"] = "/elsewhere"


def damage(library: Library) -> None:
    (note,) = entries.folder().glob("*.version")
    note.write_bytes(note.read_bytes()[:-2])


def make_foreign(library: Library) -> None:
    (note,) = entries.folder().glob("*.version")
    for payload in (b"[1]", b'"x"', b"{}", b"\xff", b'{"library": 3}'):
        entries.write(note.name, payload)
        assert library.start() == "13.1"
        assert library.loaded
    entries.write(note.name, b"null")


@pytest.mark.parametrize(
    "change", [install, replace, touch_packages, search_elsewhere, damage, make_foreign]
)
def test_it_is_loaded_again_where_something_has_changed(
    library: Library, change: Callable[[Library], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    library.start()
    library.installed = "13.1"
    change(library)
    assert library.start() == "13.1"
    assert library.loaded
    # And that is noted.
    assert library.start() == "13.1"
    assert not library.loaded


def test_what_has_been_loaded_says_it_itself(library: Library) -> None:
    library.start()
    library.start()
    library.installed = "13.1"
    assert nvrtc_version.version() == "13.0"
    library.version()
    assert nvrtc_version.version() == "13.1"


def test_where_the_file_is_not_known_nothing_is_noted(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    assert [library.start() for _ in range(2)] == ["13.0"] * 2
    assert library.loads == 2


def test_a_missing_compiler_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise CompileError("NVRTC cannot be loaded")

    monkeypatch.setattr(nvrtc, "version", missing)
    with pytest.raises(CompileError, match="cannot be loaded"):
        library.start()


def test_the_file_of_the_real_one() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    nvrtc.version()
    assert nvrtc.is_loaded()
    found = nvrtc.library()
    assert found is not None and Path(found).is_file()
    assert Path(found).name.startswith("libnvrtc.so")

"""Entries on disk, and the bundle that later processes read at once."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tilert import entries


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GROUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what a process knows."""
    return lambda: monkeypatch.setattr(entries, "_folders", {})


def without_files(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "used.bundle":
            path.unlink()


def sealed(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


def test_what_one_process_has_used_the_next_reads_at_once(
    folder: Path, restart: Callable[[], None]
) -> None:
    for name, payload in (("a", b"first"), ("b", b"second"), ("c", b"third")):
        entries.write(name, payload)
    restart()
    assert entries.read("a") == b"first"
    entries.write("d", b"fourth")
    assert entries.read("none") is None
    entries.bundle()
    restart()
    without_files(folder)
    # What was read and what was written, and nothing else.
    found = [entries.read(name) for name in "abcd"]
    assert found == [b"first", None, None, b"fourth"]


def test_a_bundle_is_added_to(folder: Path, restart: Callable[[], None]) -> None:
    entries.write("a", b"first")
    entries.bundle()
    restart()
    entries.write("b", b"second")
    entries.bundle()
    before = (folder / "used.bundle").stat().st_mtime_ns
    restart()
    assert entries.read("b") == b"second"
    # Nothing new: it stays as it is.
    entries.bundle()
    assert (folder / "used.bundle").stat().st_mtime_ns == before
    without_files(folder)
    restart()
    assert [entries.read(name) for name in "ab"] == [b"first", b"second"]


def test_what_is_written_again_is_not_read_from_the_bundle(restart: Callable[[], None]) -> None:
    entries.write("a", b"first")
    entries.bundle()
    restart()
    assert entries.read("a") == b"first"
    entries.write("a", b"other")
    assert entries.read("a") == b"other"
    entries.bundle()
    restart()
    assert entries.read("a") == b"other"


def test_the_newest_stay_where_there_is_no_room(
    folder: Path, restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_MOST_BYTES", 250)
    for name in "abcd":
        restart()
        entries.write(name, name.encode() * 100)
        entries.bundle()
    without_files(folder)
    restart()
    assert [entries.read(name) is not None for name in "abcd"] == [False, False, True, True]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"short",
        sealed(b"x"),
        sealed((10**9).to_bytes(8) + b"[]"),
        sealed((4).to_bytes(8) + b"\xff\xfe\xfd\xfc"),
        sealed((2).to_bytes(8) + b"17"),
        sealed((13).to_bytes(8) + b'[["a", null]]'),
        sealed((7).to_bytes(8) + b'["abc"]'),
    ],
)
def test_what_is_no_bundle_is_not_used_and_is_replaced(
    folder: Path, restart: Callable[[], None], damage: bytes
) -> None:
    entries.write("a", b"first")
    (folder / "used.bundle").write_bytes(damage)
    restart()
    assert entries.read("a") == b"first"
    entries.bundle()
    restart()
    without_files(folder)
    assert entries.read("a") == b"first"


def test_a_bundle_with_a_changed_byte_is_not_used(
    folder: Path, restart: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    entries.write("a", b"first")
    entries.bundle()
    path = folder / "used.bundle"
    data = path.read_bytes()
    without_files(folder)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        restart()
        assert entries.read("a") is None
    for size in range(len(data)):
        path.write_bytes(data[:size])
        restart()
        assert entries.read("a") is None
    assert "used.bundle is corrupt" in caplog.text


def test_contents_that_say_more_than_there_is_are_refused(
    folder: Path, restart: Callable[[], None]
) -> None:
    names = json.dumps([["a", 3], ["b", 9]]).encode()
    folder.mkdir(parents=True)
    bundle = sealed(len(names).to_bytes(8) + names + b"abcdef")
    (folder / "used.bundle").write_bytes(bundle)
    restart()
    assert entries.read("b") is None


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    folder: Path, restart: Callable[[], None]
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("not a folder")
    restart()
    entries.write("a", b"first")
    entries.bundle()
    assert entries.read("a") is None


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(entries, "_folders", {})
    entries.write("a", b"first")
    entries.bundle()
    assert entries.read("a") is None

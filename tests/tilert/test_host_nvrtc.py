"""NVRTC and the disk cache; neither needs a GPU."""

import os
import stat
from pathlib import Path

import pytest

from tilert import CompileError, disk_cache, entries, nvrtc
from tilert.cuda_device import arch_of

pytest.importorskip("cuda.bindings.nvrtc")

SOURCE = """
extern "C" __global__ void add_one(float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += 1.0f;
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GROUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


class Compiler:
    """Counts compilations."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, text: str, entry: str, arch: str) -> bytes:
        self.calls.append(arch)
        return f"{entry} for {arch}".encode()


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_compiles(arch: str) -> None:
    cubin = nvrtc.compile(SOURCE, "add_one", arch)
    assert cubin.startswith(b"\x7fELF")
    assert b"add_one" in cubin


def test_shared_bytes_are_not_overwritten() -> None:
    # Python keeps one object for each single byte; an empty log is one byte long.
    nvrtc.compile(SOURCE, "add_one", "sm_80")
    assert [bytes([i])[0] for i in range(256)] == list(range(256))


def test_resources() -> None:
    cubin, used = nvrtc.build(SOURCE, "add_one", "sm_90a")
    assert cubin.startswith(b"\x7fELF")
    assert 0 < used.registers <= 32
    assert (used.spill_stores, used.spill_loads, used.shared_bytes) == (0, 0, 0)


def test_compile_error_carries_the_log() -> None:
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(SOURCE.replace("1.0f", "one"), "add_one", "sm_90a")
    message = str(caught.value)
    assert message.startswith("kernel 'add_one' does not compile for sm_90a")
    assert 'add_one.cu(4): error: identifier "one" is undefined' in message


def test_hit(cache: Path) -> None:
    compiler = Compiler()
    for _ in range(2):
        assert disk_cache.cubin("x", "k", "sm_80", compiler) == b"k for sm_80"
    assert disk_cache.cubin("x", "k", "sm_90a", compiler) == b"k for sm_90a"
    assert disk_cache.cubin("y", "k", "sm_80", compiler) == b"k for sm_80"
    assert compiler.calls == ["sm_80", "sm_90a", "sm_80"]
    assert len(list(cache.glob("*.cubin"))) == 3


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 100])
def test_corrupt_entry(cache: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler()
    disk_cache.cubin("x", "k", "sm_80", compiler)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage or whole[:-1])
    assert disk_cache.cubin("x", "k", "sm_80", compiler) == b"k for sm_80"
    assert "is corrupt and is compiled again" in caplog.text
    assert entry.read_bytes() == whole
    assert len(compiler.calls) == 2


def test_folder_that_is_a_file(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.write_text("in the way")
    assert disk_cache.cubin("x", "k", "sm_80", Compiler()) == b"k for sm_80"
    assert "cannot keep compiled kernel" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_read_only_folder(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir(parents=True)
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert disk_cache.cubin("x", "k", "sm_80", Compiler()) == b"k for sm_80"
    assert "cannot keep compiled kernel" in caplog.text


def test_full_disk(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert disk_cache.cubin("x", "k", "sm_80", Compiler()) == b"k for sm_80"
    assert "No space left on device" in caplog.text
    assert list(cache.iterdir()) == []


def test_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert entries.folder() == Path("/x/grout/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert entries.folder() == Path("/h/.cache/grout/kernels")


def test_arch() -> None:
    assert [arch_of(c) for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))] == [
        "sm_80", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121",
    ]  # fmt: skip

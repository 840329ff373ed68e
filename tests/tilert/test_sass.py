"""Machine code as text: several cubins at once, names of instructions, what is no machine code."""

import sysconfig
from pathlib import Path

import pytest

from tilert import CompileError, nvrtc, sass

SOURCE = """
extern "C" __global__ void NAME(float4* y, const float* x) {
    float v = x[threadIdx.x];
    if (v > 0.0f) y[threadIdx.x] = make_float4(v, v, v, OP);
}
"""


def cubin(name: str, op: str, arch: str) -> bytes:
    return nvrtc.compile(SOURCE.replace("NAME", name).replace("OP", op), name, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_kernels_are_kept_apart(arch: str) -> None:
    cubins = [cubin("root", "sqrtf(v)", arch), cubin("plain", "v", arch)]
    root, plain = sass.disassemble(cubins, arch)
    assert "MUFU.RSQ" in sass.names(root) and "MUFU.RSQ" not in sass.names(plain)
    for lines in (root, plain):
        found = sass.names(lines)
        assert len(found) == len(lines)
        assert [n for n in found if n.startswith(("LDG", "STG"))] == ["LDG.E", "STG.E.128"]
        assert found.count("EXIT") >= 1
    # Alone, its branches name other addresses.
    (alone,) = sass.disassemble(cubins[1:], arch)
    assert sass.names(alone) == sass.names(plain) and "NOP" not in sass.names(alone)


def test_nothing_to_read() -> None:
    assert sass.disassemble([], "sm_90a") == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", "LDG.E.128.CONSTANT"),
        ("@!P0 BRA 0x210", "BRA"),
        ("@UP1 UTMALDG.2D [UR8], [UR4], desc[UR6]", "UTMALDG.2D"),
        ("@PT EXIT", "EXIT"),
    ],
)
def test_names(line: str, name: str) -> None:
    assert sass.names([line]) == [name]


def test_kinds_of_instructions() -> None:
    assert sass.contains("LDG.E.NA.128.CONSTANT", "LDG.128")
    assert sass.contains("LDG.E.NA.128.CONSTANT", "LDG.E.CONSTANT")
    assert sass.contains("HGMMA.64x128x16.F32.BF16", "HGMMA")
    assert not sass.contains("LDG.E.64", "LDG.128")
    assert not sass.contains("LDG.E.128", "LDG.128.E")
    assert not sass.contains("LDGSTS.E.BYPASS.128", "LDG.128")


def test_without_the_disassembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(CompileError, match="cannot be read without nvdisasm; install it with"):
        sass.disassemble([cubin("plain", "v", "sm_80")], "sm_80")


def test_another_architecture() -> None:
    with pytest.raises(CompileError, match="cannot read machine code for sm_35"):
        sass.disassemble([cubin("plain", "v", "sm_80")], "sm_35")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"PTX"])
def test_what_is_no_cubin(data: bytes) -> None:
    with pytest.raises(CompileError, match="no cubin"):
        sass.disassemble([data], "sm_80")

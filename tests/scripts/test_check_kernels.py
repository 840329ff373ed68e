"""The gate that compiled kernels go through: what a worse kernel or a wrong row is told."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

import tilert
from scripts import check_kernels
from scripts.check_kernels import Found, Row, expected, found, problems, read, text
from tilert import Mut, Ref, f32
from tilert.language import sum
from tilert.target_device import TargetDevice

TARGET = "sm_90a"


@tilert.kernel
def share(y: Mut, a: Ref, b: Ref):
    """Both tiles are needed again once the sum over all of them is known."""
    x, z = a.tile_like(y), b.tile_like(y)
    total = sum(x * z, axis=1)[:, None]
    y.store(x / total + z * total)


@functools.cache
def compiled(width: int, first: int = 0) -> tuple[Found, ...]:
    """Of rows of `width` elements, which begin `first` elements past a multiple of 16 bytes."""
    device = TargetDevice(TARGET)
    a, b = (tilert.empty((8, width + 4), f32, device)[:, first : first + width] for _ in range(2))
    y = tilert.empty((8, width), f32, device)
    share(y.partition(1, width), a, b).run()
    return tuple(found(device))


@functools.cache
def table() -> tuple[Row, ...]:
    return tuple(expected([], compiled(4096), [TARGET]))


def test_a_kernel_is_what_its_row_expects() -> None:
    (kernel,), (row,) = compiled(4096), table()
    assert (row.key, row.spill, row.shared) == ((TARGET, "share", "streaming"), 0, kernel.shared)
    assert kernel.registers <= row.registers <= 40
    assert row.required == ("LDG.128", "STG.128") and row.forbidden == ("LDL", "STL")
    assert problems([row], [kernel]) == []


def test_a_kernel_that_spills() -> None:
    (kernel,) = compiled(32768)
    assert kernel.registers == 128 and kernel.spill > 0
    told = problems(table(), [replace(kernel, shared=0)])
    (row,) = table()
    assert told == [
        f"sm_90a: share (streaming): 128 registers a thread, at most {row.registers} are expected",
        f"sm_90a: share (streaming): {kernel.spill} bytes spilled, at most 0 are expected",
        "sm_90a: share (streaming): LDL in its machine code",
        "sm_90a: share (streaming): STL in its machine code",
    ]


def test_a_kernel_without_its_instructions() -> None:
    (kernel,) = compiled(4096, first=1)
    assert problems(table(), [replace(kernel, registers=1)]) == [
        "sm_90a: share (streaming): no LDG.128 in its machine code"
    ]


def test_a_kernel_with_more_registers() -> None:
    (row,), (kernel,) = table(), compiled(4096)
    assert problems([replace(row, registers=kernel.registers)], [kernel]) == []
    assert problems([replace(row, registers=kernel.registers - 1)], [kernel]) == [
        f"sm_90a: share (streaming): {kernel.registers} registers a thread, at most"
        f" {kernel.registers - 1} are expected"
    ]


def test_a_kernel_with_more_shared_memory() -> None:
    (row,), (kernel,) = table(), compiled(4096)
    assert problems([row], [replace(kernel, shared=228 << 10)]) == [
        f"sm_90a: share (streaming): 233472 bytes of shared memory a block, at most {row.shared}"
        " are expected",
        "sm_90a: share (streaming): 233472 bytes of shared memory a block, more than there are",
    ]


def test_a_kernel_without_a_row() -> None:
    told = problems([], [*compiled(4096), *compiled(32768)])
    assert told == [
        "sm_90a: share (streaming) has no row in kernel_expectations.csv. If the schedule is the"
        " one that it should have, `python -m scripts.check_kernels --write sm_90a` adds the row"
    ]


def test_a_row_without_a_kernel() -> None:
    (row,) = table()
    assert problems([row, replace(row, schedule="staged")], compiled(4096)) == [
        "sm_90a: share (staged) has a row in kernel_expectations.csv, but nothing that serving"
        " launches compiles to it. If it should be gone, `python -m scripts.check_kernels --write"
        " sm_90a` drops the row"
    ]


@pytest.mark.parametrize(
    ("registers", "threads", "limit"),
    # 8 blocks of 256 threads and 32 registers are all that 2048 threads make.
    [(20, 256, 32), (33, 256, 40), (74, 128, 80), (168, 384, 168), (234, 256, 255), (8, 32, 64)],
)
def test_register_limits_are_where_places_for_blocks_go(
    registers: int, threads: int, limit: int
) -> None:
    (kernel,) = compiled(4096)
    (row,) = expected([], [replace(kernel, registers=registers, threads=threads)], [TARGET])
    assert row.registers == limit


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    (row,) = table()
    rows = [row, replace(row, target="sm_80", required=(), forbidden=()), replace(row, spill=8)]
    rows[2] = replace(rows[2], kernel="other", schedule="pipelined")
    path = tmp_path / "table.csv"
    path.write_text(text(rows))
    assert set(read(path)) == set(rows)
    assert path.read_text().splitlines()[:2] == [
        "target, kernel, schedule,  registers, spill, shared, required,        forbidden",
        f"sm_90a, other,  pipelined, {row.registers},        8,     {row.shared},     "
        "LDG.128 STG.128, LDL STL",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("sm_90a, share, streaming, 40, 0, 16", "table.csv:2: a row has 8 columns, three of them"),
        ("sm_90a, share, streaming, 40, few, 16, , ", "table.csv:2: a row has 8 columns, three"),
        ("sm_35, share, streaming, 40, 0, 16, , ", "table.csv:2: no target sm_35; there are sm_80"),
        (
            "sm_80, share, staged, 40, 0, 16, ,\nsm_80, share, staged, 8, 0, 16, ,",
            r"table.csv:3: sm_80: share \(staged\) has a row already",
        ),
    ],
)
def test_what_is_no_table(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text([]) + line + "\n")
    with pytest.raises(ValueError, match=problem):
        read(path)


def test_another_head_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("target, kernel\n")
    with pytest.raises(ValueError, match=r"^table.csv:1: the columns are target, kernel, schedule"):
        read(path)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes what is missing, keeps instructions that were asked for, and then is content."""
    monkeypatch.setattr(check_kernels, "TABLE", tmp_path / "kernel_expectations.csv")
    monkeypatch.setattr(check_kernels, "serve", lambda *_: None)
    monkeypatch.setattr(check_kernels, "found", lambda _: list(compiled(4096)))
    main = check_kernels.main
    assert main([TARGET]) == 1
    assert "share (streaming) has no row" in capsys.readouterr().out
    assert main(["--write", TARGET]) == 0
    assert read(check_kernels.TABLE) == list(table())
    (row,) = table()
    others = [replace(row, target="sm_80"), replace(row, kernel="gone")]
    check_kernels.TABLE.write_text(text([replace(row, registers=8, required=("HMMA",)), *others]))
    assert main([TARGET]) == 1
    assert main(["--write", TARGET]) == 1
    assert set(read(check_kernels.TABLE)) == {replace(row, required=("HMMA",)), others[0]}
    assert capsys.readouterr().out.endswith(
        "\nsm_90a: share (streaming): no HMMA in its machine code\n"
    )
    with pytest.raises(SystemExit):
        main(["sm_35"])


def test_a_kernel_that_does_not_wait_for_earlier_ones() -> None:
    (kernel,) = compiled(4096)
    assert kernel.hasty == ()
    told = problems(table(), [replace(kernel, hasty=("LDG.E.128",))])
    assert told == [
        "sm_90a: share (streaming): LDG.E.128 touches memory before the kernel has waited for"
        " earlier ones"
    ]

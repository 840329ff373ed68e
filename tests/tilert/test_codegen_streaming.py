"""The streaming schedule: values and text of loads that come first, quotients, free reshapes."""

# mypy: disable-error-code="no-untyped-def, type-arg, operator"

import math
import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilert
from tests.tilert.checks import FLOATS, Frame, data, ints
from tests.tilert.emulator import EmulatedDevice
from tests.tilert.products import mistaken, needs_compiler
from tilert import Const, Dyn, Mut, Ref, bf16, f16, f32, i32, sass
from tilert.codegen import streaming
from tilert.codegen.early import APART, AT_ONCE, BEHIND_ONE
from tilert.codegen.layout import Layout, blocked
from tilert.codegen.streaming import LIFTED_BYTES
from tilert.language import debug_assert, mean, rsqrt, static_range, sum
from tilert.target_device import CompiledKernel, TargetDevice


@tilert.kernel
def add_rows(y: Mut[Dyn], a: Ref[Dyn], b: Ref[Dyn]):
    y.store(a.tile_like(y).to(f32) + b.tile_like(y).to(f32))


@tilert.kernel
def normed(y: Mut[Dyn], rest: Mut[Dyn], x: Ref[Dyn], ids: Ref[Dyn], gains: Ref[Dyn]):
    """Row by row; which gain a row has is loaded behind a sum and a store, and once in a branch."""
    i, j = y.index
    v = x[i, j].to(f32)
    scale = rsqrt(mean(v * v, axis=1, keepdims=True) + 1e-6)
    y.store(v * scale)
    gain = gains[ids[i.number], :].to(f32)
    out = v * gain[None, :]
    if ids[i.number] > 1:
        out = out + x[i, j].to(f32)
    rest.store(out)


@tilert.kernel
def quotients(y: Mut, a: Ref, b: Ref):
    y.store(a.tile_like(y).to(f32) / b.tile_like(y).to(f32) * 3.0)


@tilert.kernel
def roots(y: Mut, x: Ref):
    y.store(rsqrt(x.tile_like(y).to(f32)) * 3.0)


@tilert.kernel
def row_norm(y: Mut[Dyn], x: Ref[Dyn], gain: Ref):
    i, j = y.index
    v = x[i, j]
    y.store(v * rsqrt(mean(v * v, axis=1, keepdims=True) + 1e-6) * gain[j][None, :])


@tilert.kernel
def weighted(y: Mut, a: Ref, b: Ref, c: Ref):
    y.store(a.tile_like(y) * b.tile_like(y) * c.tile_like(y))


@tilert.kernel
def joined(y: Mut, x: Ref, n: Const[int]):
    """Tiles of y: [rows, n * columns], of x: [rows, n, columns]."""
    i, _ = y.index
    y.store(x[i, :, :].reshape(y.shape))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "tile"),
    [((5, 96), (1, 96)), ((7, 130), (2, 64)), ((3, 33), (2, 40)), ((0, 64), (1, 64))],
)
def test_sums(
    everywhere: tilert.Device, shape: tuple[int, int], tile: tuple[int, int], dtype: tilert.DType
) -> None:
    a, a64 = data(everywhere, shape, dtype)
    b, b64 = data(everywhere, shape, dtype, seed=1)
    y = Frame(everywhere, shape, dtype)
    add_rows(y.piece(*tile), a, b).sync()
    y.check(a64 + b64, scale=np.abs(a64) + np.abs(b64))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [64, 90, 200])
def test_loads_that_come_first(
    everywhere: tilert.Device, columns: int, dtype: tilert.DType
) -> None:
    rows = 5
    x, x64 = data(everywhere, (rows, columns), dtype)
    gains, gains64 = data(everywhere, (3, columns), dtype, seed=1)
    ids = np.array([2, 0, 1, 7, 2])
    y, rest = (Frame(everywhere, (rows, columns), dtype) for _ in range(2))
    index = ints(everywhere, ids)
    normed(y.piece(1, columns), rest.piece(1, columns), x, index, gains).sync()
    y.check(x64 / np.sqrt((x64 * x64).mean(1, keepdims=True) + 1e-6), steps=2 * columns)
    gain = np.where((ids < 3)[:, None], gains64[np.minimum(ids, 2)], 0)
    rest.check(x64 * gain + np.where((ids > 1)[:, None], x64, 0), scale=np.abs(x64) * 3)


VALUES = [
    0.0,
    -0.0,
    1.0,
    -3.0,
    1e-38,
    1.5e-39,
    3e38,
    -2e38,
    1e-4,
    7e4,
    math.inf,
    -math.inf,
    math.nan,
]


@pytest.mark.parametrize("dtype", FLOATS)
def test_quotients(everywhere: tilert.Device, dtype: tilert.DType) -> None:
    pairs = list(product(VALUES, VALUES))
    count = len(pairs)
    with np.errstate(over="ignore"):
        host = np.array(pairs).T.astype(dtype.numpy)
    a, b = (tilert.from_numpy(h.copy(), everywhere) for h in host)
    y = Frame(everywhere, (count,), dtype)
    quotients(y.piece(64), a, b).sync()
    a64, b64 = host.astype(np.float64)
    with np.errstate(all="ignore"):
        # The factor comes after a rounding to f32, which may overflow.
        want = (a64 / b64).astype(np.float32).astype(np.float64) * 3
    y.check(want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_roots(everywhere: tilert.Device, dtype: tilert.DType) -> None:
    rng = np.random.default_rng(0)
    # Over all exponents, the subnormal ones included.
    spread = np.exp2(rng.uniform(-149, 128, 4000) if dtype == f32 else rng.uniform(-20, 15, 4000))
    with np.errstate(over="ignore"):
        host = np.concatenate([spread, VALUES]).astype(dtype.numpy)
    x = tilert.from_numpy(host, everywhere)
    y = tilert.empty(host.shape, dtype, everywhere)
    roots(y.partition(64), x).sync()
    with np.errstate(all="ignore"):
        want = 3 / np.sqrt(host.astype(np.float64))
    # Three roundings at most; the instruction for roots alone is two ulps off.
    step = 1.8e-7 if dtype == f32 else 2.0**-8 if dtype == bf16 else 2.0**-11
    least = 2.0**-25 if dtype == f16 else 0.0
    np.testing.assert_allclose(y.numpy().astype(np.float64), want, rtol=step, atol=least)


def test_products_of_three(everywhere: tilert.Device) -> None:
    """Where the product of two overflows, what comes of it is as ever."""
    rng = np.random.default_rng(0)
    some = [rng.standard_normal(500, np.float32) for _ in range(3)]
    values = np.array([0.0, -0.0, 1.5, -3e38, 2e-38, 1e-45, math.inf, math.nan], np.float32)
    odd = np.array(list(product(values, values, values))).T
    host = [np.concatenate([a, b]) for a, b in zip(some, odd, strict=True)]
    y = tilert.empty(host[0].shape, f32, everywhere)
    weighted(y.partition(64), *[tilert.from_numpy(h, everywhere) for h in host]).sync()
    a, b, c = host
    with np.errstate(all="ignore"):
        twice = a * b * c
        once = (a.astype(np.float64) * b * c).astype(np.float32)
        got = y.numpy()
        close = np.abs(got - twice) <= 2 * np.spacing(np.abs(twice))
    # Either way of rounding; most are rounded once where the text says so.
    assert (close | (got == twice) | (np.isnan(got) & np.isnan(twice)) | (got == once)).all()
    if everywhere.arch is not None:
        assert (got[:500] == once[:500]).mean() > 0.99


@pytest.mark.parametrize("columns", [4096, 2560, 96])
def test_norms_of_f32_lose_little(everywhere: tilert.Device, columns: int) -> None:
    """Less than the approximate root alone would, which is two ulps off."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        host = rng.standard_normal((16, columns), np.float32)
        gain = rng.standard_normal(columns, np.float32)
        y = tilert.empty(host.shape, f32, everywhere)
        x, g = (tilert.from_numpy(array, everywhere) for array in (host, gain))
        row_norm(y.partition(1, columns), x, g).sync()
        x64 = host.astype(np.float64)
        want = x64 / np.sqrt((x64 * x64).mean(1, keepdims=True) + 1e-6) * gain
        assert np.abs(y.numpy() / want - 1).max() < 2.6e-7


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [8, 64, 33])
def test_joined_axes(everywhere: tilert.Device, columns: int, dtype: tilert.DType) -> None:
    x, x64 = data(everywhere, (4, 6, columns), dtype)
    y = Frame(everywhere, (4, 6 * columns), dtype)
    joined(y.piece(2, 6 * columns), x, n=6).sync()
    y.check(x64.reshape(4, -1))


# -- text ------------------------------------------------------------------------------------------


def body(kernel: CompiledKernel) -> str:
    return kernel.text.partition("__launch_bounds__")[2]


def compiled(columns: int = 64, rows: int = 5, check: bool = False) -> str:
    device = TargetDevice("sm_90a", check)
    x, _ = data(device, (rows, columns), bf16)
    gains, _ = data(device, (3, columns), bf16)
    y, rest = (Frame(device, (rows, columns), bf16) for _ in range(2))
    index = ints(device, np.zeros(rows))
    normed(y.piece(1, columns), rest.piece(1, columns), x, index, gains).run()
    return body(device.kernels[0])


def test_what_others_depend_on_is_loaded_first() -> None:
    text = compiled()
    reads = [text.index(f"= a_{name} + ") for name in ("ids", "x", "gains")]
    assert reads == sorted(reads)
    assert reads[-1] < text.index("shuffle_xor(") < text.index("= a_y + ")


def test_loads_stay_in_their_branch() -> None:
    for text in (compiled(), compiled(check=True)):
        assert text.rindex("= a_x + ") > text.index("if (v")


@tilert.kernel
def asserting(y: Mut[Dyn], x: Ref[Dyn], gain: Ref):
    i, j = y.index
    total = sum(x[i, j].to(f32), axis=1, keepdims=True)
    debug_assert(total > 0.0, "positive")
    y.store(total * gain[j][None, :].to(f32))


@pytest.mark.parametrize("debug", [False, True])
def test_loads_stay_behind_what_is_asserted(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERT_DEBUG", str(int(debug)))
    device = TargetDevice("sm_90a")
    x, _ = data(device, (4, 64), bf16)
    gain, _ = data(device, (64,), bf16)
    asserting(Frame(device, (4, 64), bf16).piece(1, 64), x, gain).run()
    text = body(device.kernels[0])
    assert (text.index("= a_gain + ") > text.index("shuffle_xor(")) == debug


@tilert.kernel
def many(y: Mut, x: Ref, count: Const[int]):
    i, j = y.index
    total = sum(x[0, i, j].to(f32), axis=1, keepdims=True)
    for k in static_range(count - 1):
        total = total + sum(x[k + 1, i, j].to(f32), axis=1, keepdims=True)
    y.store(total + x[0, i, j].to(f32))


@pytest.mark.parametrize("count", [4, 40])
def test_no_more_is_loaded_first_than_registers_hold(count: int) -> None:
    device = TargetDevice("sm_90a")
    x, _ = data(device, (count, 2, 512), bf16)
    y = Frame(device, (2, 512), bf16)
    many(y.piece(1, 512), x, count=count).run()
    (kernel,) = device.kernels
    first = body(kernel).partition("shuffle_xor(")[0]
    fits = LIFTED_BYTES * kernel.threads // 1024
    assert fits < 40
    assert first.count("= a_x + ") == min(fits, count + 1)
    assert kernel.resources.spill_stores == 0


def test_only_what_is_rounded_to_16_bits_is_computed_with_less_care() -> None:
    device = TargetDevice("sm_90a")
    for dtype in (bf16, f16, f32):
        a, b = (data(device, (64,), dtype)[0] for _ in range(2))
        quotients(Frame(device, (64,), dtype).piece(64), a, b).run()
        roots(Frame(device, (64,), dtype).piece(64), a).run()
    assert ["quotient(" in body(k) for k in device.kernels[::2]] == [True, True, False]
    assert ["rsqrtf(" in body(k) for k in device.kernels[1::2]] == [True, True, False]
    assert "op_rsqrt(" in body(device.kernels[5])


@tilert.kernel
def added_to(y: Mut, a: Ref, b: Ref):
    y.store(a.tile_like(y) + y.load())
    y.store(y.load() * b.tile_like(y))


@tilert.kernel
def shifted_norm(y: Mut[Dyn], x: Ref[Dyn]):
    """Of the row behind a program's own."""
    v = x[y.index[0].number + 1, :].to(f32)
    y.store((v * rsqrt(mean(v * v, axis=0) + 1e-6))[None, :])


def brought(text: str) -> list[str]:
    """What a kernel has the second-level cache bring, each with its condition."""
    kernel = text[text.index('extern "C"') :]
    return re.findall(r"if \((threadIdx.x == 0 && .*?)\) \{\s+(bring_soon\(.*?\);)", kernel)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_later_programs_are_brought(dtype: tilert.DType) -> None:
    """Of x, which each program has a row of: the gain is the same for all."""
    device, rows = TargetDevice("sm_90a"), streaming.FAR_BYTES // (256 * dtype.itemsize)
    x, _ = data(device, (5, 256), dtype)
    gain, _ = data(device, (256,), dtype)
    row_norm(tilert.empty((5, 256), dtype, device).partition(1, 256), x, gain).run()
    ((condition, call),) = brought(device.kernels[0].text)
    assert f"+ {rows} < a_x_dim0" in condition
    assert f" + {rows} * 256LL, {256 * dtype.itemsize});" in call


def test_what_is_no_row_of_each_program_is_not_brought() -> None:
    """No sums along a row, several programs a row, rows that do not begin where 16 bytes do, rows
    that are not the programs' own."""
    device = TargetDevice("sm_90a")
    x, _ = data(device, (8, 256), f32)
    odd, _ = data(device, (8, 90), bf16)
    gain, gain90 = data(device, (256,), f32)[0], data(device, (90,), bf16)[0]
    part = data(device, (8, 257), f32)[0][:, 1:]

    def new(columns: int, dtype: tilert.DType = f32) -> tilert.Array:
        return tilert.empty((7, columns), dtype, device)

    add_rows(new(256).partition(1, 256), x, x).run()
    row_norm(new(256).partition(1, 128), x, gain).run()
    row_norm(new(90, bf16).partition(1, 90), odd, gain90).run()
    row_norm(new(256).partition(1, 256), part, gain).run()
    row_norm(new(256).partition(7, 256), x, gain).run()
    shifted_norm(new(256).partition(1, 256), x).run()
    assert [brought(kernel.text) for kernel in device.kernels] == [[]] * 6


def test_rows_longer_than_the_copy_engine_takes_are_not_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = TargetDevice("sm_90a")
    x, gain = data(device, (3, 256), f32)[0], data(device, (256,), f32)[0]
    for most, count in ((1024, 0), (1040, 1)):
        monkeypatch.setattr(streaming, "MOST_COPIED", most)
        device.launchers.clear()
        row_norm(tilert.empty((3, 256), f32, device).partition(1, 256), x, gain).run()
        assert len(brought(device.kernels[-1].text)) == count


@needs_compiler
@pytest.mark.parametrize(("bound", "outside"), [("a_x_dim0", False), ("a_x_dim0 + 1", True)])
def test_only_rows_that_are_there_are_brought(
    bound: str, outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last programs have none after them; a mistaken bound shows."""
    monkeypatch.setattr(streaming, "FAR_BYTES", 3 * 256 * 4)
    mistaken(monkeypatch, "+ 3 < a_x_dim0", f"+ 3 < {bound}")
    mistaken(monkeypatch, "bring_soon(src", "bring_inside(a_x, 256 * a_x_dim0, src")
    mistaken(
        monkeypatch,
        'extern "C"',
        "void bring_inside(const float* x, int count, const float* p, u32 n) {"
        ' if (p < x || p + n / 4 > x + count) emulator::fail("no such row");'
        ' bring_soon(p, n); }\nextern "C"',
    )
    device = EmulatedDevice("sm_90a")
    x, x64 = data(device, (8, 256), f32)
    gain, gain64 = data(device, (256,), f32, seed=1)
    y = Frame(device, (8, 256), f32)
    op = row_norm(y.piece(1, 256), x, gain)
    if outside:
        with pytest.raises(AssertionError, match="no such row"):
            op.sync()
        return
    op.sync()
    y.check(x64 / np.sqrt((x64 * x64).mean(axis=1, keepdims=True) + 1e-6) * gain64, scale=16.0)


@needs_compiler
@pytest.mark.parametrize(
    "early",
    [0, 1, 2, 3, *(3 | w for w in (APART, AT_ONCE | BEHIND_ONE, APART | AT_ONCE | BEHIND_ONE))],
)
def test_what_is_done_before_earlier_grids_are_complete(early: int) -> None:
    """All operands are read, or none; with the bits of kernels that share no memory, too."""
    device = EmulatedDevice("sm_90a", early=early)
    a, a64 = data(device, (5, 96), f32)
    b, b64 = data(device, (5, 96), f32, seed=1)
    y = Frame(device, (5, 96), f32)
    add_rows(y.piece(1, 96), a, b).sync()
    y.check(a64 + b64, scale=np.abs(a64) + np.abs(b64))


@needs_compiler
@pytest.mark.parametrize("columns", [96, 97, 1])
def test_a_store_before_earlier_grids_are_complete_shows(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of 16 bytes, and single elements."""
    wait = f"\n  if (!(early & {APART}u) || blockIdx.x == 0) wait_for_earlier_grids();"
    mistaken(monkeypatch, wait, "")
    for early, wrong in ((1, False), (3, True)):
        device = EmulatedDevice("sm_90a", early=early)
        a, _ = data(device, (5, columns), f32)
        op = add_rows(Frame(device, (5, columns), f32).piece(1, 128), a, a)
        if wrong:
            with pytest.raises(AssertionError, match="written before earlier grids"):
                op.sync()
        else:
            op.sync()


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # No block waits, so that it may be complete before what comes before it.
        (" || blockIdx.x == 0) wait", ") wait", "written before earlier grids"),
        # All blocks do without where it shares memory with the one before.
        (f"if (!(early & {APART}u) || blockIdx", "if (blockIdx", "written before earlier grids"),
        (f"!((early & {BEHIND_ONE}u) && ", "!(0 && ", "later grids may start before"),
    ],
)
def test_mistakes_about_who_waits(
    old: str, new: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistaken(monkeypatch, old, new)
    for word in (0, APART, APART | AT_ONCE | BEHIND_ONE):
        device = EmulatedDevice("sm_90a", early=3 | word)
        a, _ = data(device, (5, 96), f32)
        op = add_rows(Frame(device, (5, 96), f32).piece(1, 96), a, a)
        # A mistake about one block shows where it may wait less than the others.
        shows = "written" not in message and word & BEHIND_ONE
        shows |= word and old.startswith(" ||")
        shows |= not word and old.startswith("if (!")
        if shows:
            with pytest.raises(AssertionError, match=message):
                op.sync()
        else:
            op.sync()


def test_which_kernels_can_do_without_waiting() -> None:
    """Those that read all of their operands ahead, only store pieces, and sum one row at most."""
    device = TargetDevice("sm_90a")

    def new(*shape: int, dtype: tilert.DType = f32) -> tilert.Array:
        return tilert.empty(shape, dtype, device)

    add_rows(new(5, 64).partition(1, 64), new(5, 64), new(5, 64)).run()
    added_to(new(5, 64).partition(1, 64), new(5, 64), new(5, 64)).run()
    pieces = (new(5, 64).partition(1, 64) for _ in range(2))
    normed(*pieces, new(5, 64), new(5, dtype=i32), new(3, 64)).run()
    for rows in (1, 2):
        row_norm(new(5, 64).partition(rows, 64), new(5, 64), new(64)).run()
    index = tilert.UniqueIndex.checked(np.arange(5), device)
    add_rows(new(9, 64).partition_at(index, 1, 64), new(5, 64), new(5, 64)).run()
    assert [(k.name, k.apart) for k in device.kernels] == [
        ("add_rows", True),
        ("added_to", False),
        ("normed", False),
        ("row_norm", True),
        ("row_norm", False),
        ("add_rows", False),
    ]
    for kernel in device.kernels:
        assert (f"early & {APART}u" in kernel.text) == kernel.apart
    checked = TargetDevice("sm_90a", check=True)
    x = tilert.empty((5, 64), f32, checked)
    add_rows(tilert.empty((5, 64), f32, checked).partition(1, 64), x, x).run()
    assert not checked.kernels[0].apart


def test_what_is_read_before_earlier_grids_are_complete() -> None:
    """Refs, up to the first access of another kind."""
    device = TargetDevice("sm_90a")
    x, _ = data(device, (5, 64), f32)
    gains, _ = data(device, (3, 64), f32)

    def new() -> tilert.Array:
        return tilert.empty((5, 64), f32, device)

    add_rows(new().partition(1, 64), x, x).run()
    outputs = (new().partition(1, 64) for _ in range(2))
    normed(*outputs, x, ints(device, np.zeros(5)), gains).run()
    added_to(new().partition(1, 64), x, x).run()
    index = tilert.UniqueIndex.checked(np.arange(5), device)
    onto = tilert.empty((9, 64), f32, device)
    add_rows(onto.partition_at(index, 1, 64), x, x).run()
    early = {f"{k.name} {i}": k.early for i, k in enumerate(device.kernels)}
    assert early == {
        "add_rows 0": (1, 2),
        "normed 1": (3, 2, 4),
        "added_to 2": (1, 2),
        "add_rows 3": (),
    }


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_nothing_is_loaded_before_earlier_grids_are_waited_for(arch: str) -> None:
    device = TargetDevice(arch)
    for dtype in (bf16, f32):
        x, _ = data(device, (5, 90), dtype)
        gains, _ = data(device, (3, 90), dtype)
        y, rest = (Frame(device, (5, 90), dtype) for _ in range(2))
        normed(y.piece(1, 90), rest.piece(1, 90), x, ints(device, np.zeros(5)), gains).run()
        add_rows(Frame(device, (5, 90), dtype).piece(2, 64), x, x).run()
    listings = sass.disassemble([kernel.cubin for kernel in device.kernels], arch)
    for kernel, lines in zip(device.kernels, listings, strict=True):
        assert "ACQBULK" in sass.names(lines) and sass.hasty(lines, ahead=False) == []
        # Unless the word allows it: loads, and where it allows that, what is stored.
        found = {name.split(".")[0] for name in sass.hasty(lines)}
        assert found == {"LDG", "STG"} if kernel.apart else {"LDG"}
        assert not kernel.apart or sass.hasty_stores(lines) == []


def test_scratch_that_nothing_has_used_needs_no_barrier_before_it() -> None:
    one, two = compiled(columns=2560), compiled(columns=64)
    assert one.count("__syncthreads") == 1 and one.index("(scratch + 0))[") < one.index(
        "__syncthreads"
    )
    assert "__syncthreads" not in two


def test_joining_axes_moves_nothing() -> None:
    device = TargetDevice("sm_90a")
    x, _ = data(device, (4, 8, 64), bf16)
    joined(Frame(device, (4, 512), bf16).piece(1, 512), x, n=8).run()
    assert "__syncthreads" not in body(device.kernels[0])


def places(layout: Layout, threads: int) -> dict[tuple[int, int], int]:
    """The row-major position of what each register of each thread holds, padding left out."""
    out = {}
    for t, r in product(range(threads), range(layout.registers)):
        flat, inside = 0, True
        for axis, n in enumerate(layout.shape):
            i, weight = 0, 1
            for f in layout.axes[axis]:
                i += (r if f.kind == "r" else t) // f.stride % f.size * weight
                weight *= f.size
            flat, inside = flat * n + i, inside and i < n
        if inside:
            out[t, r] = flat
    return out


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([4, 32, 64]),
    st.data(),
)
def test_a_reshaped_layout_leaves_elements_where_they_are(
    shape: list[int], vector: int, threads: int, draw: st.DataObject
) -> None:
    target: list[int] = []
    left = math.prod(shape)
    while left > 1 and len(target) < 3:
        target.append(draw.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= target[-1]
    target.append(left)
    layout = blocked(tuple(shape), math.gcd(vector, shape[-1]), threads)
    found = layout.reshaped(tuple(target))
    if found is not None:
        assert found.shape == tuple(target)
        assert places(found, threads) == places(layout, threads)

"""Where kernels read and write: blocks, spans, points, gathers, pieces, views."""

import numpy as np
import pytest

import tilert
from tests.tilert.checks import FLOATS, Frame, data, ints
from tilert import Const, Dyn, Mut, Ref, UniqueIndex, bf16, bool_, f16, f32, i32, i64, u8, u32
from tilert.language import span

EVERY = [f32, bf16, f16, i32, u32, i64, u8, bool_]
MINUS_INF = float("-inf")


@tilert.kernel
def copy2(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn]):
    i, j = y.index
    y.store(x[i, j])


@tilert.kernel
def copy_static(y: Mut, x: Ref):
    y.store(x.tile_like(y))


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("margin", [1, 8])
def test_copy(device: tilert.Device, dtype: tilert.DType, margin: int) -> None:
    for shape in [(1, 1), (2, 3), (3, 64), (5, 130), (0, 8), (8, 0), (33, 256)]:
        x, x64 = data(device, shape, dtype, 0, 2)
        for tile in ((1, 1), (2, 64), (4, 128), (64, 3)):
            y = Frame(device, shape, dtype, margin)
            copy2(y.piece(*tile), x).sync()
            y.check(x64)
            y = Frame(device, shape, dtype, margin)
            if 0 not in shape:
                copy_static(y.piece(*tile), x).sync()
                y.check(x64)


@pytest.mark.parametrize("dtype", [f32, bf16, i32])
def test_views_as_inputs(device: tilert.Device, dtype: tilert.DType) -> None:
    """Strided, permuted and broadcast inputs, and a permuted output."""
    base, base64 = data(device, (12, 20, 24), dtype, -9, 9)
    views = [
        (base[3], base64[3]),
        (base[:, 2], base64[:, 2]),
        (base[:, :, 5], base64[:, :, 5]),
        (base[1, ::3, ::2], base64[1, ::3, ::2]),
        (base[1, 1:, 8:], base64[1, 1:, 8:]),
        (base[0].permute(1, 0), base64[0].T),
        (base[0, :1].broadcast_to(9, 24), np.broadcast_to(base64[0, :1], (9, 24))),
    ]
    for view, want in views:
        y = Frame(device, want.shape, dtype)
        copy2(y.piece(4, 16), view).sync()
        y.check(want)
        y = Frame(device, want.shape, dtype)
        copy_static(y.piece(4, 16), view).sync()
        y.check(want)
        turned = Frame(device, want.shape[::-1], dtype)
        copy_static(turned.view.permute(1, 0).partition(4, 16), view).sync()
        turned.check(want.T)


def test_strided_output(device: tilert.Device) -> None:
    x, x64 = data(device, (6, 10))
    y = Frame(device, (12, 30), values=np.full((12, 30), 4.0))
    copy2(y.view[::2, 1::3].partition(2, 4), x).sync()
    want = np.full((12, 30), 4.0)
    want[::2, 1::3] = x64
    y.check(want)


def test_one_specialisation_serves_many_extents(device: tilert.Device) -> None:
    @tilert.kernel
    def copied(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn]):
        i, j = y.index
        y.store(x[i, j])

    for shape in [(8, 16), (9, 16), (1, 1), (0, 5), (40, 33), (3, 7)]:
        x, x64 = data(device, shape)
        y = Frame(device, shape)
        copied(y.piece(4, 16), x).sync()
        y.check(x64)
    assert len(copied._cache) == 1


# spans


@tilert.kernel
def windows(y: Mut, x: Ref[Dyn], starts: Ref, fill: Const[float]):
    i, _ = y.index
    y.store(x.load(span(starts[i.number], y.shape[1]), fill=fill).reshape(y.shape))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 3, 16, 100])
def test_span(device: tilert.Device, size: int, dtype: tilert.DType) -> None:
    for n in (1, 7, 64):
        x, x64 = data(device, (n,), dtype)
        starts = [
            0,
            1,
            -1,
            -size,
            -size - 5,
            n - 1,
            n,
            n + 9,
            n - size,
            n // 2,
            -(2**31),
            2**31 - 200,
        ]
        for fill in (0.0, MINUS_INF, 2.5):
            y = Frame(device, (len(starts), size), dtype)
            windows(y.piece(1, size), x, ints(device, starts), fill=fill).sync()
            want = np.full((len(starts), size), fill)
            for row, start in zip(want, starts, strict=True):
                for k in range(max(0, -start), size):
                    if start + k < n:
                        row[k] = x64[start + k]
            y.check(want)


@tilert.kernel
def fixed_window(y: Mut, x: Ref, start: Const[int]):
    y.store(x[span(start, y.shape[0]), span(2, y.shape[1])])


def test_span_of_two_axes(device: tilert.Device) -> None:
    x, x64 = data(device, (10, 12), bf16)
    for start in (-3, 0, 4, 9):
        y = Frame(device, (5, 8), bf16)
        fixed_window(y.piece(5, 8), x, start=start).sync()
        want = np.pad(x64, ((3, 9), (0, 0)))[start + 3 : start + 8, 2:10]
        y.check(want)


# points and gathers


@tilert.kernel
def points(y: Mut, z: Mut, x: Ref[Dyn], rows: Ref, columns: Ref, fill: Const[float]):
    (i,) = y.index
    r, c = rows[i.number], columns[i.number]
    y.store(x.load(r, c, fill=fill))
    z.store(x[r, 0] + x.load(0, c, fill=1.0))


@pytest.mark.parametrize("dtype", [f32, bf16, i32])
def test_point(device: tilert.Device, dtype: tilert.DType) -> None:
    x, x64 = data(device, (4, 6), dtype, -9, 9)
    rows = np.array([0, 3, 4, -1, 2, 2, 2, 100, -100, 1])
    columns = np.array([0, 5, 0, 0, 6, -1, 3, 100, 3, 2])
    fill = -7.0 if dtype == i32 else MINUS_INF
    y, z = Frame(device, (10,), dtype), Frame(device, (10,), dtype)
    indices = ints(device, rows), ints(device, columns)
    if dtype == i32:
        int_points(y.piece(1), x, *indices).sync()
        z = None
    else:
        points(y.piece(1), z.piece(1), x, *indices, fill=fill).sync()

    def at(r: int, c: int, fill: float) -> float:
        return x64[r, c] if 0 <= r < 4 and 0 <= c < 6 else fill

    y.check(np.array([at(r, c, fill) for r, c in zip(rows, columns, strict=True)]))
    if z is not None:
        pairs = zip(rows, columns, strict=True)
        z.check(np.array([at(r, 0, 0) + at(0, c, 1) for r, c in pairs]), scale=9)


@tilert.kernel
def int_points(y: Mut, x: Ref[Dyn], rows: Ref, columns: Ref):
    (i,) = y.index
    y.store(x.load(rows[i.number], columns[i.number], fill=-7))


@tilert.kernel
def gather_rows(y: Mut[Dyn, Dyn], x: Ref[Dyn], index: Ref[Dyn], fill: Const[float]):
    i, j = y.index
    y.store(x.load(index.load(i, fill=-1), j, fill=fill))


@tilert.kernel
def gather_columns(y: Mut[Dyn, Dyn], x: Ref[Dyn], index: Ref[Dyn]):
    i, j = y.index
    y.store(x[i, index[j] - 1])


@tilert.kernel
def gather_middle(y: Mut, x: Ref, index: Ref):
    y.store(x[1, index[:], :])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tile", [(1, 128), (4, 32), (16, 16), (64, 1)])
def test_gather(device: tilert.Device, tile: tuple[int, int], dtype: tilert.DType) -> None:
    x, x64 = data(device, (9, 96), dtype)
    index = np.array([0, 8, 9, -1, 3, 3, 100, -(2**31), 2**31 - 1, 5, 7, 1, 2])
    inside = (index >= 0) & (index < 9)
    for fill in (0.0, MINUS_INF):
        y = Frame(device, (13, 96), dtype)
        gather_rows(y.piece(*tile), x, ints(device, index), fill=fill).sync()
        y.check(np.where(inside[:, None], x64[np.where(inside, index, 0)], fill))
    index = np.random.default_rng(0).integers(-5, 110, 77)
    y = Frame(device, (9, 77), dtype)
    gather_columns(y.piece(*tile), x, ints(device, index + 1)).sync()
    inside = (index >= 0) & (index < 96)
    y.check(np.where(inside, x64[:, np.where(inside, index, 0)], 0))


def test_gather_of_the_middle_axis(device: tilert.Device) -> None:
    x, x64 = data(device, (3, 20, 40), bf16)
    y = Frame(device, (7, 40), bf16)
    gather_middle(y.piece(7, 40), x, ints(device, [0, 19, 20, -1, 5, 5, 6])).sync()
    want = x64[1][[0, 19, 0, 0, 5, 5, 6]]
    want[2:4] = 0
    y.check(want)


@tilert.kernel
def gather_computed(y: Mut, x: Ref, keys: Ref):
    """Indices that come out of a reduction."""
    k = keys[:, :]
    y.store(x[max(k, axis=1), :] + x[max(k, axis=0), :])


def test_gather_at_computed_indices(device: tilert.Device) -> None:
    x, x64 = data(device, (50, 33))
    keys, keys64 = data(device, (6, 6), i32, -5, 60)
    y = Frame(device, (6, 33))
    gather_computed(y.piece(6, 33), x, keys).sync()
    padded = np.concatenate([x64, np.zeros((15, 33))])
    y.check(padded[keys64.max(1)] + padded[keys64.max(0)], scale=4)


# pieces


@tilert.kernel
def add_in_place(y: Mut[Dyn], x: Ref[Dyn]):
    i, j = y.index
    y.store(y.load() * 2 + x[i, j])


@pytest.mark.parametrize("dtype", [f32, bf16, i32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 130), (0, 4)])
def test_in_place(device: tilert.Device, shape: tuple[int, int], dtype: tilert.DType) -> None:
    x, x64 = data(device, shape, dtype, -9, 9, seed=1)
    _, old = data(device, shape, dtype, -9, 9, seed=2)
    y = Frame(device, shape, dtype, values=old)
    add_in_place(y.piece(4, 32), x).sync()
    twice = (old * 2).astype(dtype.numpy).astype(np.float64)
    y.check(twice + x64, scale=30)


@tilert.kernel
def edge(y: Mut[Dyn]):
    """What a piece loads outside the array is 0; what it stores there is dropped."""
    v = y.load()
    y.store(v + sum(v))


def test_pieces_past_the_end_load_zero(device: tilert.Device) -> None:
    y = Frame(device, (10,), values=np.arange(10.0))
    edge(y.piece(8)).sync()
    y.check(np.arange(10) + np.where(np.arange(10) < 8, 28, 17))


@tilert.kernel
def several(a: Mut[Dyn], b: Mut[Dyn], c: Mut[Dyn], x: Ref[Dyn]):
    i, j = a.index
    v = x[i, j]
    a.store(v)
    b.store(sum(v, axis=1))
    c.store(v[:, None, :].to(c.dtype))


def test_several_muts_with_one_grid(device: tilert.Device) -> None:
    for rows in (1, 6, 7):
        x, x64 = data(device, (rows, 24))
        a, b = Frame(device, (rows, 24)), Frame(device, (rows,))
        c = Frame(device, (rows, 1, 24), bf16)
        several(a.piece(2, 24), b.piece(2), c.piece(2, 1, 24), x).sync()
        a.check(x64)
        b.check(x64.sum(1), scale=48)
        c.check(x64[:, None])


@tilert.kernel
def positions(y: Mut[Dyn], z: Mut[Dyn]):
    i, j = y.index
    y.store(i.number * 10000 + j.number * 100 + i.start * y.array_shape[1] + y.array_shape[0])
    z.store(i.offsets[:, None] * 1000 + j.offsets[None, :] + 0 * y.shape[0])


def test_index(device: tilert.Device) -> None:
    for shape in [(5, 9), (1, 1), (8, 3)]:
        y, z = Frame(device, shape, i32), Frame(device, shape, i32)
        positions(y.piece(2, 4), z.piece(2, 4)).sync()
        i, j = np.indices(shape)
        y.check(i // 2 * 10000 + j // 4 * 100 + i // 2 * 2 * shape[1] + shape[0])
        z.check(i * 1000 + j)


@tilert.kernel
def scatter(y: Mut[Dyn], x: Ref[Dyn]):
    i, j = y.index
    y.store(y.load() + x[i.number, j].reshape(y.shape))


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_indexed_pieces(device: tilert.Device, dtype: tilert.DType) -> None:
    for rows in ([5, 0, -1, 11, 3, -7], [2], [-1], []):
        index = UniqueIndex.checked(np.array(rows, np.int64), device)
        x, x64 = data(device, (len(rows), 40), dtype)
        y = Frame(device, (12, 40), dtype, values=np.ones((12, 40)))
        scatter(y.view.partition_at(index, 1, 16), x).sync()
        want = np.ones((12, 40))
        for row, values in zip(rows, x64, strict=True):
            if row >= 0:
                want[row] += values
        y.check(want, scale=3)


@tilert.kernel
def zero_rank_cases(y: Mut, x: Ref, n: Ref[Dyn]):
    """Extents of a run-time axis, as a number and as a bound."""
    y.store(x[:] * n.shape[0] + n.shape[0] // 2)


def test_run_time_extents(device: tilert.Device) -> None:
    x, x64 = data(device, (5,), i32, -9, 9)
    for n in (0, 1, 7):
        y = Frame(device, (5,), i32)
        zero_rank_cases(y.piece(5), x, ints(device, np.zeros(n))).sync()
        y.check(x64 * n + n // 2)


def test_reading_an_empty_array_gives_fill(device: tilert.Device) -> None:
    for shape in ((0, 8), (4, 0)):
        x, _ = data(device, shape)
        y = Frame(device, (4, 8))
        copy2(y.piece(2, 4), x).sync()
        y.check(0.0)


@tilert.kernel
def wide_gather(y: Mut, z: Mut, x: Ref[Dyn], rows: Ref[Dyn]):
    (i,) = y.index
    y.store(x.load(rows.load(i, fill=-1), fill=-7))
    z.store(x.load(rows[i.start], fill=-7))


@pytest.mark.parametrize("dtype", [i64, u32])
def test_wide_indices_do_not_wrap(device: tilert.Device, dtype: tilert.DType) -> None:
    rows = [2, 2**32 - 1, 2**31, 2**31 + 2, 5, 4]
    if dtype == i64:
        rows = [2, 2**32, 2**32 + 1, -(2**32), -1, 4]
        rows += [2**62 + 3, 0]
    x, x64 = data(device, (5,), i32, -9, 9)
    index = np.array(rows, dtype.numpy)
    y, z = Frame(device, index.shape, i32), Frame(device, (-(-len(rows) // 2),), i32)
    # A u32 fill of -1 would not fit: whole pieces need none.
    kernel = wide_gather if dtype == i64 else wide_gather_unsigned
    kernel(y.piece(2), z.piece(1), x, tilert.from_numpy(index, device)).sync()
    want = np.array([x64[r] if 0 <= r < 5 else -7 for r in rows])
    y.check(want)
    z.check(want[::2])


@tilert.kernel
def wide_gather_unsigned(y: Mut, z: Mut, x: Ref[Dyn], rows: Ref[Dyn]):
    (i,) = y.index
    y.store(x.load(rows[i], fill=-7))
    z.store(x.load(rows[i.start], fill=-7))

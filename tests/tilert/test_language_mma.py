"""Matrix products: every dtype, orientation and odd size, in and out of loops."""

import numpy as np
import pytest

import tilert
from tests.tilert.checks import FLOATS, Frame, data, ints
from tilert import Const, Dyn, Mut, Ref, bf16, f16, f32
from tilert.language import exp, full, maximum, mma, span, tiles, where, zeros

SIZES = [
    (1, 1, 1),
    (1, 16, 16),
    (2, 3, 5),
    (4, 70, 33),
    (5, 8, 16),
    (16, 16, 16),
    (16, 8, 64),
    (17, 130, 48),
    (31, 33, 7),
    (33, 24, 130),
    (64, 64, 64),
    (65, 1, 17),
    (100, 40, 1),
    (128, 128, 32),
    (130, 130, 130),
]


@tilert.kernel
def product(y: Mut, a: Ref, b: Ref, transposed_a: Const[bool], transposed_b: Const[bool]):
    left = a[:, :].T if transposed_a else a[:, :]
    right = b[:, :].T if transposed_b else b[:, :]
    y.store(mma(left, right, zeros(y.shape, f32)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed_b", [False, True])
@pytest.mark.parametrize("transposed_a", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_product(
    device: tilert.Device,
    sizes: tuple[int, int, int],
    transposed_a: bool,
    transposed_b: bool,
    dtype: tilert.DType,
) -> None:
    m, n, k = sizes
    a, a64 = data(device, (k, m) if transposed_a else (m, k), dtype, seed=1)
    b, b64 = data(device, (n, k) if transposed_b else (k, n), dtype, seed=2)
    y = Frame(device, (m, n))
    product(y.piece(m, n), a, b, transposed_a=transposed_a, transposed_b=transposed_b).sync()
    a64 = a64.T if transposed_a else a64
    b64 = b64.T if transposed_b else b64
    y.check(a64 @ b64, steps=20, scale=np.abs(a64) @ np.abs(b64))


@tilert.kernel
def linear(y: Mut[Dyn], x: Ref[Dyn], w: Ref, bias: Ref, bk: Const[int]):
    """A sum that begins at a bias."""
    m, n = y.index
    acc = zeros(y.shape, f32) + bias[n][None, :]
    for k in tiles(x, axis=1, size=bk):
        acc = mma(x[m, k], w[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def linear_kn(y: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=bk):
        acc = mma(x[m, k], w[k, n], acc)
    y.store(acc)


# Tile of y, columns of K a step, K: 0, 1, 2, 3 and many iterations, whole and ragged.
LOOPS = [
    ((16, 16), 16, 0),
    ((16, 16), 16, 16),
    ((16, 32), 16, 32),
    ((32, 16), 32, 96),
    ((64, 64), 32, 320),
    ((64, 128), 64, 200),
    ((128, 128), 32, 160),
    ((32, 64), 64, 1000),
    ((16, 40), 48, 144),
    ((48, 24), 24, 70),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("loop", LOOPS)
def test_product_in_a_loop(device: tilert.Device, loop: tuple, dtype: tilert.DType) -> None:
    (bm, bn), bk, depth = loop
    for rows, columns in ((bm * 2, bn), (bm + 3, bn * 2 - 1), (1, 1), (0, bn)):
        x, x64 = data(device, (rows, depth), dtype, seed=1)
        w, w64 = data(device, (columns, depth), dtype, seed=2)
        t, _ = data(device, (depth, columns), dtype, seed=2)
        t.copy_from(np.ascontiguousarray(w64.T).astype(dtype.numpy))
        bias, bias64 = data(device, (columns,), seed=3)
        scale = np.abs(x64) @ np.abs(w64.T)
        y = Frame(device, (rows, columns), dtype)
        linear(y.piece(bm, bn), x, w, bias, bk=bk).sync()
        y.check(x64 @ w64.T + bias64, steps=40, scale=scale + 4)
        z = Frame(device, (rows, columns))
        linear_kn(z.piece(bm, bn), x, t, bk=bk).sync()
        z.check(x64 @ w64.T, steps=40, scale=scale + 1)


@pytest.mark.parametrize("dtype", [bf16, f32])
def test_product_of_views(device: tilert.Device, dtype: tilert.DType) -> None:
    """Rows further apart than they are long, starts off a 16-byte boundary, columns apart."""
    base, base64 = data(device, (80, 96), dtype, seed=1)
    other, other64 = data(device, (80, 96), dtype, seed=2)
    cuts = [
        (slice(0, 40), slice(0, 64)),
        (slice(3, 40), slice(8, 72)),
        (slice(0, 33), slice(1, 65)),
        (slice(0, 80, 2), slice(0, 64)),
        (slice(0, 20), slice(0, 96, 3)),
    ]
    for cut in cuts:
        x, w = base[cut], other[cut]
        rows, columns = x.shape[0], w.shape[0]
        bias, bias64 = data(device, (columns,), seed=3)
        y = Frame(device, (rows, columns))
        linear(y.piece(32, 16), x, w, bias, bk=32).sync()
        a, b = base64[cut], other64[cut]
        y.check(a @ b.T + bias64, steps=40, scale=np.abs(a) @ np.abs(b.T) + 4)


@tilert.kernel
def computed_operands(y: Mut, x: Ref, w: Ref, gain: Ref, bk: Const[int]):
    """Both operands go through registers first."""
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=bk):
        left = (x[m, k].to(f32) * gain[k][None, :]).to(x.dtype)
        acc = mma(left, maximum(w[n, k], 0).T, acc)
    y.store(acc)


@tilert.kernel
def computed_once(y: Mut, x: Ref, w: Ref):
    a = x[:, :]
    y.store(mma(a + a, (w[:, :] * 0.5).T, full(y.shape, 1, f32)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(3, 20, 10), (16, 16, 32), (40, 33, 64), (64, 64, 100)])
def test_operands_in_registers(device: tilert.Device, sizes: tuple, dtype: tilert.DType) -> None:
    m, n, k = sizes
    x, x64 = data(device, (m, k), dtype, seed=1)
    w, w64 = data(device, (n, k), dtype, seed=2)
    gain = np.exp2(np.random.default_rng(0).integers(-2, 2, k)).astype(np.float32)
    scale = np.abs(x64) @ np.abs(w64.T) * 2 + 1
    for bm, bn, bk in ((m, n, 32), (16, 16, 16), (2, 16, 32)):
        y = Frame(device, (m, n))
        computed_operands(y.piece(bm, bn), x, w, tilert.from_numpy(gain, device), bk=bk).sync()
        y.check((x64 * gain) @ np.maximum(w64, 0).T, steps=40, scale=scale)
    y = Frame(device, (m, n))
    computed_once(y.piece(m, n), x, w).sync()
    y.check(2 * x64 @ (w64.T * 0.5) + 1, steps=40, scale=scale)


@tilert.kernel
def chained(y: Mut, x: Ref, w: Ref, v: Ref):
    """The first product's sum, put through a function, is the second's left operand."""
    m, n = y.index
    first = mma(x[m, :], w[:, :].T, zeros((y.shape[0], w.shape[0]), f32))
    second = mma(maximum(first, 0.0).to(v.dtype), v[:, n], zeros(y.shape, f32))
    y.store(second + sum(first, axis=1)[:, None])


@tilert.kernel
def chained_right(y: Mut, x: Ref, w: Ref, v: Ref):
    """The first product's sum is the second's right operand."""
    first = mma(w[:, :], v[:, :], zeros((w.shape[0], v.shape[1]), f32))
    y.store(mma(x[:, :], first.to(x.dtype), zeros(y.shape, f32)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "sizes", [(1, 5, 3, 7), (16, 16, 16, 16), (64, 48, 32, 64), (70, 64, 33, 20)]
)
def test_chained_products(device: tilert.Device, sizes: tuple, dtype: tilert.DType) -> None:
    m, j, k, n = sizes
    x, x64 = data(device, (m, k), dtype, seed=1)
    w, w64 = data(device, (j, k), dtype, seed=2)
    v, v64 = data(device, (j, n), dtype, seed=3)
    first = x64 @ w64.T
    passed = np.maximum(first, 0).astype(dtype.numpy).astype(np.float64)
    # The rounding of the first product to the operands' dtype may go either way.
    step = {"f32": 40, "bf16": 2.0**17, "f16": 2.0**14}[dtype.name]
    y = Frame(device, (m, n))
    chained(y.piece(m, n), x, w, v).sync()
    scale = np.abs(passed) @ np.abs(v64) + np.abs(first).sum(1)[:, None] + 1
    y.check(passed @ v64 + first.sum(1)[:, None], steps=step, scale=scale * 2**0)
    if m >= 64:
        y = Frame(device, (m, n))
        chained(y.piece(64, n), x, w, v).sync()
        y.check(passed @ v64 + first.sum(1)[:, None], steps=step, scale=scale)
    wt, wt64 = data(device, (k, j), dtype, seed=2)
    inner = (wt64 @ v64).astype(dtype.numpy).astype(np.float64)
    y = Frame(device, (m, n))
    chained_right(y.piece(m, n), x, wt, v).sync()
    y.check(x64 @ inner, steps=step, scale=np.abs(x64) @ np.abs(inner) + 1)


@tilert.kernel
def attention(y: Mut[Dyn], q: Ref[Dyn], k: Ref[Dyn], v: Ref[Dyn], bk: Const[int]):
    """Online softmax: sums, maxima and a fading accumulator carried with the products."""
    m, _ = y.index
    rows = y.shape[0]
    qs = q[m, :]
    best = full((rows,), -1e30, f32)
    total = zeros((rows,), f32)
    acc = zeros(y.shape, f32)
    for j in tiles(k, axis=0, size=bk):
        scores = mma(qs, k[j, :].T, zeros((rows, bk), f32))
        scores = where((j.offsets < k.shape[0])[None, :], scores, float("-inf"))
        top = maximum(best, max(scores, axis=1))
        weights = exp(scores - top[:, None])
        fade = exp(best - top)
        total = total * fade + sum(weights, axis=1)
        acc = mma(weights.to(v.dtype), v[j, :], acc * fade[:, None])
        best = top
    y.store(acc / total[:, None])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tile", "bk"), [(16, 16), (64, 32), (3, 16), (128, 64)])
def test_attention(device: tilert.Device, tile: int, bk: int, dtype: tilert.DType) -> None:
    for rows, keys, dim in ((tile, bk, 16), (tile + 5, bk * 3 + 1, 64), (1, 1, 32), (2, 200, 64)):
        q, q64 = data(device, (rows, dim), dtype, -1, 1, seed=1)
        k, k64 = data(device, (keys, dim), dtype, -1, 1, seed=2)
        v, v64 = data(device, (keys, dim), dtype, seed=3)
        y = Frame(device, (rows, dim), dtype)
        attention(y.piece(tile, dim), q, k, v, bk=bk).sync()
        e = np.exp(q64 @ k64.T - (q64 @ k64.T).max(1, keepdims=True))
        p = e / e.sum(1, keepdims=True)
        step = {"f32": 200, "bf16": 2.0**17, "f16": 2.0**14}[dtype.name]
        y.check(p @ v64, steps=step, scale=p @ np.abs(v64) + 0.1)


@tilert.kernel
def two_sums(y: Mut[Dyn], z: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int]):
    """Two accumulators and a sum of squares over one loop."""
    m, n = y.index
    gate = zeros(y.shape, f32)
    up = full(z.shape, 2, f32)
    squares = zeros((y.shape[0],), f32)
    for k in tiles(x, axis=1, size=bk):
        v = x[m, k]
        squares = squares + sum(v.to(f32) * v.to(f32), axis=1)
        gate = mma(v, w[0, n, k].T, gate)
        up = mma(v, w[1, n, k].T, up)
    y.store(gate + squares[:, None])
    z.store(up)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bm", [1, 2, 3, 4, 16, 64])
def test_two_sums_and_squares(device: tilert.Device, bm: int, dtype: tilert.DType) -> None:
    for rows, columns, depth, bn, bk in (
        (bm, 32, 128, 16, 64),
        (bm + 1, 20, 72, 8, 16),
        (1, 4, 8, 4, 16),
    ):
        x, x64 = data(device, (rows, depth), dtype, seed=1)
        w, w64 = data(device, (2, columns, depth), dtype, seed=2)
        y, z = Frame(device, (rows, columns)), Frame(device, (rows, columns))
        two_sums(y.piece(bm, bn), z.piece(bm, bn), x, w, bk=bk).sync()
        scale = np.abs(x64) @ np.abs(w64).sum(0).T + (x64**2).sum(1)[:, None] + 4
        y.check(x64 @ w64[0].T + (x64**2).sum(1)[:, None], steps=40, scale=scale)
        z.check(x64 @ w64[1].T + 2, steps=40, scale=scale)


@tilert.kernel
def thin(y: Mut[Dyn], x: Ref[Dyn], w: Ref):
    """A product of few rows outside any loop."""
    m, n = y.index
    y.store(mma(x[m, :], w[n, :].T, full(y.shape, 3, f32)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bm", [1, 2, 3, 4])
def test_thin_product(device: tilert.Device, bm: int, dtype: tilert.DType) -> None:
    for rows, columns, depth in ((1, 1, 1), (bm, 16, 256), (7, 33, 100), (0, 8, 16)):
        x, x64 = data(device, (rows, depth), dtype, seed=1)
        w, w64 = data(device, (columns, depth), dtype, seed=2)
        y = Frame(device, (rows, columns), dtype)
        thin(y.piece(bm, 8), x, w).sync()
        y.check(x64 @ w64.T + 3, steps=40, scale=np.abs(x64) @ np.abs(w64.T) + 3)


@tilert.kernel
def through_a_table(y: Mut, x: Ref, w: Ref[Dyn], table: Ref, gathered: Const[bool]):
    """The address of each step's tile comes out of an index table."""
    acc = zeros(y.shape, f32)
    for j in tiles(table, axis=0, size=2):
        if gathered:
            page = w[table.load(j, fill=-1), :, :].reshape(-1, w.shape[2])
            acc = mma(x[:, :], page.T, acc)
        else:
            first = table[j.number * 2]
            acc = mma(x[:, :], w[first, :, :].T, acc)
    y.store(acc)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [2, 16, 48])
def test_pages_through_a_table(device: tilert.Device, rows: int, dtype: tilert.DType) -> None:
    x, x64 = data(device, (rows, 32), dtype, seed=1)
    w, w64 = data(device, (9, 16, 32), dtype, seed=2)
    for table in ([3], [0, 8], [5, -1, 2], [4, 4, 9, 1, 0, 7, 2, 2, 100, 3]):
        indices = ints(device, table)
        padded = [*table, -1] if len(table) % 2 else table
        pages = np.array([w64[i] if 0 <= i < 9 else np.zeros((16, 32)) for i in padded])
        y = Frame(device, (rows, 32))
        through_a_table(y.piece(rows, 32), x, w, indices, gathered=True).sync()
        both = pages.reshape(-1, 32, 32).sum(0)
        y.check(x64 @ both.T, steps=40, scale=400)
        y = Frame(device, (rows, 16))
        through_a_table(y.piece(rows, 16), x, w, indices, gathered=False).sync()
        y.check(x64 @ pages[::2].sum(0).T, steps=40, scale=400)


@tilert.kernel
def windows(y: Mut, x: Ref, w: Ref):
    """Operands that begin anywhere, and one of a gathered row set."""
    acc = zeros(y.shape, f32)
    for k in range(5):
        acc = mma(x[span(k * 3 - 4, 16), :], w[span(k, 16), :].T, acc)
    y.store(acc)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_of_spans(device: tilert.Device, dtype: tilert.DType) -> None:
    x, x64 = data(device, (20, 32), dtype, seed=1)
    w, w64 = data(device, (18, 32), dtype, seed=2)
    y = Frame(device, (16, 16))
    windows(y.piece(16, 16), x, w).sync()
    xp, wp = np.pad(x64, ((4, 20), (0, 0))), np.pad(w64, ((0, 20), (0, 0)))
    y.check(sum(xp[k * 3 : k * 3 + 16] @ wp[k : k + 16].T for k in range(5)), steps=40, scale=300)


@tilert.kernel
def conditional(y: Mut[Dyn], x: Ref[Dyn], w: Ref[Dyn], use: Ref, bk: Const[int]):
    """Blocks left out at run time, with an index that only the branch computes."""
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=bk):
        if use[k.number] >= 0:
            row = use[k.number] * 2
            acc = mma(x[m, k], w[row, n, k].T, acc)
    y.store(acc)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_under_a_run_time_if(device: tilert.Device, dtype: tilert.DType) -> None:
    x, x64 = data(device, (20, 96), dtype, seed=1)
    w, w64 = data(device, (5, 32, 96), dtype, seed=2)
    use = [1, -1, 0, 2, -1, 1]
    for bm in (4, 16):
        y = Frame(device, (20, 32))
        conditional(y.piece(bm, 32), x, w, ints(device, use), bk=16).sync()
        want = np.zeros((20, 32))
        for k, u in enumerate(use):
            cut = slice(k * 16, k * 16 + 16)
            want += x64[:, cut] @ w64[u * 2, :, cut].T if u >= 0 else 0
        y.check(want, steps=40, scale=300)


@tilert.kernel
def nested_loops(y: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int]):
    """A pipelined loop inside another; the outer tile is read in the inner loop."""
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=bk):
        left = x[m, k]
        for e in range(w.shape[0]):
            acc = mma(left, w[e, n, k].T, acc)
    y.store(acc)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_in_nested_loops(device: tilert.Device, dtype: tilert.DType) -> None:
    x, x64 = data(device, (33, 128), dtype, seed=1)
    for experts in (1, 2, 5):
        w, w64 = data(device, (experts, 40, 128), dtype, seed=2)
        for bm in (2, 32):
            y = Frame(device, (33, 40))
            nested_loops(y.piece(bm, 16), x, w, bk=32).sync()
            y.check(x64 @ w64.sum(0).T, steps=60, scale=np.abs(x64) @ np.abs(w64).sum(0).T)


def test_nan_stays_in_its_row(device: tilert.Device) -> None:
    """Padding of ragged tiles must not spread NaN or infinities that lie next to the operand."""
    for dtype in (bf16, f16, f32):
        base = np.full((48, 48), np.nan)
        base[8:28, 8:28] = np.random.default_rng(0).uniform(-1, 1, (20, 20))
        x = tilert.from_numpy(base.astype(dtype.numpy), device)[8:28, 8:28]
        x64 = base[8:28, 8:28].astype(dtype.numpy).astype(np.float64)
        for transposed in (False, True):
            y = Frame(device, (20, 20))
            product(y.piece(20, 20), x, x, transposed_a=False, transposed_b=transposed).sync()
            y.check(x64 @ (x64.T if transposed else x64), steps=40, scale=20)

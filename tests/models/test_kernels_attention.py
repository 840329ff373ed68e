"""Rotation and KV append, and attention over pages, against float64."""

import numpy as np
import pytest

import tilert
from models import kernels
from models.tile_sizes import DecodeTiles
from models.tiling import tiling, tiling_of
from tests.models.kernel_support import DTYPES, TOLERANCE, Floats, close, draw, poisoned, put
from tilert import Array, Device, DType, UniqueIndex, f32

PAGE = 16


def rotate(x: Floats, angles: Floats) -> Floats:
    """RoPE of x [T, heads, D] by angles [T, D/2] (rotate-half)."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    lo, hi = np.split(x, 2, axis=-1)
    return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)


def norm_heads(x: Floats, gain: Floats, eps: float) -> Floats:
    normed: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain
    return normed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (9, 3, 64), (2, 2, 16)])
def test_qk_norm_rope_append(
    device: Device, dtype: DType, norm: bool, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng(heads)
    places = np.array([7, 0, 63, 20, 3], np.int32)
    slots = np.array([11, -1, 0, 5, 2], np.int32)
    count, total, half = len(places), heads + 2 * kv_heads, dim // 2
    qkv, values = draw(rng, (count, total, 2, half), dtype, device)
    q_gain, q_gains = draw(rng, (2, half), dtype, device)
    k_gain, k_gains = draw(rng, (2, half), dtype, device)
    angles = rng.uniform(0, 6, (64, half))
    cos, sin = (put(f(angles).astype(np.float32), device) for f in (np.cos, np.sin))
    q = poisoned((count, heads, 2, half), dtype, device)
    k = tilert.full((12, kv_heads, 2, half), 7.0, dtype, device)
    v = tilert.full((12, kv_heads, dim), 7.0, dtype, device)
    index = UniqueIndex.checked(slots, device)
    kernels.qk_norm_rope_append(
        q[:, :, 0].partition(1, heads, half),
        q[:, :, 1].partition(1, heads, half),
        k[:, :, 0].partition_at(index, 1, kv_heads, half),
        k[:, :, 1].partition_at(index, 1, kv_heads, half),
        v.partition_at(index, 1, kv_heads, dim),
        qkv,
        q_gain,
        k_gain,
        cos,
        sin,
        put(places, device),
        eps=1e-6,
        norm=norm,
    ).run()
    flat = values.reshape(count, total, dim)
    queries, keys = flat[:, :heads], flat[:, heads : heads + kv_heads]
    if norm:
        queries = norm_heads(queries, q_gains.reshape(-1), 1e-6)
        keys = norm_heads(keys, k_gains.reshape(-1), 1e-6)
    kept = slots >= 0
    expected_k = np.full((12, kv_heads, dim), 7.0)
    expected_v = np.full((12, kv_heads, dim), 7.0)
    expected_k[slots[kept]] = rotate(keys, angles[places])[kept]
    expected_v[slots[kept]] = flat[kept, heads + kv_heads :]
    close(q.reshape(count, heads, dim), rotate(queries, angles[places]))
    close(k.reshape(12, kv_heads, dim), expected_k)
    np.testing.assert_array_equal(v.numpy().astype(np.float64), expected_v)


def attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """q [Hq, D] over k, v [L, Hkv, D] -> [Hq, D]."""
    group = len(q) // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("hd,lhd->hl", q, k) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("hl,lhd->hd", weights, v)


class Cache:
    """A random cache of 12 pages of PAGE positions; rows of 5 pages at most, in no order."""

    def __init__(self, rng: np.random.Generator, kv_heads: int, dim: int, dtype: DType) -> None:
        self.shape = (12, PAGE, kv_heads, dim)
        self.rng = rng
        self.dtype = dtype
        self.table = np.array([[4, 9, 1, 0, 7], [3, 11, -1, -1, -1], [5, -1, -1, -1, -1]], np.int32)

    def put(self, device: Device) -> tuple[Array, Array, Array]:
        k, self.k = draw(self.rng, self.shape, self.dtype, device, 2)
        v, self.v = draw(self.rng, self.shape, self.dtype, device)
        return k, v, put(self.table, device)

    def of(self, row: int, length: int) -> tuple[Floats, Floats]:
        """Keys and values of a row's first positions."""
        pages = self.table[row]
        pages = pages[pages >= 0]
        k, v = (x[pages].reshape(-1, *self.shape[2:])[:length] for x in (self.k, self.v))
        return k, v


def decode_tiles(device: Device, kv_heads: int) -> list[DecodeTiles]:
    """The device's own, one or all heads a program, several pages a step, and splits."""
    own = tiling(device.kind).decode_attention(4, kv_heads)
    one = [DecodeTiles(1, 1, 1), DecodeTiles(1, 1, 4), DecodeTiles(1, 1, 16, 24)]
    if device.kind == "cuda":
        return [own, *one]
    return [own, *one, DecodeTiles(kv_heads, 2, 1), DecodeTiles(kv_heads, 4, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (9, 3, 64), (8, 1, 128)])
def test_decode_attention(
    device: Device, dtype: DType, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng(heads)
    cache = Cache(rng, kv_heads, dim, dtype)
    k, v, table = cache.put(device)
    rows = np.array([2, -1, 0, 1], np.int32)
    places = np.array([0, 5, 70, 17], np.int32)
    q, queries = draw(rng, (4, heads, dim), dtype, device)
    expected = np.zeros((4, heads, dim))
    for slot, (row, place) in enumerate(zip(rows, places, strict=True)):
        if row >= 0:
            expected[slot] = attention(queries[slot], *cache.of(row, place + 1))
    inputs = (q, k, v, table, put(rows, device), put(places, device))
    for t in decode_tiles(device, kv_heads):
        o = poisoned((4, heads, dim), dtype, device)
        group = heads // kv_heads * t.heads
        consts = {"scale": dim**-0.5, "heads": t.heads, "pages": t.pages}
        kernels.decode_attention(o.partition(1, group, dim), *inputs, **consts).run()
        close(o, expected, 2 * TOLERANCE[dtype.name])


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (9, 3, 64), (8, 1, 128)])
def test_decode_attention_in_shares(
    device: Device, dtype: DType, heads: int, kv_heads: int, dim: int, norm: bool, wide: bool
) -> None:
    """From projections, of f32 too, to outputs, and to keys and values in their places; the cache
    has other numbers there before."""
    rng = np.random.default_rng(heads)
    half, total = dim // 2, heads + 2 * kv_heads
    rows = np.array([2, -1, 0, 1], np.int32)
    places = np.array([0, 5, 70, 16], np.int32)
    slots = np.array([5 * PAGE, -1, 7 * PAGE + 6, 11 * PAGE], np.int32)
    qkv, values = draw(rng, (4, total, 2, half), f32 if wide else dtype, device)
    new_v = qkv.reshape(4, total, dim)[:, heads + kv_heads :]
    q_gain, q_gains = draw(rng, (2, half), dtype, device)
    k_gain, k_gains = draw(rng, (2, half), dtype, device)
    angles = rng.uniform(0, 6, (80, half))
    cos, sin = (put(f(angles).astype(np.float32), device) for f in (np.cos, np.sin))
    flat = values.reshape(4, total, dim)
    queries, keys, value = np.split(flat, [heads, heads + kv_heads], axis=1)
    if norm:
        queries = norm_heads(queries, q_gains.reshape(-1), 1e-6)
        keys = norm_heads(keys, k_gains.reshape(-1), 1e-6)
    queries, keys = rotate(queries, angles[places]), rotate(keys, angles[places])
    for t in decode_tiles(device, kv_heads):
        cache = Cache(rng, kv_heads, dim, dtype)
        k, v, table = cache.put(device)
        expected_k, expected_v = (x.reshape(-1, kv_heads, dim).copy() for x in (cache.k, cache.v))
        expected_k[slots[rows >= 0]] = keys[rows >= 0]
        expected_v[slots[rows >= 0]] = value[rows >= 0]
        cache.k, cache.v = expected_k.reshape(cache.shape), expected_v.reshape(cache.shape)
        expected = np.zeros((4, heads, dim))
        for slot, (row, place) in enumerate(zip(rows, places, strict=True)):
            if row >= 0:
                expected[slot] = attention(queries[slot], *cache.of(row, place + 1))
        o = poisoned((4, heads, dim), dtype, device)
        acc = poisoned((4, t.splits, heads, dim), f32, device)
        best, sums = (poisoned((4, t.splits, heads), f32, device) for _ in range(2))
        new = poisoned((4, t.splits, kv_heads, 2, half), dtype, device)
        group, columns = heads // kv_heads * t.heads, min(dim, t.columns)
        kernels.decode_attention_split(
            acc.partition(1, 1, group, dim),
            best.partition(1, 1, group),
            sums.partition(1, 1, group),
            new[:, :, :, 0].partition(1, 1, t.heads, half),
            new[:, :, :, 1].partition(1, 1, t.heads, half),
            qkv[:, :heads],
            qkv[:, heads : heads + kv_heads],
            new_v,
            k,
            v,
            table,
            put(rows, device),
            put(places, device),
            q_gain,
            k_gain,
            cos,
            sin,
            scale=dim**-0.5,
            heads=t.heads,
            pages=t.pages,
            eps=1e-6,
            norm=norm,
        ).run()
        index = UniqueIndex.checked(slots, device)
        k, v = (x.reshape(-1, kv_heads, dim) for x in (k, v))
        kernels.merge_splits(
            o.partition(1, heads // kv_heads, columns),
            k.partition_at(index, 1, 1, columns),
            v.partition_at(index, 1, 1, columns),
            acc,
            best,
            sums,
            new.reshape(4, t.splits, kv_heads, dim),
            new_v,
        ).run()
        close(o, expected, 2 * TOLERANCE[dtype.name])
        close(k, expected_k)
        close(v, expected_v)


def check_prefill_attention(
    device: Device,
    dtype: DType,
    heads: tuple[int, int, int],
    chunks: list[tuple[int, int, int]],
    tiles: list[tuple[int, int]],
    padding: tuple[int, int] = (0, 0),
) -> None:
    """Chunks (row, start, count) in one launch, for each (rows, pages) of tiles; padding: tokens
    and slots."""
    query_heads, kv_heads, dim = heads
    rng = np.random.default_rng(len(chunks))
    cache = Cache(rng, kv_heads, dim, dtype)
    k, v, table = cache.put(device)
    count = sum(chunk[2] for chunk in chunks)
    q, queries = draw(rng, (count + padding[0], query_heads, dim), dtype, device)
    expected = np.zeros(queries.shape)
    used = len(chunks)
    slots = np.full(len(queries), used + padding[1], np.int32)
    begins = np.full(used + padding[1] + 1, count, np.int32)
    rows, starts = (np.full(used + padding[1], fill, np.int32) for fill in (-1, 0))
    end = 0
    for slot, (row, start, length) in enumerate(chunks):
        begins[slot], rows[slot], starts[slot] = end, row, start
        slots[end : end + length] = slot
        for place in range(start, start + length):
            expected[end] = attention(queries[end], *cache.of(row, place + 1))
            end += 1
    for size, pages in tiles:
        o = poisoned(q.shape, dtype, device)
        kernels.prefill_attention(
            o.partition(size, 1, dim),
            q,
            k,
            v,
            table,
            *(put(x, device) for x in (rows, slots, begins, starts)),
            scale=dim**-0.5,
            pages=pages,
        ).run()
        close(o, expected, 2 * TOLERANCE[dtype.name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 32), (9, 3, 64)], ids=str)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 16), (0, 37), (33, 40), (79, 1)])
def test_prefill_attention(
    device: Device, dtype: DType, heads: tuple[int, int, int], start: int, count: int
) -> None:
    own = tiling_of(device, dtype).prefill_attention(count, PAGE, 1, heads[2])
    tiles = [(own.rows, own.pages), (16, 1)]
    check_prefill_attention(device, dtype, heads, [(0, start, count)], tiles)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 32), (9, 3, 64)], ids=str)
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (90, 3)], ids=str)
@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 0, 1), (1, 0, 1)],
        [(1, 0, 16), (0, 33, 16)],
        [(0, 79, 1), (2, 3, 5), (1, 0, 31)],
        [(1, 7, 25), (2, 0, 1), (0, 0, 80)],
    ],
    ids=str,
)
def test_prefill_attention_of_several_sequences(
    device: Device,
    dtype: DType,
    heads: tuple[int, int, int],
    padding: tuple[int, int],
    chunks: list[tuple[int, int, int]],
) -> None:
    count = sum(chunk[2] for chunk in chunks) + padding[0]
    own = tiling_of(device, dtype).prefill_attention(count, PAGE, len(chunks), heads[2])
    tiles = [(own.rows, own.pages), (16, 1), (32, 2)]
    check_prefill_attention(device, dtype, heads, chunks, tiles, padding)


def test_attention_survives_large_scores(device: Device) -> None:
    """Scores far beyond the range of exp: the largest key wins alone."""
    k = np.zeros((1, PAGE, 1, 16), np.float32)
    v = np.zeros((1, PAGE, 1, 16), np.float32)
    k[0, :, 0, 0] = np.linspace(-1e4, 1e4, PAGE)
    v[0, :, 0, :] = np.arange(PAGE)[:, None]
    q = np.zeros((1, 1, 16), np.float32)
    q[0, 0, 0] = 100
    o = poisoned((1, 1, 16), f32, device)
    kernels.decode_attention(
        o.partition(1, 1, 16),
        *(put(x, device) for x in (q, k, v)),
        put(np.zeros((1, 1), np.int32), device),
        put(np.zeros(1, np.int32), device),
        put(np.array([PAGE - 1], np.int32), device),
        scale=0.25,
        heads=1,
        pages=1,
    ).run()
    close(o, np.full((1, 1, 16), float(PAGE - 1)))

"""The attention schedule of sm_90a for few rows, run on the host and compiled for the GPU."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

import tilert
from models import kernels
from tests.tilert.checks import ints
from tests.tilert.emulator import EmulatedDevice
from tests.tilert.products import hopper, mistaken, needs_compiler
from tilert import Const, DType, Mut, Ref, bf16, f16, f32, sass
from tilert.codegen import row_attention
from tilert.language import exp2, full, max, maximum, mma, sum, tiles, zeros
from tilert.target_device import TargetDevice

pytestmark = pytest.mark.usefixtures("pipelined")
TOLERANCE = {"bf16": 2.0**-6, "f16": 2.0**-9}


def is_taken(device: Any) -> bool:
    """Whether the kernel compiled first is under the schedule."""
    compiled = device.kernels if isinstance(device, TargetDevice) else device.launchers.values()
    text: str = next(iter(compiled)).text
    return "map_ahead(&map0)" in text


class Decoding:
    """One new token of sequences of so many positions, none for a padding slot, in pages that lie
    in no order. The heads' queries grow, up to where few keys have nearly all the weight."""

    def __init__(
        self,
        device: tilert.Device,
        lengths: list[int],
        heads: tuple[int, int, int],
        dtype: DType = bf16,
        page: int = 64,
        given: DType | None = None,
        norm: bool = False,
    ) -> None:
        """given: dtype of projections; `dtype` unless said. norm: of queries and keys."""
        hq, hkv, dim = heads
        rng = np.random.default_rng([len(lengths), *heads])
        counts = [-(-n // page) for n in lengths]
        pages = rng.permutation(int(np.sum(counts)) + 1).astype(np.int32)
        # Rows of the table are not in the order of the batch, and end in what is no page.
        order = rng.permutation(len(lengths))
        self.table = np.full((len(lengths), np.max(counts) + 1), -1, np.int32)
        ends = np.cumsum(counts)
        for b, (n, end) in enumerate(zip(counts, ends, strict=True)):
            self.table[order[b], :n] = pages[end - n : end]
        self.lengths, self.order, self.group = lengths, order, hq // hkv
        self.dtype, self.heads, self.device, self.norm = dtype, heads, device, norm
        self.rows = [int(r) if n else -1 for r, n in zip(order, lengths, strict=True)]
        self.places = [n - 1 if n else 70 for n in lengths]
        size, half = len(lengths), dim // 2
        qkv = rng.uniform(-1, 1, (size, hq + 2 * hkv, dim))
        qkv[:, :hq] *= np.linspace(0, 6, hq + 1)[1:, None]
        self.qkv = qkv.astype((given or dtype).numpy)
        self.angles = rng.uniform(0, 6, (int(np.max(self.places)) + 1, half))
        q, keys, values = np.split(self.qkv.astype(np.float64), [hq, hq + hkv], axis=1)
        self.gains = [rng.uniform(0.5, 2, dim).astype(dtype.numpy) for _ in range(2)]
        if norm:
            q, keys = (
                x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * gain.astype(np.float64)
                for x, gain in zip((q, keys), self.gains, strict=True)
            )
        self.q, self.keys = (self.rotated(x).astype(dtype.numpy) for x in (q, keys))
        self.values = values.astype(dtype.numpy)
        shape = len(pages), page, hkv, dim
        self.k, self.v = (rng.uniform(-1, 1, shape).astype(dtype.numpy) for _ in range(2))
        self.slots = np.full(size, -1, np.int32)
        for b, n in enumerate(lengths):
            if n:
                at = self.table[order[b], (n - 1) // page], (n - 1) % page
                self.slots[b] = at[0] * page + at[1]
                self.k[at], self.v[at] = self.keys[b], self.values[b]

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Heads [B, heads, D] at their places."""
        angles = self.angles[self.places]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        lo, hi = np.split(x, 2, axis=-1)
        return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)

    def want(self) -> np.ndarray:
        want = np.zeros(self.q.shape)
        for b, n in enumerate(self.lengths):
            if not n:
                continue
            pages = self.table[self.order[b]]
            k, v = (
                np.repeat(x[pages[pages >= 0]].reshape(-1, *x.shape[2:])[:n], self.group, axis=1)
                for x in (self.k.astype(np.float64), self.v.astype(np.float64))
            )
            scores = np.einsum("hd,lhd->hl", self.q[b].astype(np.float64), k)
            scores *= self.heads[2] ** -0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            want[b] = np.einsum("hl,lhd->hd", weights, v)
        return want

    def check(self, splits: int = 1, pages: int = 1) -> None:
        """Run with outputs full of NaN, in shares or not, and compare."""
        (hq, _, dim), device, size = self.heads, self.device, len(self.lengths)
        out = tilert.full((size, hq, dim), float("nan"), self.dtype, device)
        consts = {"scale": dim**-0.5, "heads": 1, "pages": pages}
        if splits == 1:
            kernels.decode_attention(
                out.partition(1, self.group, dim), tilert.from_numpy(self.q, device),
                *(tilert.from_numpy(x, device) for x in (self.k, self.v)), *self.places_of(),
                **consts,
            ).run()  # fmt: skip
        else:
            self.in_shares(out, splits, consts)
        got = out.numpy().astype(np.float64)
        np.testing.assert_allclose(got, self.want(), rtol=0, atol=TOLERANCE[self.dtype.name])

    def places_of(self) -> tuple[tilert.Array, ...]:
        table = tilert.from_numpy(self.table, self.device)
        return table, ints(self.device, self.rows), ints(self.device, self.places)

    def in_shares(self, out: tilert.Array, splits: int, consts: dict[str, Any]) -> None:
        """With new keys and values that the cache does not have before, and has afterwards."""
        (hq, hkv, dim), device, size = self.heads, self.device, len(self.lengths)

        def poisoned(*shape: int, dtype: DType = f32) -> tilert.Array:
            return tilert.full(shape, float("nan"), dtype, device)

        before = [x.reshape(-1, hkv, dim).copy() for x in (self.k, self.v)]
        for x in before:
            x[self.slots[self.slots >= 0]] = 9
        k, v = (tilert.from_numpy(x.reshape(self.k.shape), device) for x in before)
        qkv = tilert.from_numpy(self.qkv, device)
        cut = qkv.reshape(size, -1, 2, dim // 2)
        acc = poisoned(size, splits, hq, dim)
        best, total = poisoned(size, splits, hq), poisoned(size, splits, hq)
        keys = poisoned(size, splits, hkv, 2, dim // 2, dtype=self.dtype)
        gains = (tilert.from_numpy(x.reshape(2, -1), device) for x in self.gains)
        cos, sin = (
            tilert.from_numpy(f(self.angles).astype(np.float32), device) for f in (np.cos, np.sin)
        )
        kernels.decode_attention_split(
            acc.partition(1, 1, self.group, dim), best.partition(1, 1, self.group),
            total.partition(1, 1, self.group), keys[:, :, :, 0].partition(1, 1, 1, dim // 2),
            keys[:, :, :, 1].partition(1, 1, 1, dim // 2), cut[:, :hq], cut[:, hq : hq + hkv],
            qkv[:, hq + hkv :], k, v, *self.places_of(), *gains, cos, sin, **consts, eps=1e-6,
            norm=self.norm,
        ).run()  # fmt: skip
        index = tilert.UniqueIndex.checked(self.slots, device)
        k, v = (x.reshape(-1, hkv, dim) for x in (k, v))
        kernels.merge_splits(
            out.partition(1, self.group, 32), k.partition_at(index, 1, 1, 32),
            v.partition_at(index, 1, 1, 32), acc, best, total,
            keys.reshape(size, splits, hkv, dim), qkv[:, hq + hkv :],
        ).run()  # fmt: skip
        places = self.slots[self.slots >= 0]
        new = self.slots >= 0
        before[0][places], before[1][places] = self.keys[new], self.values[new]
        got = k.numpy().astype(np.float64)
        # Where f32 and f64 round a key to different neighbours.
        np.testing.assert_allclose(got, before[0].astype(np.float64), rtol=2**-7, atol=2**-7)
        np.testing.assert_array_equal(v.numpy(), before[1])


# Lengths, (query heads, KV heads, dim), dtype, page, pages a step: one token, none, ends of pages,
# less than a page for each split, more steps than stages; groups of one to sixteen heads.
SMALL = [
    ([1], (4, 1, 64), bf16, 64, 1),
    ([64, 65, 63], (4, 2, 64), bf16, 64, 1),
    ([300, 0, 7], (8, 1, 128), bf16, 64, 1),
    ([700], (5, 1, 128), f16, 64, 1),
    ([129, 128], (4, 2, 64), bf16, 64, 2),
    ([200, 16, 1], (4, 1, 64), f16, 16, 1),
    ([200, 33], (6, 1, 128), bf16, 16, 4),
    ([100], (16, 1, 64), bf16, 32, 1),
    ([90, 5], (12, 1, 128), bf16, 64, 1),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("lengths", "heads", "dtype", "page", "pages"), SMALL, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_decoding(
    gpu: EmulatedDevice,
    lengths: list[int],
    heads: tuple[int, int, int],
    dtype: DType,
    page: int,
    pages: int,
    splits: int,
) -> None:
    Decoding(gpu, lengths, heads, dtype, page).check(splits, pages)
    assert is_taken(gpu)


@needs_compiler
@pytest.mark.parametrize(
    ("lengths", "heads", "dtype", "given"),
    [([70, 1], (4, 1, 128), bf16, f32), ([3, 0, 200], (6, 2, 64), f16, f16),
     ([130], (20, 2, 64), bf16, bf16)],
    ids=str,
)  # fmt: skip
def test_norms_and_wide_projections(
    gpu: EmulatedDevice,
    lengths: list[int],
    heads: tuple[int, int, int],
    dtype: DType,
    given: DType,
) -> None:
    Decoding(gpu, lengths, heads, dtype, given=given, norm=True).check(splits=2)
    assert is_taken(gpu)


LARGE = [
    ([4096, 1, 64, 65, 0, 777, 8191], (32, 8, 128), bf16, 64, 1),
    ([3000] * 8 + [0, 1, 2, 6000], (16, 8, 128), f16, 64, 1),
    ([500, 1000], (64, 8, 128), bf16, 64, 2),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "heads", "dtype", "page", "pages"), [*SMALL, *LARGE], ids=str)
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_decoding_on_a_gpu(
    lengths: list[int],
    heads: tuple[int, int, int],
    dtype: DType,
    page: int,
    pages: int,
    splits: int,
) -> None:
    device = hopper()
    Decoding(device, lengths, heads, dtype, page).check(splits, pages)


# -- what it does not take -----------------------------------------------------------------------


@tilert.kernel
def softmax(o: Mut, q: Ref, k: Ref, v: Ref, wrong: Const[int]):
    """Attention of few rows to all keys, and what is no online softmax."""
    m, _ = o.index
    qs = q[m, :]
    rows = o.shape[0]
    best = full((rows,), float("-inf") if wrong == 1 else -1e30, f32)
    total = zeros((rows,), f32)
    acc = zeros(o.shape, f32)
    size = 16 if wrong == 2 else 64
    for n in tiles(k, axis=0, size=size):
        x = mma(qs, k[n, :].T, zeros((rows, size), f32))
        if wrong == 3:
            x = x + best[:, None]
        top = maximum(best, max(x, axis=1))
        if wrong == 4:
            top = maximum(top, total)
        taken = best if wrong == 5 else top
        weights = exp2(x - (taken[None, :] if wrong == 2 else taken[:, None]))
        fade = exp2(best - top)
        total = (total if wrong == 6 else total * fade) + sum(weights, axis=1)
        given = fade * fade if wrong == 7 else fade
        acc = mma(weights.to(v.dtype), v[n, :], acc * given[:, None])
        best = top
    o.store(acc / total[:, None])


@needs_compiler
def test_keys_in_order(gpu: EmulatedDevice) -> None:
    """Keys outside of the array are zeros; several programs have rows of their own."""
    rng = np.random.default_rng(0)
    host = [rng.uniform(-1, 1, (n, 64)).astype(bf16.numpy) for n in (16, 200, 200)]
    q, k, v = (x.astype(np.float64) for x in host)
    o = tilert.full((16, 64), float("nan"), f32, gpu)
    softmax(o.partition(8, 64), *(tilert.from_numpy(x, gpu) for x in host), wrong=0).run()
    assert is_taken(gpu)
    k, v = (np.pad(x, ((0, 56), (0, 0))) for x in (k, v))
    weights = np.exp2(q @ k.T)
    want = weights @ v / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(o.numpy(), want, rtol=0, atol=2.0**-8)


@tilert.kernel
def softmax_from(o: Mut, q: Ref, k: Ref, v: Ref):
    """Attention of computed queries to some keys and to all of k: what comes of the former is what
    the loop begins with."""
    m, _ = o.index
    given = q[m, :].to(f32)
    qs = (given * 0.5).to(q.dtype)
    best = sum(given, axis=1)
    total = full((o.shape[0],), 3.0, f32)
    acc = given + 1.0
    for n in tiles(k, axis=0, size=64):
        x = mma(qs, k[n, :].T, zeros((o.shape[0], 64), f32))
        top = maximum(best, max(x, axis=1))
        weights = exp2(x - top[:, None])
        fade = exp2(best - top)
        total = total * fade + sum(weights, axis=1)
        acc = mma(weights.to(v.dtype), v[n, :], acc * fade[:, None])
        best = top
    o.store(acc / total[:, None])


@needs_compiler
def test_what_the_loop_begins_with_is_one_more_share(gpu: EmulatedDevice) -> None:
    rng = np.random.default_rng(0)
    host = [rng.uniform(-1, 1, (n, 64)).astype(bf16.numpy) for n in (16, 200, 200)]
    q, k, v = (x.astype(np.float64) for x in host)
    o = tilert.full((16, 64), float("nan"), f32, gpu)
    softmax_from(o.partition(8, 64), *(tilert.from_numpy(x, gpu) for x in host)).run()
    assert is_taken(gpu)
    k, v = (np.pad(x, ((0, 56), (0, 0))) for x in (k, v))
    first = np.exp2(q.sum(axis=1, keepdims=True))
    weights = np.exp2(q / 2 @ k.T)
    want = (weights @ v + first * (q + 1)) / (weights.sum(axis=1, keepdims=True) + first * 3)
    np.testing.assert_allclose(o.numpy(), want, rtol=0, atol=2.0**-8)


@pytest.mark.parametrize("wrong", range(8))
def test_what_is_no_online_softmax(wrong: int) -> None:
    rows = 16 if wrong == 2 else 8
    keys = ((256, 64), bf16)
    found = tilert.explain(
        softmax, ((16, 64), f32, (rows, 64)), ((16, 64), bf16), keys, keys,
        wrong=wrong, arch="sm_90a",
    )  # fmt: skip
    assert found.schedule == ("staged" if wrong else "attention")
    if wrong:
        assert "no online softmax" in found.refused["attention"]


def compiled(
    heads: tuple[int, int, int] = (32, 8, 128),
    page: int = 64,
    pages: int = 1,
    kv: int = 1,
    dtype: DType = bf16,
) -> TargetDevice:
    """Of 16 sequences in 4 shares, `kv` KV heads a program."""
    hq, hkv, dim = heads
    device, group = TargetDevice("sm_90a"), hq // hkv * kv
    acc = tilert.empty((16, 4, hq, dim), f32, device)
    best, total = (tilert.empty((16, 4, hq), f32, device) for _ in range(2))
    new = [tilert.empty((16, 4, hkv, dim // 2), dtype, device) for _ in range(2)]
    qkv = tilert.empty((16, hq + 2 * hkv, 2, dim // 2), dtype, device)
    given = qkv[:, :hq], qkv[:, hq : hq + hkv], qkv[:, hq + hkv :].reshape(16, hkv, dim)
    k, v = (tilert.empty((9, page, hkv, dim), dtype, device) for _ in range(2))
    index = [ints(device, np.zeros(shape)) for shape in ((16, 9), 16, 16)]
    gains = [tilert.empty((2, dim // 2), dtype, device) for _ in range(2)]
    turns = [tilert.empty((999, dim // 2), f32, device) for _ in range(2)]
    kernels.decode_attention_split(
        acc.partition(1, 1, group, dim), best.partition(1, 1, group),
        total.partition(1, 1, group), *(x.partition(1, 1, kv, dim // 2) for x in new), *given, k, v,
        *index, *gains, *turns, scale=1.0, heads=kv, pages=pages, eps=1e-6, norm=True,
    )  # fmt: skip
    return device


@pytest.mark.parametrize(
    "sizes",
    [{"heads": (8, 8, 128)}, {"heads": (4, 2, 32)}, {"heads": (64, 2, 128)},
     {"heads": (16, 1, 256)}, {"page": 8}, {"dtype": f32}, {"kv": 2}],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_fit_it(sizes: dict[str, Any]) -> None:
    """One row, narrow heads, too many rows or registers, too few keys, f32, several KV heads."""
    assert not is_taken(compiled(**sizes))


# -- mistakes show -------------------------------------------------------------------------------

MISTAKES = {
    "keys are not waited for": ("barrier_wait(keys_full + 8 * stage, turn);", ""),
    "values are not waited for": ("barrier_wait(values_full + 8 * stage, turn);", ""),
    "keys in use are overwritten": ("barrier_wait(keys_free + 8 * stage, turn ^ 1);", ""),
    "values in use are overwritten": ("barrier_wait(values_free + 8 * stage, turn ^ 1);", ""),
    "keys are given back as values": ("barrier_arrive_warp(keys_free + 8 * stage)",
                                      "barrier_arrive_warp(values_free + 8 * stage)"),
    "values are never given back": ("barrier_arrive_warp(values_free + 8 * stage);", ""),
    "phases never change": ("{ stage = 0; turn ^= 1; }", "{ stage = 0; }"),
    "fewer bytes are waited for": ("barrier_expect(values_full + 8 * stage, 16384);",
                                   "barrier_expect(values_full + 8 * stage, 8192);"),
    "lanes copy out of turn": ("if (lane == turns)", "if (lane == count - 1 - turns)"),
    "only one step is looked up": ("+ lane * ", "+ 0 * "),
    "all warps have the same keys": ("(t * 4 + warp) * 16 + lane % 16", "t * 64 + lane % 16"),
    "weights as if they were transposed": ("transposed(pack_floats", "(pack_floats"),
    "pieces of rows lie elsewhere": ("^ row % 8 * 16", "^ row % 4 * 16"),
    "columns beside each other too near": ("column / 64 * rows", "column / 64 * 32"),
    "shares are joined before they are there": ("meet(128);", ""),
    "totals do not fade": (" * quick_exp2(its[0] - top)", ""),
    "sums do not fade": ("u.e[q] * fade", "u.e[q]"),
    "a page for both": ("&map1", "&map0"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_attention, "UNDER_WAY", 0)
    device = EmulatedDevice("sm_90a")
    mistaken(monkeypatch, *MISTAKES[mistake])

    def run() -> None:
        # Whether a race shows is a matter of chance, and each block has its own.
        Decoding(device, [500], (8, 2, 128)).check()
        Decoding(device, [700, 900], (16, 4, 128)).check()

    with pytest.raises(AssertionError):
        run()


MISTAKES_OF_THE_START = {
    "all steps have the same queries": ("at + k * 64", "at"),
    "no weight of the new key": ("(int w = 0; w < 5;", "(int w = 0; w < 4;"),
    "the new value does not fade": ("[r + q] * fade;", "[r + q];"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES_OF_THE_START)
def test_a_mistake_of_the_start_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice("sm_90a")
    mistaken(monkeypatch, *MISTAKES_OF_THE_START[mistake], kernel="decode_attention_split")
    with pytest.raises(AssertionError):
        Decoding(device, [5, 70], (16, 4, 128), norm=True).check(splits=2)


@needs_compiler
def test_totals_of_lanes_that_are_not_put_together_show(
    gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = row_attention.RowConsumer._across_lanes

    def changed(self: Any, kind: str, name: str, count: int) -> None:
        if kind == "max":
            made(self, kind, name, count)

    monkeypatch.setattr(row_attention.RowConsumer, "_across_lanes", changed)
    with pytest.raises(AssertionError):
        Decoding(gpu, [100], (4, 1, 64)).check()


# -- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "threads", "stages"),
    [({}, 160, 3), ({"heads": (64, 8, 128)}, 160, 3), ({"heads": (16, 8, 64)}, 160, 6),
     ({"heads": (32, 2, 128)}, 160, 3), ({"page": 16}, 64, 8), ({"pages": 2}, 160, 2)],
    ids=str,
)  # fmt: skip
def test_compiled(sizes: dict[str, Any], threads: int, stages: int) -> None:
    (kernel,) = compiled(**sizes).kernels
    assert kernel.threads == threads
    assert f"if (++stage == {stages})" in kernel.text
    assert kernel.resources.spill_stores == 0
    # Two blocks a multiprocessor, with 1 KiB each of the system's.
    room = 1 if kernel.shared_bytes > 113 << 10 else 2
    assert room == (1 if sizes.get("pages") == 2 else 2)
    assert kernel.resources.registers * threads <= 32 << 10


def test_machine_code() -> None:
    (kernel,) = compiled().kernels
    (lines,) = sass.disassemble([kernel.cubin], "sm_90a")
    found = Counter(sass.names(lines))
    assert found["HMMA.16816.F32.BF16"] == 8 + 8
    assert found["UTMALDG.4D"] == 4
    assert found["MOVM.16.MT88"] == 2
    assert found["LDSM.16.M88.4"] == 8 + 4
    assert found["LDSM.16.MT88.4"] == 8
    assert not [name for name in found if re.match(r"(LDL|STL|LDGSTS)\b", name)]
    # No barrier of the block in the loop: at the start, where queries are handed on, and twice
    # where shares are joined.
    assert found["BAR.SYNC.DEFER_BLOCKING"] == 1 + 1 + 2

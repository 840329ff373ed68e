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
from tests.tilert.products import mistaken, needs_compiler
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
    ) -> None:
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
        self.dtype, self.heads, self.device = dtype, heads, device
        q = rng.uniform(-1, 1, (len(lengths), hq, dim)) * np.linspace(0, 6, hq + 1)[1:, None]
        host = q.astype(dtype.numpy)
        self.q, self.q64 = tilert.from_numpy(host, device), host.astype(np.float64)
        shape = len(pages), page, hkv, dim
        k, v = (rng.uniform(-1, 1, shape).astype(dtype.numpy) for _ in range(2))
        self.k64, self.v64 = k.astype(np.float64), v.astype(np.float64)
        self.inputs = (
            self.q, tilert.from_numpy(k, device), tilert.from_numpy(v, device),
            tilert.from_numpy(self.table, device),
            ints(device, [r if n else -1 for r, n in zip(order, lengths, strict=True)]),
            ints(device, [n - 1 if n else 70 for n in lengths]),
        )  # fmt: skip

    def want(self) -> np.ndarray:
        want = np.zeros(self.q64.shape)
        for b, n in enumerate(self.lengths):
            if not n:
                continue
            pages = self.table[self.order[b]]
            k, v = (
                np.repeat(x[pages[pages >= 0]].reshape(-1, *x.shape[2:])[:n], self.group, axis=1)
                for x in (self.k64, self.v64)
            )
            scores = np.einsum("hd,lhd->hl", self.q64[b], k) * self.heads[2] ** -0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            want[b] = np.einsum("hl,lhd->hd", weights, v)
        return want

    def check(self, splits: int = 1, pages: int = 1) -> None:
        """Run with outputs full of NaN, in shares or not, and compare."""
        (hq, _, dim), device, size = self.heads, self.device, len(self.lengths)

        def poisoned(*shape: int, dtype: DType = f32) -> tilert.Array:
            return tilert.full(shape, float("nan"), dtype, device)

        out = poisoned(size, hq, dim, dtype=self.dtype)
        consts = {"scale": dim**-0.5, "heads": 1, "pages": pages}
        piece = out.partition(1, self.group, dim)
        if splits == 1:
            kernels.decode_attention(piece, *self.inputs, **consts).run()
        else:
            acc = poisoned(size, splits, hq, dim)
            best, total = poisoned(size, splits, hq), poisoned(size, splits, hq)
            kernels.decode_attention_split(
                acc.partition(1, 1, self.group, dim), best.partition(1, 1, self.group),
                total.partition(1, 1, self.group), *self.inputs, **consts,
            ).run()  # fmt: skip
            kernels.merge_splits(piece, acc, best, total).run()
        got = out.numpy().astype(np.float64)
        np.testing.assert_allclose(got, self.want(), rtol=0, atol=TOLERANCE[self.dtype.name])


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
    device = tilert.device("cuda:0")
    if device.info()["arch"] != "sm_90a":
        pytest.skip("the schedule is one of sm_90a")
    Decoding(device, lengths, heads, dtype, page).check(splits, pages)


# -- what it does not take -----------------------------------------------------------------------


@tilert.kernel
def softmax(o: Mut, q: Ref, k: Ref, v: Ref, wrong: Const[int]):
    """Attention of few rows to all keys, and what is no online softmax."""
    m, _ = o.index
    qs = q[m, :]
    rows = o.shape[0]
    best = full((rows,), float("-inf") if wrong == 8 else -1e30, f32)
    total = full((rows,), 1.0 if wrong == 1 else 0.0, f32)
    acc = full(o.shape, 1.0 if wrong == 2 else 0.0, f32)
    size = 16 if wrong == 9 else 64
    for n in tiles(k, axis=0, size=size):
        x = mma(qs, k[n, :].T, zeros((rows, size), f32))
        if wrong == 3:
            x = x + best[:, None]
        top = maximum(best, max(x, axis=1))
        if wrong == 4:
            top = maximum(top, total)
        taken = best if wrong == 5 else top
        weights = exp2(x - (taken[None, :] if wrong == 9 else taken[:, None]))
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


@pytest.mark.parametrize("wrong", range(10))
def test_what_is_no_online_softmax(wrong: int) -> None:
    rows = 16 if wrong == 9 else 8
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
    q = tilert.empty((16, hq, dim), dtype, device)
    k, v = (tilert.empty((9, page, hkv, dim), dtype, device) for _ in range(2))
    index = [ints(device, np.zeros(shape)) for shape in ((16, 9), 16, 16)]
    kernels.decode_attention_split(
        acc.partition(1, 1, group, dim), best.partition(1, 1, group),
        total.partition(1, 1, group), q, k, v, *index, scale=1.0, heads=kv, pages=pages,
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
    "keys are given back as values": ("barrier_arrive(keys_free + 8 * stage)",
                                      "barrier_arrive(values_free + 8 * stage)"),
    "values are never given back": ("if (lane == 0) barrier_arrive(values_free + 8 * stage);", ""),
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
    assert found["LDSM.16.M88.4"] == found["LDSM.16.MT88.4"] == 8
    assert not [name for name in found if re.match(r"(LDL|STL|LDGSTS)\b", name)]
    # No barrier of the block in the loop: at the start, and twice where shares are joined.
    assert found["BAR.SYNC.DEFER_BLOCKING"] == 3

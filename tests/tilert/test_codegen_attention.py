"""The attention schedule of sm_90a, run on the host and compiled for the GPU: values, mistakes that
show, and that it takes no kernel that it cannot compute."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

import tilert
from models import kernels
from tests.tilert.checks import Frame, data, ints
from tests.tilert.emulator import EmulatedDevice
from tests.tilert.products import hopper, last_text, mistaken, needs_compiler
from tilert import DType, Mut, Ref, bf16, f16, f32, nvrtc, sass
from tilert.codegen import attention, schedules
from tilert.language import exp2, iota, maximum, mma, tiles, where, zeros
from tilert.language import max as largest
from tilert.language import sum as added
from tilert.target_device import TargetDevice

pytestmark = pytest.mark.usefixtures("pipelined")
PAGE = 64
TOLERANCE = {"bf16": 2.0**-6, "f16": 2.0**-9}


def is_taken(device: Any) -> bool:
    return "values_full" in last_text(device)


# -- kernels -------------------------------------------------------------------------------------


@tilert.kernel
def dense(o: Mut, q: Ref, k: Ref, v: Ref):
    """Attention to all keys, which lie in order."""
    m, _ = o.index
    qs = q[m, :]
    rows = o.shape[0]
    best, total = zeros((rows,), f32) - 1e30, zeros((rows,), f32)
    acc = zeros(o.shape, f32)
    for n in tiles(k, axis=0, size=64):
        x = mma(qs, k[n, :].T, zeros((rows, 64), f32))
        top = maximum(best, largest(x, axis=1))
        weights = exp2(x - top[:, None])
        fade = exp2(best - top)
        total = total * fade + added(weights, axis=1)
        acc = mma(weights.to(v.dtype), v[n, :], acc * fade[:, None])
        best = top
    o.store(acc / total[:, None])


@tilert.kernel
def squares(o: Mut, q: Ref, k: Ref, v: Ref):
    """No softmax: nothing scales the sums, and a total is all that is carried besides."""
    m, _ = o.index
    qs = q[m, :]
    total = zeros((o.shape[0],), f32)
    acc = zeros(o.shape, f32)
    for n in tiles(k, axis=0, size=32):
        x = mma(qs, k[n, :].T, zeros((o.shape[0], 32), f32))
        total = total + added(x * x, axis=1)
        acc = mma((x * x).to(v.dtype), v[n, :], acc)
    o.store(acc / total[:, None])


@tilert.kernel
def changing_left(o: Mut, q: Ref, k: Ref, v: Ref):
    """The left operand is another one in each step."""
    acc = zeros(o.shape, f32)
    for n in tiles(k, axis=0, size=64):
        x = mma(q[n, :], k[n, :].T, zeros((64, 64), f32))
        acc = mma(x.to(v.dtype), v[n, :], acc)
    o.store(acc)


@tilert.kernel
def looks_at_sums(o: Mut, q: Ref, k: Ref, v: Ref):
    m, _ = o.index
    qs = q[m, :]
    acc = zeros(o.shape, f32)
    for n in tiles(k, axis=0, size=64):
        x = mma(qs, k[n, :].T, zeros((o.shape[0], 64), f32))
        acc = maximum(mma(x.to(v.dtype), v[n, :], acc), -1e30)
    o.store(acc)


@tilert.kernel
def scales_columns(o: Mut, q: Ref, k: Ref, v: Ref):
    """Columns of the sums are scaled, each by its own factor."""
    m, _ = o.index
    qs = q[m, :]
    acc = zeros(o.shape, f32)
    factor = where(iota(o.shape[1]) % 3 == 0, 0.5, 1.0)
    for n in tiles(k, axis=0, size=64):
        x = mma(qs, k[n, :].T, zeros((o.shape[0], 64), f32))
        acc = mma(x.to(v.dtype), v[n, :], acc * factor[None, :])
    o.store(acc)


# -- values --------------------------------------------------------------------------------------


class Prompt:
    """Chunks (start, count) of sequences in pages that lie in no order, and tokens of none.

    The heads' queries grow, up to where few keys have nearly all the weight.
    """

    def __init__(
        self,
        device: tilert.Device,
        chunks: list[tuple[int, int]],
        heads: tuple[int, int, int],
        dtype: DType = bf16,
        padding: int = 0,
    ) -> None:
        hq, hkv, dim = heads
        rng = np.random.default_rng([len(chunks), *heads])
        widest = max(-(-(start + count) // PAGE) for start, count in chunks)
        pages = rng.permutation(widest * len(chunks) + 1).astype(np.int32)
        self.table = pages[:-1].reshape(len(chunks), widest)
        tokens = sum(count for _, count in chunks)
        self.chunks, self.group, self.dtype, self.dim = chunks, hq // hkv, dtype, dim

        def draw(*shape: int) -> tuple[tilert.Array, np.ndarray]:
            host = rng.uniform(-1, 1, shape).astype(dtype.numpy)
            return tilert.from_numpy(host, device), host.astype(np.float64)

        q = rng.uniform(-1, 1, (tokens + padding, hq, dim)) * np.linspace(0, 6, hq + 1)[1:, None]
        host = q.astype(dtype.numpy)
        self.q, self.q64 = tilert.from_numpy(host, device), host.astype(np.float64)
        self.k, self.k64 = draw(len(pages), PAGE, hkv, dim)
        self.v, self.v64 = draw(len(pages), PAGE, hkv, dim)
        begins = np.cumsum([0, *(count for _, count in chunks)])
        slots = np.repeat(np.arange(len(chunks)), [count for _, count in chunks])
        self.inputs = (
            self.q, self.k, self.v, tilert.from_numpy(self.table, device),
            ints(device, np.arange(len(chunks))), ints(device, [*slots, *[len(chunks)] * padding]),
            ints(device, begins), ints(device, [start for start, _ in chunks]),
        )  # fmt: skip
        self.out = tilert.full(self.q.shape, float("nan"), dtype, device)

    def run(self, rows: int, pages: int = 1) -> np.ndarray:
        kernels.prefill_attention(
            self.out.partition(rows, 1, self.dim), *self.inputs, scale=self.dim**-0.5, pages=pages
        ).sync()
        return self.out.numpy().astype(np.float64)

    def want(self) -> np.ndarray:
        want = np.zeros(self.q64.shape)
        at = 0
        for row, (start, count) in enumerate(self.chunks):
            k, v = (
                np.repeat(x[self.table[row]].reshape(-1, *x.shape[2:]), self.group, axis=1)
                for x in (self.k64, self.v64)
            )
            for place in range(start + 1, start + count + 1):
                scores = np.einsum("hd,lhd->hl", self.q64[at], k[:place]) * self.dim**-0.5
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                want[at] = np.einsum("hl,lhd->hd", weights, v[:place])
                at += 1
        return want

    def check(self, rows: int, pages: int = 1) -> None:
        np.testing.assert_allclose(
            self.run(rows, pages), self.want(), rtol=0, atol=TOLERANCE[self.dtype.name]
        )


def operands(
    device: tilert.Device, rows: int, keys: int, dim: int, width: int
) -> tuple[Frame, list[tilert.Array], list[np.ndarray]]:
    """o, and q, k, v on the device and in float64."""
    made = [data(device, s, bf16, seed=i) for i, s in enumerate([(rows, dim), (keys, dim),
                                                                 (keys, width)])]  # fmt: skip
    return Frame(device, (rows, width), f32), [a for a, _ in made], [x for _, x in made]


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "keys", "dim", "width"), [(128, 200, 64, 128), (70, 129, 128, 64)]
)
def test_attention_to_all_keys(
    gpu: EmulatedDevice, rows: int, keys: int, dim: int, width: int
) -> None:
    """Keys outside of the array are zeros, as they are for the other schedule."""
    o, arrays, (q, k, v) = operands(gpu, rows, keys, dim, width)
    dense(o.piece(64, width), *arrays).sync()
    assert is_taken(gpu)
    k, v = (np.pad(x, ((0, -len(x) % 64), (0, 0))) for x in (k, v))
    scores = q @ k.T
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
    o.check(weights @ v / weights.sum(axis=1, keepdims=True), steps=2**15, scale=2)


@needs_compiler
def test_sums_that_nothing_scales(gpu: EmulatedDevice) -> None:
    o, arrays, (q, k, v) = operands(gpu, 128, 160, 64, 64)
    squares(o.piece(128, 64), *arrays).sync()
    assert is_taken(gpu)
    weights = (q @ k.T) ** 2
    o.check(weights @ v / weights.sum(axis=1, keepdims=True), steps=2**15, scale=2)


@needs_compiler
def test_columns_scaled_each_by_its_own_factor(gpu: EmulatedDevice) -> None:
    o, arrays, (q, k, v) = operands(gpu, 64, 128, 64, 64)
    scales_columns(o.piece(64, 64), *arrays).sync()
    first, second = (q @ k[i : i + 64].T @ v[i : i + 64] for i in (0, 64))
    factor = np.where(np.arange(64) % 3 == 0, 0.5, 1.0)
    size = np.abs(q) @ np.abs(k).T @ np.abs(v)
    o.check(first * factor + second, steps=2**15, scale=size)


# Chunks, (query heads, KV heads, dim), dtype, padding: whole and ragged pieces, one block of keys
# and more than stages, sequences that begin in their past, several in a piece, tokens of none.
PROMPTS = [
    ([(0, 256)], (2, 1, 64), bf16, 0),
    ([(0, 130)], (1, 1, 128), bf16, 0),
    ([(70, 200)], (2, 2, 64), f16, 0),
    ([(600, 129)], (1, 1, 64), bf16, 0),
    ([(0, 1), (65, 100), (3, 60)], (2, 1, 64), bf16, 30),
    ([(0, 40)], (1, 1, 64), bf16, 100),
]


@needs_compiler
@pytest.mark.parametrize(("chunks", "heads", "dtype", "padding"), PROMPTS, ids=str)
@pytest.mark.parametrize(("rows", "pages"), [(64, 1), (128, 1), (128, 2)])
def test_prefill(
    gpu: EmulatedDevice,
    chunks: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: DType,
    padding: int,
    rows: int,
    pages: int,
) -> None:
    prompt = Prompt(gpu, chunks, heads, dtype, padding)
    prompt.check(rows, pages)
    assert is_taken(gpu)


LARGE = [
    ([(0, 1100)], (4, 1, 128), bf16, 0),
    ([(0, 2048)], (8, 2, 128), f16, 0),
    ([(0, 700), (1000, 300), (63, 65), (5, 1)], (8, 4, 128), bf16, 90),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("chunks", "heads", "dtype", "padding"), [*PROMPTS, *LARGE], ids=str)
@pytest.mark.parametrize(("rows", "pages"), [(64, 1), (128, 1), (128, 2)])
def test_prefill_on_a_gpu(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: DType,
    padding: int,
    rows: int,
    pages: int,
) -> None:
    device = hopper()
    Prompt(device, chunks, heads, dtype, padding).check(rows, pages)


# -- what it does not take -----------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [changing_left, looks_at_sums])
def test_kernels_of_another_form_are_compiled_as_before(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for names in ("pipelined", schedules.NONE):
        monkeypatch.setenv(schedules.VARIABLE, names)
        device = TargetDevice("sm_90a")
        o = tilert.empty((128, 64), f32, device)
        q, k, v = (tilert.empty((128, 64), bf16, device) for _ in range(3))
        kernel(o.partition(64, 64), q, k, v)
        texts.append(last_text(device))
    assert "values_full" not in texts[0] and texts[0] == texts[1]


def compiled(heads: int, dim: int, page: int, tile: tuple[int, int], dtype: DType = bf16) -> Any:
    """Prefill of sizes known only at launch."""
    device = TargetDevice("sm_90a")
    o, q = (tilert.empty((512, heads, dim), dtype, device) for _ in range(2))
    k, v = (tilert.empty((9, page, 2, dim), dtype, device) for _ in range(2))
    index = [ints(device, np.zeros(shape)) for shape in ((4, 9), 1, 512, 2, 1)]
    kernels.prefill_attention(
        o.partition(tile[0], 1, dim), q, k, v, *index, scale=1.0, pages=tile[1]
    )
    return device


@pytest.mark.parametrize(
    ("dim", "page", "tile", "dtype"),
    [(32, 64, (128, 1), bf16), (256, 64, (128, 1), bf16), (64, 8, (128, 1), bf16),
     (64, 64, (32, 1), bf16), (64, 64, (256, 1), bf16), (64, 64, (128, 1), f32)],
)  # fmt: skip
def test_sizes_that_do_not_fit_it(dim: int, page: int, tile: tuple[int, int], dtype: DType) -> None:
    assert not is_taken(compiled(4, dim, page, tile, dtype))


# -- mistakes show -------------------------------------------------------------------------------

MISTAKES = {
    "keys are not waited for": ("barrier_wait(keys_full + 8 * stage, turn);", ""),
    "values are not waited for": ("barrier_wait(values_full + 8 * held, held_turn);", ""),
    "values of the step after": ("const u64 values = descriptor_across(ring + held",
                                 "const u64 values = descriptor_across(ring + stage"),
    "keys in use are overwritten": ("barrier_wait(keys_free + 8 * stage, turn ^ 1);", ""),
    "values in use are overwritten": ("barrier_wait(values_free + 8 * stage, turn ^ 1);", ""),
    "keys are given back as values": ("barrier_arrive(keys_free + 8 * stage)",
                                      "barrier_arrive(values_free + 8 * stage)"),
    "phases never change": ("{ stage = 0; turn ^= 1; }", "{ stage = 0; }"),
    "fewer bytes are waited for": ("barrier_expect(values_full + 8 * stage, 16384);",
                                   "barrier_expect(values_full + 8 * stage, 8192);"),
    "scores are read too early": ("wgmma_wait<1>();", ""),
    "sums are read too early": ("wgmma_wait<0>();", ""),
    "a product before its fence": ("wgmma_begin();", ""),
    "scores begin where they were": ("wgmma_left_n64<0, 0>", "wgmma_left_n64<1, 0>"),
    "values as if they were transposed": ("wgmma_left_n128<1, 1>", "wgmma_left_n128<1, 0>"),
    "a step along the keys is skipped": (", keys + 2,", ", keys + 4,"),
    "a step along the values is skipped": (", values + 128,", ", values + 256,"),
    "columns beside each other too near": ("(u64)(block >> 4) << 16", "(u64)(block >> 5) << 16"),
    "sums that fade are kept": ("if (any_lane(", "if (!any_lane("),
    "no turn is passed on": ("pass_turn(1 - group, 256);", ""),
    "a page for both": ("&map1", "&map0"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_STAGES", 2)
    device = EmulatedDevice("sm_90a")
    mistaken(monkeypatch, *MISTAKES[mistake])

    def run() -> None:
        # Whether a race shows is a matter of chance, and each block has its own.
        for heads in (1, 4):
            Prompt(device, [(100, 300)], (heads, 1, 128)).check(128)

    with pytest.raises(AssertionError):
        run()


@needs_compiler
def test_totals_of_lanes_that_are_not_put_together_show(
    gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.Consumer, "_complete", lambda self: None)
    with pytest.raises(AssertionError):
        Prompt(gpu, [(0, 100)], (1, 1, 64)).check(64)


# -- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "tile", "threads", "stages"),
    [(128, (128, 2), 384, 3), (128, (128, 1), 384, 6), (128, (64, 2), 256, 3),
     (64, (128, 2), 384, 6), (64, (64, 1), 256, 6), (192, (128, 1), 384, 4)],
)  # fmt: skip
def test_compiled(dim: int, tile: tuple[int, int], threads: int, stages: int) -> None:
    (kernel,) = compiled(8, dim, PAGE, tile).kernels
    assert kernel.threads == threads
    assert f"if (++stage == {stages})" in kernel.text
    assert kernel.shared_bytes <= 227 * 1024
    assert kernel.resources.spill_stores == 0
    _, log = nvrtc._compile(kernel.text, kernel.entry, "sm_90a", ("--ptxas-options=--verbose",))
    # What the assembler says where wgmma waits for itself, or setmaxnreg is ignored.
    assert "C75" not in log


def test_machine_code() -> None:
    (kernel,) = compiled(8, 128, PAGE, (128, 2)).kernels
    (lines,) = sass.disassemble([kernel.cubin], "sm_90a")
    names = sass.names(lines)
    found = Counter(names)
    # Scores of the first step and of the others; sums of each step but the last, and of that.
    assert found["HGMMA.64x128x16.F32.BF16"] == 2 * 8 + 2 * 8
    assert found["UTMALDG.4D"] == 8
    assert not [name for name in found if re.match(r"(LDL|STL|HMMA)\b", name)]
    # The work between the products is done before the wait for the second one.
    turn = names.index("BAR.ARV", names.index("BAR.SYNC.DEFER_BLOCKING") + 1)
    waits = [i for i in range(turn, len(names)) if names[i] == "WARPGROUP.DEPBAR.LE"]
    assert names[waits[0] : waits[1]].count("MUFU.EX2") >= 64

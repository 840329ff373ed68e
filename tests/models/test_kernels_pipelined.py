"""The projections under the pipelined schedule of sm_90a: values on the host, what the compiler for
the GPU says of them."""

import numpy as np
import pytest

import tilert
from models import kernels
from models.hopper_tiling import HopperTiling
from models.tile_sizes import ProductTiles
from tests.models.kernel_support import close, draw, poisoned
from tests.tilert.emulator import EmulatedDevice, compiler
from tilert import bf16, f16, f32
from tilert.target_device import TargetDevice

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERT_SCHEDULES", "pipelined")


@pytest.fixture
def gpu() -> EmulatedDevice:
    return EmulatedDevice("sm_90a")


def check_pipelined(device: EmulatedDevice) -> None:
    assert "copy_box(at" in list(device.launchers.values())[-1].text


@needs_compiler
def test_linear_residual(gpu: EmulatedDevice) -> None:
    rng = np.random.default_rng(0)
    x, x64 = draw(rng, (137, 264), bf16, gpu)
    w, w64 = draw(rng, (72, 264), bf16, gpu)
    y, y64 = draw(rng, (137, 72), bf16, gpu)
    y = kernels.linear_residual(y.partition(128, 64), x, w, bk=64).sync()
    check_pipelined(gpu)
    close(y, y64 + x64 @ w64.T)


@needs_compiler
def test_linear_shares(gpu: EmulatedDevice) -> None:
    """The steps of a share begin and end where the program says."""
    rng = np.random.default_rng(1)
    x, x64 = draw(rng, (130, 328), bf16, gpu)
    w, w64 = draw(rng, (64, 328), bf16, gpu)
    shares = poisoned((130, 2, 64), f32, gpu)
    shares = kernels.linear_shares(shares.partition(128, 1, 64), x, w, bk=64, count=3).sync()
    check_pipelined(gpu)
    cuts = (slice(0, 192), slice(192, 328))
    close(shares, np.stack([x64[:, c] @ w64[:, c].T for c in cuts], axis=1))


@needs_compiler
def test_gate_up_silu(gpu: EmulatedDevice) -> None:
    rng = np.random.default_rng(2)
    x, x64 = draw(rng, (70, 200), bf16, gpu)
    w, w64 = draw(rng, (2, 72, 200), bf16, gpu, 0.1)
    y = poisoned((70, 72), bf16, gpu)
    y = kernels.gate_up_silu(y.partition(64, 64), x, w, bk=64).sync()
    check_pipelined(gpu)
    gate = x64 @ w64[0].T
    close(y, gate / (1 + np.exp(-gate)) * (x64 @ w64[1].T))


# Tiles of few rows, as a step of several sequences has them.


@needs_compiler
def test_linear_residual_of_few_rows(gpu: EmulatedDevice) -> None:
    rng = np.random.default_rng(3)
    x, x64 = draw(rng, (13, 328), bf16, gpu)
    w, w64 = draw(rng, (100, 328), bf16, gpu)
    y, y64 = draw(rng, (13, 100), bf16, gpu)
    y = kernels.linear_residual(y.partition(16, 48), x, w, bk=128).sync()
    check_pipelined(gpu)
    close(y, y64 + x64 @ w64.T)


@needs_compiler
def test_gate_up_silu_of_few_rows(gpu: EmulatedDevice) -> None:
    rng = np.random.default_rng(4)
    x, x64 = draw(rng, (5, 200), bf16, gpu)
    w, w64 = draw(rng, (2, 104, 200), bf16, gpu, 0.1)
    y = poisoned((5, 104), bf16, gpu)
    y = kernels.gate_up_silu(y.partition(16, 80), x, w, bk=64).sync()
    check_pipelined(gpu)
    gate = x64 @ w64[0].T
    close(y, gate / (1 + np.exp(-gate)) * (x64 @ w64[1].T))


# Outputs and inputs of Qwen3-4B and 32B, columns that give every multiprocessor a tile and depths
# for up to 8 tokens, the same for more, and rows from which on two blocks share a tile of twice as
# many columns, or, of the smallest weights and more than 32 tokens, of a few more.
THIN = [
    (6144, 2560, 47, 256, (48, 128), 99),
    (2560, 4096, 20, 512, (24, 128), 16),
    (2560, 9728, 20, 512, (24, 128), 16),
    (151936, 2560, 72, 256, (232, 64), 99),
    (10240, 5120, 39, 512, (80, 128), 99),
    (5120, 8192, 39, 512, (40, 128), 48),
    (5120, 25600, 39, 512, (40, 128), 48),
]
THIN_GATE_UP = [(9728, 2560, 37, (40, 128)), (25600, 5120, 33, (104, 64))]


def _shared(outputs: int, inputs: int, rows: int) -> tuple[int, int]:
    """Columns and depth of a tile that two blocks share."""
    tiles = 56 if rows > 32 and 2 * outputs * inputs < 30e6 else 66
    return 8 * -(-outputs // (tiles * 8)), 128


@pytest.mark.parametrize(("outputs", "inputs", "columns", "depth", "more", "share"), THIN)
def test_tiles_of_few_tokens(
    outputs: int, inputs: int, columns: int, depth: int, more: tuple[int, int], share: int
) -> None:
    tiling = HopperTiling()
    twice = _shared(outputs, inputs, 16)
    tiles = [
        *(
            (tokens, ProductTiles(rows, columns, depth) if share > 16 else ProductTiles(16, *twice))
            for tokens, rows in ((2, 4), (8, 8))
        ),
        *(
            (
                tokens,
                ProductTiles(rows, *(_shared(outputs, inputs, rows) if rows >= share else more)),
            )
            for tokens, rows in ((9, 16), (17, 32), (33, 48), (64, 64))
        ),
    ]
    for tokens, tile in tiles:
        assert tiling.product(tokens, outputs, inputs) == tile
        assert tiling.fuses_norm(tokens, outputs * inputs, bf16) == (tokens <= 16)
        assert not tiling.fuses_norm(tokens, outputs * inputs, f16) or tokens == 1
        device = TargetDevice("sm_90a")
        y, normed = (tilert.empty((tokens, outputs), bf16, device) for _ in range(2))
        x, w = (tilert.empty((n, inputs), bf16, device) for n in (tokens, outputs))
        kernels.linear_residual(y.partition(tile.rows, tile.columns), x, w, bk=tile.depth)
        shared = tile.rows >= share
        check_few(device, "thin" if tokens <= 8 and not shared else "pipelined")
        assert ("__cluster_dims__(2" in device.kernels[0].text) == shared
        if tokens > 16 or shared:
            continue
        wide, gain = (tilert.empty(s, d, device) for s, d in (((tokens, inputs), f32),
                                                              ((inputs,), bf16)))  # fmt: skip
        out = normed.partition(tile.rows, tile.columns)
        kernels.norm_linear(out, wide, gain, w, eps=1e-6, bk=tile.depth)
        check_few(device, "thin")
    assert tiling.product(1, outputs, inputs).rows == 1


@pytest.mark.parametrize(("outputs", "inputs", "columns", "more"), THIN_GATE_UP)
def test_gate_up_tiles_of_few_tokens(
    outputs: int, inputs: int, columns: int, more: tuple[int, int]
) -> None:
    tiling = HopperTiling()
    for tokens, rows in ((2, 4), (8, 8), (9, 16), (17, 32), (64, 64)):
        tile = ProductTiles(rows, *((columns, 256) if tokens <= 16 else more))
        assert tiling.gate_up(tokens, outputs, inputs) == tile
        device = TargetDevice("sm_90a")
        y, normed = (tilert.empty((tokens, n), bf16, device) for n in (outputs, inputs))
        x = tilert.empty((tokens, inputs), f32, device)
        gain, w = (tilert.empty(s, bf16, device) for s in ((inputs,), (2, outputs, inputs)))
        out = y.partition(rows, tile.columns)
        if tokens <= 16:
            kernels.norm_gate_up_silu(out, x, gain, w, eps=1e-6, bk=256)
            check_few(device, "thin")
        else:
            kernels.gate_up_silu(out, normed, w, bk=tile.depth)
            check_few(device, "pipelined")


@pytest.mark.parametrize("tokens", [33, 64])
@pytest.mark.parametrize("inputs", [4096, 5632, 8960, 12000])
def test_wider_tiles_are_still_enough(tokens: int, inputs: int) -> None:
    """Whatever the number of outputs, as many blocks run as with narrower tiles, or 104."""
    tiling = HopperTiling()
    for outputs in range(1024, inputs, 8):
        if not 20e6 <= 2 * outputs * inputs <= 30e6:
            continue
        chosen, narrow = (
            -(-outputs // tiling.product(count, outputs, inputs).columns) for count in (tokens, 32)
        )
        assert chosen >= min(narrow, 52)


def check_few(device: TargetDevice, schedule: str) -> None:
    """The last kernel copies ahead, and has about all of shared memory under way."""
    kernel = device.kernels[-1]
    assert kernel.schedule == schedule and kernel.early
    assert kernel.threads == 192
    assert kernel.resources.spill_stores == 0
    assert kernel.shared_bytes >= 175 << 10


# Qwen3-4B: hidden 2560, 32 heads of 128, feed-forward 9728.
PROJECTIONS = [
    ("linear", 6144, 2560, (128, 256)),
    ("linear", 151936, 2560, (128, 256)),
    ("linear_residual", 2560, 4096, (128, 256)),
    ("linear_residual", 2560, 9728, (128, 128)),
    ("linear_shares", 2560, 9728, (128, 128)),
    ("gate_up_silu", 9728, 2560, (128, 128)),
]


@pytest.mark.parametrize(("name", "outputs", "inputs", "tile"), PROJECTIONS)
def test_compiled(name: str, outputs: int, inputs: int, tile: tuple[int, int]) -> None:
    device = TargetDevice("sm_90a")
    x = tilert.empty((2048, inputs), bf16, device)
    y = tilert.empty((2048, outputs), bf16, device)
    w = tilert.empty((outputs, inputs), bf16, device)
    match name:
        case "linear_shares":
            shares = tilert.empty((2048, 2, outputs), f32, device)
            count = -(-inputs // 128)
            kernels.linear_shares(shares.partition(tile[0], 1, tile[1]), x, w, bk=64, count=count)
        case "gate_up_silu":
            both = tilert.empty((2, outputs, inputs), bf16, device)
            kernels.gate_up_silu(y.partition(*tile), x, both, bk=64)
        case _:
            getattr(kernels, name)(y.partition(*tile), x, w, bk=64)
    (kernel,) = device.kernels
    assert "copy_box(at" in kernel.text and "wgmma_n" in kernel.text
    assert kernel.resources.spill_stores == 0
    # All that 65536 registers of a multiprocessor give 384 threads: setmaxnreg moves them.
    assert kernel.resources.registers == 168

"""Tiles of the cpu: as large as the operands, but never larger than a tile may be."""

import numpy as np
import pytest

import tilert
from models import kernels, tile_sizes, tiling
from models.cuda_tiling import CudaTiling
from models.presets import PRESETS
from models.tile_sizes import ProductTiles
from tests.models.kernel_support import close, draw, poisoned
from tilert.limits import MAX_TILE


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_every_product_of_every_model_fits(name: str, tokens: int) -> None:
    config = PRESETS[name]
    hidden, wide = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    tiles = tiling.tiling("cpu")
    shapes = [(config.vocab_size, hidden), (hidden, heads), (hidden, wide), (heads, hidden)]
    for outputs, inputs in shapes:
        t = tiles.product(tokens, outputs, inputs)
        assert max(t.rows * t.depth, t.columns * t.depth, t.rows * t.columns) <= MAX_TILE
        assert t.depth == inputs
    t = tiles.gate_up(tokens, wide, hidden)
    assert max(t.rows * t.depth, t.columns * t.depth, t.rows * t.columns) <= MAX_TILE


def test_small_products_are_one_tile() -> None:
    assert tiling.tiling("cpu").product(7, 320, 64) == ProductTiles(7, 320, 64)


def test_a_head_of_many_tiles_gives_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_sizes, "MAX_TILE", 1 << 10)
    device = tilert.device("cpu")
    rng = np.random.default_rng(0)
    x, xs = draw(rng, (30, 64), tilert.f32, device)
    w, ws = draw(rng, (75, 64), tilert.f32, device)
    t = tiling.tiling("cpu").product(30, 75, 64)
    # 75, 38, 19, 10 columns of 64; then 30, 15 rows of 64.
    assert t == ProductTiles(15, 10, 64)
    y = poisoned((30, 75), tilert.f32, device)
    kernels.linear(y.partition(t.rows, t.columns), x, w, bk=t.depth).run()
    close(y, xs @ ws.T)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 9, 16])
def test_as_many_programs_merge_as_there_are_multiprocessors(batch: int) -> None:
    tiles = CudaTiling().decode_attention(batch, 8)
    assert tiles.splits > 1
    assert 64 <= batch * 8 * 128 // tiles.columns <= 132

"""The kernels of the serving path under the checker: no races, nothing unwritten, same ids."""

import re
from typing import Any

import numpy as np
import pytest

import tilert
from models.batch import Features, Slot
from models.presets import PRESETS
from models.prompt import PromptChunk
from models.slot import PADDING
from models.tile_sizes import DecodeTiles
from models.tiling import CpuTiling
from models.transformer import Transformer
from tilert import bf16

ROWS = ((3, 1), (0,), (2, 4))
PROMPTS = (70, 5, 9)


def serve(device: tilert.Device, preset: str) -> tuple[list[list[int]], list[np.ndarray[Any, Any]]]:
    """Ids and logits of three sequences: prefilled two at once and one in two chunks, then decoded
    together in a batch with a padding slot, greedily and at random."""
    model = Transformer.random(PRESETS[preset], device, bf16, max_len=128)
    cache = model.new_cache(5, 4)
    for row, pages in enumerate(ROWS):
        cache.set_pages(row, list(pages))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 300, n).astype(np.int32) for n in PROMPTS]
    ids: list[list[int]] = []
    logits: list[np.ndarray[Any, Any]] = []

    def note(batch: Any) -> None:
        ids.append(batch.ids.numpy()[:3].tolist())
        logits.append(batch.logits.numpy()[:3, : PRESETS[preset].vocab_size].astype(np.float64))

    pair = model.new_batch(cache, 2)
    pair.set([Slot(row=0, token=0, position=0), Slot(row=1, token=0, position=0)])
    model.prefill(cache, pair, [PromptChunk(p, 0) for p in prompts[:2]])
    note(pair)
    single = model.new_batch(cache, 1)
    for start, stop in ((0, 4), (4, 9)):
        single.set([Slot(row=2, token=0, position=start)])
        model.prefill(cache, single, [PromptChunk(prompts[2][start:stop], start)])
    note(single)
    last = [*ids[0], *ids[1]]
    batch = model.new_batch(cache, 4)
    slots = [
        Slot(row=row, token=last[row], position=PROMPTS[row], temperature=0.8 * row, seed=row)
        for row in range(3)
    ]
    batch.set([*slots, PADDING])
    for features in (Features(), Features(), Features(edits=True, logprobs=True)):
        model.decode(cache, batch, features)
        note(batch)
    return ids, logits


def in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have decode attention share out the context, as it does on a GPU."""
    tiles = DecodeTiles(heads=1, pages=1, splits=2)
    monkeypatch.setattr(CpuTiling, "decode_attention", lambda *_: tiles)


@pytest.mark.parametrize("shares", [False, True], ids=["whole", "shares"])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.timeout(300)
def test_serving_is_clean(preset: str, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    want_ids, want = serve(tilert.device("cpu"), preset)
    if shares:
        in_shares(monkeypatch)
    with tilert.checking() as device:
        ids, logits = serve(device, preset)
    assert ids == want_ids
    for got, expected in zip(logits, want, strict=True):
        assert np.abs(got - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("kernel", ["qk_norm_rope_append", "merge_splits"])
def test_a_page_that_two_rows_write_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "merge_splits":
        in_shares(monkeypatch)
    with tilert.checking() as device:
        model = Transformer.random(PRESETS["tiny-qwen3"], device, bf16, max_len=64)
        cache = model.new_cache(2, 2)
        for row in range(2):
            cache.set_pages(row, [row])
        # What no page table gives: one page for both rows.
        cache.table._table.copy_from(np.zeros_like(cache.table._pages))
        batch = model.new_batch(cache, 2)
        batch.set([Slot(row=row, token=5, position=7) for row in range(2)])
        with pytest.raises(tilert.CheckError) as caught:
            model.decode(cache, batch)
    assert re.match(
        r"O7 indexed pieces: programs \(0, \d+, 0\) and \(1, \d+, 0\) of kernel"
        rf" '{kernel}' race for element \[7, 0, 0\] of '\w+'\n"
        r"  program \(0, \d+, 0\) writes it, .*\.py:\d+\n",
        caught.value.args[0],
    )

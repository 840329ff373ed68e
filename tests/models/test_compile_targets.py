"""Every kernel that serving launches compiles for real GPUs, with no GPU here."""

import numpy as np
import pytest

import models.kernels
import tilert
from models.batch import Features, Slot
from models.presets import PRESETS
from models.prompt import PromptChunk
from models.transformer import Transformer
from tilert.target_device import TargetDevice

# Prompt lengths and batch sizes on both sides of every switch in models.tiling.
PROMPTS = (5, 40, 200, 1000, 4096)
BATCHES = (1, 2, 32, 128)


def serve(
    arch: str, preset: str, batches: tuple[int, ...] = BATCHES, prompts: tuple[int, ...] = PROMPTS
) -> TargetDevice:
    """Walk the serving path of a model, compiling what it launches."""
    device = TargetDevice(arch)
    model = Transformer.random(PRESETS[preset], device, tilert.bf16, max_len=4096)
    cache = model.new_cache(64, max(BATCHES))
    cache.set_pages(0, list(range(64)))
    for size in batches:
        model.decode(cache, model.new_batch(cache, size))
    model.decode(cache, model.new_batch(cache, 2), Features(edits=True, logprobs=True))
    batch = model.new_batch(cache, 1)
    batch.set([Slot(row=0, token=0, position=0)])
    for length in prompts:
        model.prefill(cache, batch, [PromptChunk(np.zeros(length, np.int32), 0)])
    model.score(model.new_batch(cache, 16), 0, [1, 2, 3])
    several = model.new_batch(cache, 8)
    several.set([Slot(row=0, token=0, position=0), *[Slot(row=-1, token=0, position=0)] * 7])
    for length in (5, 200):
        model.prefill(cache, several, [PromptChunk(np.zeros(length, np.int32), 0)])
    return device


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.timeout(600)
def test_qwen3_4b(arch: str) -> None:
    device = serve(arch, "qwen3-4b")
    compiled = {kernel.name for kernel in device.kernels}
    assert compiled - {"paged_slots"} == set(models.kernels.__all__)
    # fill_normal makes dummy weights, once; its sines take a slow path for huge arguments.
    served = [k for k in device.kernels if k.name != "fill_normal"]
    spilling = [k.name for k in served if k.resources.spill_stores]
    assert spilling == []
    # Their limits a block.
    assert max(k.shared_bytes for k in device.kernels) <= {"sm_80": 163, "sm_90a": 227}[arch] * 1024


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arch", "length", "products", "chained", "copies"),
    [
        ("sm_80", 40, "mma_step", "mma_step", "copy_async16"),
        ("sm_90a", 200, "wgmma_n", "wgmma_left_n", "copy_box(at"),
    ],
)
def test_expected_instructions(
    arch: str, length: int, products: str, chained: str, copies: str
) -> None:
    # head_dim 64, three query heads a KV head, a hidden size that is no power of two.
    device = serve(arch, "smollm2-135m", (1,), (length,))
    texts: dict[str, str] = {}
    for kernel in device.kernels:
        texts[kernel.name] = texts.get(kernel.name, "") + kernel.text.split('extern "C"')[1]
    assert "load16_stream" in texts["norm_gate_up_silu"]
    for name in ("linear", "gate_up_silu"):
        assert products in texts[name], name
        assert copies in texts[name], name
    assert chained in texts["prefill_attention"] and copies in texts["prefill_attention"]
    assert "mma_step" in texts["decode_attention_split"]
    assert "copy_async16" in texts["decode_attention_split"]

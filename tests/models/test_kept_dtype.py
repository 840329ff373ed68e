"""Keys and values of bf16 models are kept in f16: exact enough, and never infinite."""

import numpy as np
import pytest

from models import kernels
from models.kv_cache import KVCache, kept_dtype
from models.presets import PRESETS
from models.prompt import PromptChunk
from models.scratch import Scratch
from models.slot import Slot
from models.transformer import Transformer
from tests.models.kernel_support import Floats, poisoned, put
from tests.models.test_transformer import (
    CONFIGS,
    MAX_LEN,
    VOCABULARY,
    Rig,
    error,
    reference,
    weights_of,
)
from tilert import Device, DType, UniqueIndex, bf16, f16, f32
from tilert.cpu_device import CpuDevice

HEADS, KEYS, HALF = 4, 2, 16
LARGEST = 65504.0


def appended(device: Device, values: Floats, dtype: DType) -> tuple[Floats, Floats, Floats]:
    """Queries, keys and values in f16 of a projection [T, HEADS + 2 KEYS, 2, HALF] of a dtype,
    neither normed nor, at position 0, rotated."""
    count = len(values)
    ones = put(np.ones((2, HALF), np.float32), device)
    cos, sin = (put(np.full((1, HALF), x, np.float32), device) for x in (1, 0))
    q = poisoned((count, HEADS, 2, HALF), f16, device)
    k = poisoned((count, KEYS, 2, HALF), f16, device)
    v = poisoned((count, KEYS, 2 * HALF), f16, device)
    index = UniqueIndex.checked(np.arange(count, dtype=np.int32), device)
    kernels.qk_norm_rope_append(
        q[:, :, 0].partition(1, HEADS, HALF),
        q[:, :, 1].partition(1, HEADS, HALF),
        k[:, :, 0].partition_at(index, 1, KEYS, HALF),
        k[:, :, 1].partition_at(index, 1, KEYS, HALF),
        v.partition_at(index, 1, KEYS, 2 * HALF),
        put(values.astype(np.float32).astype(dtype.numpy), device),
        ones, ones, cos, sin, put(np.zeros(count, np.int32), device), eps=1e-6, norm=False,
    ).run()  # fmt: skip
    parts = (q, k, v.reshape(count, KEYS, 2, HALF))
    queries, keys, kept = (x.numpy().astype(np.float64) for x in parts)
    return queries, keys, kept


def test_dtypes(device: Device) -> None:
    assert [kept_dtype(dtype) for dtype in (f32, f16, bf16)] == [f32, f16, f16]
    config = PRESETS["tiny-qwen3"]
    model = Transformer.random(config, device, bf16, max_len=128)
    cache: KVCache = model.new_cache(2, 1)
    assert {array.dtype for array in (*cache.pages(0), *cache.slots(1))} == {f16}
    assert Scratch(config, device, bf16, 4).q.dtype is f16
    k, _ = cache.pages(0)
    assert model.page_bytes() == 2 * config.num_layers * k.nbytes // 2


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_what_is_beyond_f16_becomes_its_largest(device: Device, dtype: DType) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, HEADS + 2 * KEYS, 2, HALF)).astype(dtype.numpy)
    values[0, :, :, :4] = [65536, -65536, 3e38, -3e38]
    expected = np.clip(values.astype(np.float64), -LARGEST, LARGEST)
    whole = np.concatenate(appended(device, values, dtype), axis=1)
    np.testing.assert_allclose(whole, expected, rtol=2.0**-11, atol=2.0**-25)
    assert whole[0, :, :, :4].tolist() == [[[LARGEST, -LARGEST] * 2] * 2] * (HEADS + 2 * KEYS)


def test_values_of_bf16_are_kept_as_they_are(device: Device) -> None:
    """f16 holds every bf16 number of up to 65280 and from 2^-14 on, and most below."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((5, HEADS + 2 * KEYS, 2, HALF))
    values = np.where(np.abs(values) < 2.0**-14, 0, values).astype(bf16.numpy)
    values[0, -1, 0, :2] = [65280, -(2.0**-14)]
    np.testing.assert_array_equal(appended(device, values, bf16)[2], values[:, HEADS + KEYS :])


class GpuTiles(CpuDevice):
    """The cpu backend with the tiles and the kernels of a GPU."""

    kind = "cuda"
    arch = "sm_90a"


@pytest.mark.parametrize("kind", [CpuDevice, GpuTiles])
def test_attention_over_saturated_values_is_finite(kind: type[CpuDevice]) -> None:
    """Also where contexts are split, and the new key and value are not in the cache."""
    device = kind()
    config = PRESETS["tiny-qwen3"]
    model = Transformer.random(config, device, bf16, max_len=128)
    for layer in model.parameters.layers:
        # Values far beyond f16; keys and queries are normed.
        rows = config.num_kv_heads * config.head_dim
        layer.qkv[-rows:].copy_from(np.full((rows, config.hidden_size), 1e6, bf16.numpy))
    cache = model.new_cache(2, 1)
    cache.set_pages(0, [0, 1])
    batch = model.new_batch(cache, 1)
    batch.set([Slot(row=0, token=0, position=0)])
    model.prefill(cache, batch, [PromptChunk(np.array([5, 6, 7], np.int32), 0)])
    assert np.isfinite(batch.logits.numpy()).all()
    assert (batch.scratch.splits is None) == (kind is CpuDevice)
    model.decode(cache, batch)
    assert np.isfinite(batch.logits.numpy()).all()
    _, v = cache.pages(0)
    assert np.abs(v.numpy()[0, :4].astype(np.float64)).max() == LARGEST


def test_error_of_a_short_prompt_and_its_reply() -> None:
    """Weights that bf16 holds exactly: only activations are rounded."""
    tokens = np.random.default_rng(10).integers(0, VOCABULARY, 40).astype(np.int32)
    weights = weights_of(CONFIGS["qwen3"])
    for name, array in weights.arrays.items():
        weights.arrays[name] = array.astype(bf16.numpy).astype(np.float32)
    expected = reference(weights, tokens)
    rig = Rig(Transformer.load(weights, GpuTiles(), bf16, max_len=MAX_LEN))
    errors = [error(rig.prefill(tokens[:20]), expected[19])]
    for n in range(20, 40):
        decoded = rig.decode(rig.single, [Slot(1, int(tokens[n]), n)])
        errors.append(error(decoded[0], expected[n]))
    # Keys, values, queries and weights of attention in bf16 would give 6e-3 and 4e-3.
    assert max(errors) < 4e-3
    assert np.mean(errors) < 2e-3

"""Every kernel that serving launches compiles for real GPUs to what the table expects of it, with
no GPU here. `scripts/check_kernels.py` says how the table comes about."""

import pytest

import models.kernels
from scripts.check_kernels import WALKS, Walk, found, problems, read, serve
from tilert.target_device import TargetDevice


@pytest.mark.parametrize("target", WALKS)
@pytest.mark.timeout(600)
def test_qwen3_4b(target: str) -> None:
    device = TargetDevice(target)
    serve(device, "qwen3-4b", WALKS[target])
    assert {kernel.name for kernel in device.kernels} == {*models.kernels.__all__, "paged_slots"}
    rows = [row for row in read() if row.target == target]
    assert problems(rows, found(device)) == []


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
    device = TargetDevice(arch)
    serve(device, "smollm2-135m", Walk(batches=(1,), prompts=(length,), several=()))
    texts: dict[str, str] = {}
    for kernel in device.kernels:
        texts[kernel.name] = texts.get(kernel.name, "") + kernel.text.split('extern "C"')[1]
    assert any(f"load16_{how}(" in texts["norm_gate_up_silu"] for how in ("stream", "early"))
    for name in ("linear", "gate_up_silu"):
        assert products in texts[name], name
        assert copies in texts[name], name
    assert chained in texts["prefill_attention"] and copies in texts["prefill_attention"]
    assert "mma_step" in texts["decode_attention_split"]
    assert copies.split("(")[0] in texts["decode_attention_split"]

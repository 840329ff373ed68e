import pytest

import tilert
from grout.config import CPU_MAX_MODEL_LEN, EngineConfig
from grout.errors import ConfigError, OutOfMemory
from grout.memory import (
    CPU_CACHE_BYTES,
    GPU_RESERVE,
    Budget,
    CachePlan,
    cache_budget,
    check_model,
    context_limit,
    gib,
    plan_cache,
    plan_memory,
    step_bytes,
)
from models.kv_cache import page_bytes
from models.presets import PRESETS
from models.transformer import PAGE_SIZE

TINY, QWEN = PRESETS["tiny-qwen3"], PRESETS["qwen3-0.6b"]


def plan(config: EngineConfig, limit: int, pages: int, kind: str = "cuda") -> CachePlan:
    """A plan for a budget of `pages` pages of 16 tokens and 1 KiB."""
    budget = Budget(pages * 1024, "the rest is in use", "raise gpu_memory_utilization")
    return plan_cache(config, limit, kind=kind, budget=budget, page_bytes=1024, page_size=16)


def test_the_context_is_the_models_unless_told() -> None:
    assert context_limit(EngineConfig(), QWEN, "cuda") == 40960
    assert context_limit(EngineConfig(), QWEN, "cpu") == CPU_MAX_MODEL_LEN
    assert context_limit(EngineConfig(), TINY, "cpu") == 256
    assert context_limit(EngineConfig(max_model_len=8192), QWEN, "cpu") == 8192
    with pytest.raises(ConfigError, match="max_model_len 50000 is past the 40960 tokens"):
        context_limit(EngineConfig(max_model_len=50000), QWEN, "cuda")


def test_pages_are_no_more_than_can_be_used() -> None:
    config = EngineConfig(max_num_seqs=4)
    assert plan(config, 160, 1000) == CachePlan(40, 160)
    assert plan(config, 160, 25) == CachePlan(25, 160)


def test_an_unasked_context_shrinks_to_what_fits() -> None:
    assert plan(EngineConfig(), 160, 7) == CachePlan(7, 112)


def test_an_explicit_context_that_does_not_fit_is_refused_with_what_would() -> None:
    config = EngineConfig(max_model_len=160)
    with pytest.raises(OutOfMemory, match="max_model_len to 112 or less, or raise gpu_") as caught:
        plan(config, 160, 7)
    assert (caught.value.needed, caught.value.available) == (10 * 1024, 7 * 1024)
    assert plan(config, 160, 10) == CachePlan(10, 160)


@pytest.mark.parametrize("budget", [0, -5])
def test_no_memory_at_all_is_refused(budget: int) -> None:
    with pytest.raises(OutOfMemory, match=r"0 bytes are left \(the rest is in use\); use a smal"):
        plan(EngineConfig(), 160, budget)


def test_the_cpu_cache_is_capped_unless_one_request_needs_more() -> None:
    page = 2**20
    budget = Budget(4 * CPU_CACHE_BYTES, "", "")
    config = EngineConfig(max_num_seqs=64)
    kwargs = {"kind": "cpu", "budget": budget, "page_bytes": page, "page_size": 16}
    assert plan_cache(config, 4096, **kwargs).num_pages == CPU_CACHE_BYTES // page  # type: ignore[arg-type]
    long = EngineConfig(max_num_seqs=64, max_model_len=40960)
    assert plan_cache(long, 40960, **kwargs) == CachePlan(2560, 40960)  # type: ignore[arg-type]


def test_all_of_an_explicit_cache_is_used() -> None:
    config = EngineConfig(max_num_seqs=1, kv_cache_memory=40 * 1024)
    assert plan(config, 160, 40) == CachePlan(40, 160)
    assert plan(config, 160, 40, kind="cpu") == CachePlan(40, 160)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1024.0 KiB"),
        (2**20, "1.0 MiB"),
        (2**27, "0.12 GiB"),
    ],
)
def test_sizes_are_never_rounded_to_nothing(count: int, text: str) -> None:
    assert gib(count) == text


def test_budgets() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5)
    assert cache_budget(config, "cuda", 80, 100, 0).bytes == 50 - 20 - GPU_RESERVE
    assert cache_budget(config, "cpu", 1000, 4000, 100).bytes == 400
    gpu = cache_budget(config, "cuda", 60 * 2**30, 80 * 2**30, 2**30)
    assert gpu.bytes == (40 - 20 - 1) * 2**30 - GPU_RESERVE
    assert gpu.account == (
        "gpu_memory_utilization 0.5 of 80.00 GiB is 40.00 GiB, of which 20.00 GiB are in use, "
        "1.00 GiB are set aside for activations and 0.25 GiB for the driver"
    )


def test_an_explicit_cache_must_be_there_to_be_had() -> None:
    config = EngineConfig(kv_cache_memory=3 * 2**30)
    assert cache_budget(config, "cuda", 5 * 2**30, 80 * 2**30, 2**30).bytes == 3 * 2**30
    assert cache_budget(config, "cpu", 5 * 2**30, 80 * 2**30, 2**30).bytes == 3 * 2**30
    left = 2 * 2**30 - GPU_RESERVE
    with pytest.raises(
        OutOfMemory, match=f"3.00 GiB, but of 3.00 GiB free .* {left} bytes or"
    ) as e:
        cache_budget(config, "cuda", 3 * 2**30, 80 * 2**30, 2**30)
    assert (e.value.needed, e.value.available) == (3 * 2**30, left)


def check(config: EngineConfig, free: int, kind: str = "cpu") -> None:
    """Whether Qwen3-0.6B in bfloat16, of 1.11 GiB, fits in `free` bytes of 8 GiB."""
    limit = context_limit(config, QWEN, kind)
    where = {"kind": kind, "where": f"{kind}:0"}
    check_model(config, QWEN, limit, dtype=tilert.bf16, free=free, total=8 * 2**30, **where)  # type: ignore[arg-type]


WEIGHTS = 2 * 596_049_920


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_weights_that_do_not_fit_are_refused_before_loading(kind: str) -> None:
    with pytest.raises(
        OutOfMemory, match=rf"weights need 1\.11 GiB, but {kind}:0 has 0\.50 GiB to give; use a"
    ) as caught:
        check(EngineConfig(), 2**29, kind)
    assert (caught.value.needed, caught.value.available) == (WEIGHTS, 2**29)


def test_what_is_refused_behind_the_weights_is_refused_before_them() -> None:
    """And nothing else: a model that fits to the byte is loaded."""
    config = EngineConfig(max_num_seqs=1, max_model_len=1000)
    step = step_bytes(config, QWEN, "cpu", 2)
    page = page_bytes(QWEN, tilert.bf16, PAGE_SIZE)
    cache = -(-1000 // PAGE_SIZE) * page
    least = WEIGHTS + 2 * (step + cache)
    check(config, least)
    with pytest.raises(OutOfMemory) as caught:
        check(config, least - 2)
    assert str(caught.value).startswith(
        f"the weights take 1.11 GiB of {gib(least - 2)} that cpu:0 has to give, and then a context "
        f"of 1000 tokens needs {gib(cache)} of KV cache, but "
    )
    assert (caught.value.needed, caught.value.available) == (cache, cache - 1)
    with pytest.raises(OutOfMemory):
        plan_memory(
            config, QWEN, 1000, kind="cpu", dtype=tilert.bf16, free=least - 2 - WEIGHTS, total=2**33
        )


def test_an_explicit_cache_is_to_fit_beside_the_weights() -> None:
    config = EngineConfig(kv_cache_memory=2**30)
    check(config, 4 * 2**30)
    with pytest.raises(
        OutOfMemory, match=r"and then kv_cache_memory is 1\.00 GiB, but of 0\.40 GiB"
    ):
        check(config, WEIGHTS + 4 * 2**30 // 10)


def test_on_a_gpu_the_weights_count_as_used() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5)
    check(config, 8 * 2**30, "cuda")
    with pytest.raises(OutOfMemory, match=r"is 4\.00 GiB, of which 4\.11 GiB are in use"):
        check(config, 5 * 2**30, "cuda")


def test_a_step_needs_more_for_longer_chunks_and_more_slots() -> None:
    small = step_bytes(EngineConfig(max_num_seqs=1, prefill_chunk=64), QWEN, "cuda", 2)
    assert small > 2 * 151936 * 4
    longer = step_bytes(EngineConfig(max_num_seqs=1, prefill_chunk=128), QWEN, "cuda", 2)
    wider = step_bytes(EngineConfig(max_num_seqs=8, prefill_chunk=64), QWEN, "cuda", 2)
    assert longer > small
    assert wider > small

"""How much memory there is, and how many KV pages and how long a context fit in it."""

from dataclasses import dataclass

from grout.config import CPU_MAX_MODEL_LEN, EngineConfig
from grout.errors import ConfigError, OutOfMemory
from grout.runner import bucket
from grout.scheduler import PREFILLS_PER_STEP
from grout.scorer import SCORED_TOGETHER
from models.config import ModelConfig
from models.kv_cache import page_bytes
from models.slot import MAX_BIASES
from models.tiling import tiling
from models.transformer import PAGE_SIZE
from models.weights import parameter_count
from tilert import DType

CPU_CACHE_BYTES = 2 * 2**30
"""KV cache on the cpu unless one request at an explicit max_model_len needs more."""

CPU_SHARE = 0.5
"""Share of the free main memory the KV cache may take: the rest is other programs' and the files'
cache, without which mapped weights are read from disk again."""

GPU_RESERVE = 256 * 2**20
"""Bytes left for the driver, compiled kernels, graphs and fragmentation."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """num_pages: KV pages in all. max_model_len: tokens of the longest request they serve."""

    num_pages: int
    max_model_len: int


def context_limit(config: EngineConfig, model: ModelConfig, kind: str) -> int:
    """Longest context to prepare for, in tokens, before memory is considered.

    Raises `ConfigError` for an explicit max_model_len past the model's own limit.
    """
    wanted = config.max_model_len
    if wanted is None:
        return min(model.max_length, CPU_MAX_MODEL_LEN) if kind == "cpu" else model.max_length
    if wanted > model.max_length:
        raise ConfigError(
            f"max_model_len {wanted} is past the {model.max_length} tokens this model was made "
            "for; lower it, or enable YaRN in the model's config.json"
        )
    return wanted


def check_model(
    config: EngineConfig,
    model: ModelConfig,
    limit: int,
    *,
    kind: str,
    dtype: DType,
    free: int,
    total: int,
    where: str,
) -> None:
    """Raise `OutOfMemory` for a model that cannot be served, before its weights take minutes.

    They must fit in the `free` bytes of `total` that `where` has, and leave what `plan_memory` asks
    for. What is refused here would be refused behind them: they leave no more than is counted on.
    """
    weights = parameter_count(model) * dtype.itemsize
    if weights > free:
        raise OutOfMemory(
            f"the weights need {gib(weights)}, but {where} has {gib(free)} to give; use a "
            "smaller model, a narrower dtype, or free some memory",
            needed=weights,
            available=free,
        )
    try:
        plan_memory(config, model, limit, kind=kind, dtype=dtype, free=free - weights, total=total)
    except OutOfMemory as error:
        raise OutOfMemory(
            f"the weights take {gib(weights)} of {gib(free)} that {where} has to give, and then "
            f"{error}",
            needed=error.needed,
            available=error.available,
        ) from None


def step_bytes(config: EngineConfig, model: ModelConfig, kind: str, itemsize: int) -> int:
    """An upper estimate of a step's activations and logits, in bytes.

    Counts the residual stream and its norm (2 hidden), queries, keys, values and their outputs,
    the feed-forward's array, the partial results of split decode attention, float32 logits, and
    what the first request with penalties, a bias or a mask makes the sampler take: edited logits,
    mask and biases of each slot, and a count of each token for each sequence. Memory comes in
    powers of two of tokens and slots; those that score prompts are further ones.
    """
    heads = (3 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    row = 2 * model.hidden_size + heads + model.intermediate_size
    splits = tiling(kind).decode_attention(1, model.num_kv_heads).splits
    partial = splits * model.num_heads * (model.head_dim + 2) * 4
    partial += splits * model.num_kv_heads * model.head_dim * itemsize
    slots = bucket(config.max_num_seqs) + PREFILLS_PER_STEP + SCORED_TOGETHER
    chunk = bucket(config.chunk(kind))
    logits = model.vocab_size * 4
    edits = logits + model.vocab_size // 8 + MAX_BIASES * 8
    return (
        (chunk + slots) * row * itemsize
        + slots * (partial + logits + edits)
        + config.max_num_seqs * logits
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes the KV cache may take. account: where the rest went. remedy: how to have more."""

    bytes: int
    account: str
    remedy: str


def cache_budget(config: EngineConfig, kind: str, free: int, total: int, step: int) -> Budget:
    """What the KV cache may take once the weights are in memory.

    `kv_cache_memory` if that is set. Otherwise, on a GPU, what is left of `gpu_memory_utilization`
    of the whole memory, and on the cpu a share of what is free. `step` bytes are set aside for
    activations. The result's bytes may be negative. Raises `OutOfMemory` if `kv_cache_memory` is
    not there to be had.
    """
    reserve = 0 if kind == "cpu" else GPU_RESERVE
    aside = f"{gib(step)} are set aside for activations"
    if reserve:
        aside += f" and {gib(reserve)} for the driver"
    wanted = config.kv_cache_memory
    if wanted is not None:
        left = free - step - reserve
        if wanted > left:
            raise OutOfMemory(
                f"kv_cache_memory is {gib(wanted)}, but of {gib(free)} free {aside}; "
                f"lower it to {max(0, left)} bytes or less, or free some memory",
                needed=wanted,
                available=max(0, left),
            )
        return Budget(wanted, "as kv_cache_memory says", "raise kv_cache_memory")
    if kind == "cpu":
        return Budget(
            int(free * CPU_SHARE) - step,
            f"{gib(int(free * CPU_SHARE))} are half of the free memory, of which {aside}",
            "free some memory, or set kv_cache_memory",
        )
    used = total - free
    utilization = config.gpu_memory_utilization
    share = int(total * utilization)
    return Budget(
        share - used - step - reserve,
        f"gpu_memory_utilization {utilization:g} of {gib(total)} is {gib(share)}, of which "
        f"{gib(used)} are in use, {aside}",
        "raise gpu_memory_utilization",
    )


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    limit: int,
    *,
    kind: str,
    dtype: DType,
    free: int,
    total: int,
) -> CachePlan:
    """How to use the `free` bytes of `total` that are left beside the weights, of `dtype`.

    Raises `OutOfMemory`; see `cache_budget` and `plan_cache`.
    """
    step = step_bytes(config, model, kind, dtype.itemsize)
    return plan_cache(
        config,
        limit,
        kind=kind,
        budget=cache_budget(config, kind, free, total, step),
        page_bytes=page_bytes(model, dtype, PAGE_SIZE),
        page_size=PAGE_SIZE,
    )


def plan_cache(
    config: EngineConfig,
    limit: int,
    *,
    kind: str,
    budget: Budget,
    page_bytes: int,
    page_size: int,
) -> CachePlan:
    """How many pages to make within a budget, and the context they serve.

    As many pages as `max_num_seqs` requests of the whole context could use, if they fit, and all
    that `kv_cache_memory` holds, if that is set. `limit` is `context_limit`'s; without an explicit
    max_model_len it shrinks to what fits. Raises `OutOfMemory` naming what would fit.
    """
    available = max(0, budget.bytes)
    affordable = available // page_bytes
    needed = -(-limit // page_size)
    asked = config.max_model_len is not None
    if kind == "cpu" and config.kv_cache_memory is None:
        capped = CPU_CACHE_BYTES // page_bytes
        affordable = min(affordable, max(capped, needed) if asked else capped)
    if affordable < 1 or (asked and needed > affordable):
        fits = affordable * page_size
        bytes_needed = (needed if asked else 1) * page_bytes
        advice = f"lower max_model_len to {fits} or less" if fits >= 2 else "use a smaller model"
        raise OutOfMemory(
            f"a context of {limit if asked else page_size} tokens needs {gib(bytes_needed)} of KV "
            f"cache, but {gib(available)} are left ({budget.account}); {advice}, or "
            f"{budget.remedy}",
            needed=bytes_needed,
            available=available,
        )
    length = min(limit, affordable * page_size)
    wanted = config.max_num_seqs * -(-length // page_size)
    return CachePlan(affordable if config.kv_cache_memory else min(affordable, wanted), length)


def gib(count: int) -> str:
    """Bytes for people."""
    if count >= 2**27:
        return f"{count / 2**30:.2f} GiB"
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


__all__ = [
    "Budget",
    "CachePlan",
    "cache_budget",
    "check_model",
    "context_limit",
    "gib",
    "plan_cache",
    "plan_memory",
    "step_bytes",
]

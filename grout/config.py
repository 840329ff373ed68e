"""What an engine is made of: `EngineConfig`."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from grout.errors import ConfigError

LoadFormat = Literal["auto", "dummy"]
DTYPES = ("auto", "float32", "bfloat16", "float16")

CPU_MAX_MODEL_LEN = 4096
"""Default context on the cpu backend, where a long context is slow long before it is full."""

PREFILL_CHUNK = {"cpu": 256, "cuda": 1024}
"""Default tokens a prefill chunk: short enough that running requests keep moving on the cpu, long
enough on a GPU that a chunk is bound by arithmetic rather than by reading the weights."""

STEP_TIMEOUT = {"cpu": 600.0, "cuda": 60.0}
"""Default seconds after which a step counts as hung: far longer than one with kernels to compile
takes, and than a chunk of a large model takes on the cpu."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Raises `ConfigError` naming the field.

    model: a folder, a .gguf file, a Hub id, or None for the default model; with
    load_format="dummy" a preset name or a folder that holds a config.json.
    device: "auto", "cpu", "cuda" or "cuda:N". dtype: "auto" is float32 on the cpu and bfloat16 on
    a GPU. max_model_len: prompt and reply together, in tokens; None is the model's own limit, or
    less where memory or the cpu's default (`CPU_MAX_MODEL_LEN`) says so.
    max_num_seqs: requests decoded together. load_format: "dummy" makes weights up.
    served_model_name: the id requests use; None is the model's own.
    gpu_memory_utilization: share of the GPU's whole memory this engine may fill, in (0, 1].
    prefill_chunk: prompt tokens run between two decode steps; None is `PREFILL_CHUNK` of the
    device. seed: makes dummy weights, and the seeds given to requests without one, the same in
    every run; None draws them afresh. enforce_eager: run steps op by op rather than as graphs.
    prefix_caching: keep the pages of past prompts and replies for requests that begin alike.
    kv_cache_memory: bytes of the KV cache, instead of what gpu_memory_utilization leaves for it.
    max_queue: most requests waiting beyond the `max_num_seqs` that run, or None for any number.
    request_timeout: seconds from its arrival within which a request must be finished, or None.
    step_timeout: seconds after which a step counts as hung, so that nothing more is taken until it
    ends; None is `STEP_TIMEOUT` of the device.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    load_format: LoadFormat = "auto"
    served_model_name: str | None = None
    gpu_memory_utilization: float = 0.9
    prefill_chunk: int | None = None
    seed: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool = True
    kv_cache_memory: int | None = None
    max_queue: int | None = None
    request_timeout: float | None = None
    step_timeout: float | None = None

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":")
        named = self.device in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdecimal())
        _require(named, "device", self.device, "auto, cpu, cuda or cuda:N")
        _require(self.dtype in DTYPES, "dtype", self.dtype, "one of " + ", ".join(DTYPES))
        formats = get_args(LoadFormat)
        _require(self.load_format in formats, "load_format", self.load_format, "auto or dummy")
        _require(
            self.max_model_len is None or (_is_int(self.max_model_len) and self.max_model_len >= 2),
            "max_model_len",
            self.max_model_len,
            "at least 2 tokens (one of prompt, one of reply)",
        )
        _require(
            _is_int(self.max_num_seqs) and 1 <= self.max_num_seqs <= 1024,
            "max_num_seqs",
            self.max_num_seqs,
            "an integer from 1 to 1024",
        )
        _require(
            self.prefill_chunk is None or (_is_int(self.prefill_chunk) and self.prefill_chunk >= 1),
            "prefill_chunk",
            self.prefill_chunk,
            "at least 1 token",
        )
        _require(
            isinstance(self.gpu_memory_utilization, int | float)
            and 0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "a share in (0, 1]",
        )
        _require(self.model != "", "model", self.model, "a folder, a .gguf file or a Hub id")
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer")
        _require(
            self.kv_cache_memory is None
            or (_is_int(self.kv_cache_memory) and self.kv_cache_memory > 0),
            "kv_cache_memory",
            self.kv_cache_memory,
            "a number of bytes above 0",
        )
        _require(
            self.max_queue is None or (_is_int(self.max_queue) and self.max_queue >= 0),
            "max_queue",
            self.max_queue,
            "a number of requests, 0 or more",
        )
        for field in ("request_timeout", "step_timeout"):
            seconds = getattr(self, field)
            _require(
                seconds is None or (isinstance(seconds, int | float) and seconds > 0),
                field,
                seconds,
                "a number of seconds above 0",
            )

    def resolve(self, device_kind: str) -> "EngineConfig":
        """A copy with every "auto" that depends only on the device ("cpu" or "cuda") settled."""
        dtype = {"cpu": "float32", "cuda": "bfloat16"}[device_kind]
        return replace(
            self,
            dtype=dtype if self.dtype == "auto" else self.dtype,
            prefill_chunk=self.chunk(device_kind),
            step_timeout=self.step_timeout or STEP_TIMEOUT[device_kind],
        )

    def chunk(self, device_kind: str) -> int:
        """`prefill_chunk` in tokens, or the device's default."""
        return self.prefill_chunk or PREFILL_CHUNK[device_kind]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(ok: bool, field: str, value: object, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"{field} must be {wanted}, not {value!r}")


__all__ = [
    "CPU_MAX_MODEL_LEN",
    "DTYPES",
    "PREFILL_CHUNK",
    "STEP_TIMEOUT",
    "EngineConfig",
    "LoadFormat",
]

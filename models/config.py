"""Model configuration: one frozen record, read from a Hugging Face config or GGUF metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from models.errors import ConfigError

Architecture = Literal["llama", "qwen3"]
RopeType = Literal["default", "linear", "llama3", "yarn"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
HEAD_DIM_MULTIPLE = 16

_CLASSES: dict[str, Architecture] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_SAMPLING_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Field names and meanings follow transformers `modeling_rope_utils.py`. `theta` is the base of
    the frequencies. `factor` and the fields after it belong to the scaled types and are ignored
    by "default". `freq_divisors` (GGUF `rope_freqs.weight`, head_dim/2 values) divide the inverse
    frequencies after everything else; empty means none.
    """

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    freq_divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape and behaviour of a decoder-only transformer of the llama family.

    `eos_token_ids` is the union of every end-of-sequence id that the checkpoint's files name.
    `default_sampling` holds those of do_sample, temperature, top_k, top_p, min_p that the
    checkpoint recommends (`generation_config.json`); keys it does not set are absent.
    """

    architecture: Architecture
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: Mapping[str, float | int | bool] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raises ConfigError if the sizes contradict each other or the kernels' needs."""
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the {self.num_heads} query heads cannot be shared evenly "
                f"by {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % HEAD_DIM_MULTIPLE:
            raise ConfigError(
                f"head_dim is {self.head_dim}, but only multiples of {HEAD_DIM_MULTIPLE} "
                "are supported"
            )
        if self.rope.freq_divisors and len(self.rope.freq_divisors) != self.head_dim // 2:
            raise ConfigError(
                f"RoPE has {len(self.rope.freq_divisors)} frequency divisors, "
                f"but head_dim {self.head_dim} needs {self.head_dim // 2}"
            )

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens, that the position embedding was made for.

        YaRN extends `original_max_position_embeddings` by `factor`; checkpoints keep the
        unextended number in `max_position_embeddings` (Qwen3 model cards, "Processing Long Texts").
        """
        if self.rope.type != "yarn":
            return self.max_position_embeddings
        extended = int(self.rope.original_max_position_embeddings * self.rope.factor)
        return max(self.max_position_embeddings, extended)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Reads the contents of `config.json` and, if there is one, `generation_config.json`.

        Keys that are absent take the defaults of transformers' LlamaConfig and Qwen3Config.
        Raises ConfigError for a missing or malformed key and for every feature that changes the
        computation and is not supported (named in the message).
        """
        generation = generation_config or {}
        architecture = _architecture(config)
        qwen3 = architecture == "qwen3"
        _refuse_unsupported(config, architecture)
        hidden = _integer(config, "hidden_size")
        heads = _integer(config, "num_attention_heads")
        layers = _integer(config, "num_hidden_layers")
        head_dim = _head_dim(config, hidden, heads, default=128 if qwen3 else None)
        _refuse_sliding_window(config, architecture, layers)
        max_positions = _integer(config, "max_position_embeddings", 32768 if qwen3 else 2048)
        eos = [
            *_token_ids(config, "eos_token_id", "config.json"),
            *_token_ids(generation, "eos_token_id", "generation_config.json"),
        ]
        bos = [
            *_token_ids(config, "bos_token_id", "config.json"),
            *_token_ids(generation, "bos_token_id", "generation_config.json"),
        ]
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_integer(config, "num_key_value_heads", 32 if qwen3 else heads, heads),
            head_dim=head_dim,
            intermediate_size=_integer(config, "intermediate_size"),
            vocab_size=_integer(config, "vocab_size"),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope=_rope(config, max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=qwen3,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=bos[0] if bos else None,
            default_sampling=_sampling(generation),
        )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    names = config.get("architectures") or []
    if names:
        name = str(names[0])
        found = _CLASSES.get(name)
    else:
        name = str(config.get("model_type"))
        found = cast(Architecture, name) if name in _CLASSES.values() else None
    if found is None:
        raise ConfigError(
            f"architecture {name!r} is not supported; supported are {', '.join(sorted(_CLASSES))}"
        )
    return found


def _refuse_unsupported(config: Mapping[str, Any], architecture: Architecture) -> None:
    for key in ("quantization_config", "compression_config"):
        quantised = config.get(key)
        if quantised:
            method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else "?"
            raise ConfigError(
                f"{key} (method {method!r}): quantised checkpoints are not supported; "
                "use the unquantised release or a GGUF file"
            )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ConfigError(f"{key} is set: projections with a bias are not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    if config.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ConfigError(
            f"partial_rotary_factor {config['partial_rotary_factor']} is not supported"
        )


def _refuse_sliding_window(
    config: Mapping[str, Any], architecture: Architecture, layers: int
) -> None:
    window = config.get("sliding_window")
    other = set(config.get("layer_types") or ()) - {"full_attention"}
    if other:
        raise ConfigError(f"layer_types has {sorted(other)}; only 'full_attention' is supported")
    if architecture == "qwen3":
        # Qwen3Config: layers from max_window_layers on slide, if use_sliding_window.
        first = config.get("max_window_layers", 28)
        slides = bool(config.get("use_sliding_window")) and first < layers
        slides = slides and not config.get("layer_types")
    else:
        slides = bool(config.get("use_sliding_window", True))
    if slides and window is not None:
        raise ConfigError(f"sliding_window {window} is in use; only full attention is supported")


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int, default: int | None) -> int:
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim")
    if default is not None and "head_dim" not in config:
        return default
    if hidden % heads:
        raise ConfigError(
            f"there is no head_dim, and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden // heads


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling`."""
    theta = _number(config, "rope_theta", 10000.0)
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    original = config.get("original_max_position_embeddings") or max_positions
    parsed = [_rope_type(values, theta, original, max_positions) for values in (new, old) if values]
    if len(parsed) == 2 and parsed[0] != parsed[1]:
        raise ConfigError("rope_parameters and rope_scaling are both given and contradict")
    return parsed[0] if parsed else RopeConfig(theta=theta)


def _rope_type(values: object, theta: float, original: int, max_positions: int) -> RopeConfig:
    if not isinstance(values, Mapping):
        raise ConfigError(f"RoPE parameters must be an object, not {values!r}")
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ConfigError("RoPE parameters that differ between layers are not supported")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"RoPE type {kind!r} is not supported; supported: {list(ROPE_TYPES)}")
    if values.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in values:
        raise ConfigError("partial and multimodal RoPE (mrope_section) are not supported")
    theta = _number(values, "rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=_factor(values))
    original = _integer(values, "original_max_position_embeddings", original, original)
    if kind == "llama3":
        low, high = _number(values, "low_freq_factor"), _number(values, "high_freq_factor")
        if low >= high:
            raise ConfigError(f"RoPE low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=_factor(values),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if values.get("factor") is None:
        values = {**values, "factor": max_positions / original}
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=_factor(values),
        original_max_position_embeddings=original,
        # transformers: `rope_parameters.get("beta_fast") or 32`, the same for beta_slow.
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_optional_number(values, "attention_factor"),
        mscale=_optional_number(values, "mscale"),
        mscale_all_dim=_optional_number(values, "mscale_all_dim"),
    )


def _factor(values: Mapping[str, Any]) -> float:
    factor = _number(values, "factor")
    if factor < 1.0:
        raise ConfigError(f"RoPE factor must be at least 1, not {factor}")
    return factor


def _sampling(generation: Mapping[str, Any]) -> dict[str, float | int | bool]:
    chosen: dict[str, float | int | bool] = {}
    for key in _SAMPLING_KEYS:
        value = generation.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float):
            raise ConfigError(f"generation_config.json: {key} must be a number, not {value!r}")
        chosen[key] = value
    return chosen


def _token_ids(config: Mapping[str, Any], key: str, file: str) -> list[int]:
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, Sequence) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"{file}: {key} must be a token id or a list of them, not {value!r}")
    return list(ids)


def _integer(
    config: Mapping[str, Any], key: str, default: int | None = None, if_null: int | None = None
) -> int:
    value = config.get(key, default)
    if value is None:
        value = if_null
    if value is None:
        raise ConfigError(f"{key} is missing")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{key} must be an integer, not {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{key} is missing")
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{key} must be a positive number, not {value!r}")
    return float(value)


def _optional_number(config: Mapping[str, Any], key: str) -> float | None:
    return None if not config.get(key) else _number(config, key)

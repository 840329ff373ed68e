"""Model configuration: one frozen record, read from a Hugging Face config or GGUF metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from models.errors import ConfigError
from models.fields import (
    LARGEST,
    Values,
    flag,
    integer,
    naming,
    number,
    optional_number,
    text,
    texts,
    token_ids,
)
from models.files import shown

Architecture = Literal["llama", "qwen3"]
RopeType = Literal["default", "linear", "llama3", "yarn"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
HEAD_DIM_MULTIPLE = 16
# Far beyond any model, and few enough to list the tensors of.
MAX_LAYERS = 10_000

_CLASSES: dict[str, Architecture] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
# Beyond any use, and far from what float32 cannot represent.
_MAX_FACTOR = 1e6
_MAX_ATTENTION_FACTOR = 1000.0
_MIN_BETA, _MAX_BETA = 1e-6, 1e6
_MAX_TEMPERATURE = 100.0


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

    def __post_init__(self) -> None:
        """Raises ConfigError for values from which no finite frequencies follow."""
        if not 1.0 < self.theta < float("inf"):
            raise ConfigError(f"RoPE's base (theta) must be finite and above 1, not {self.theta}")
        if not 1.0 <= self.factor <= _MAX_FACTOR:
            raise ConfigError(
                f"RoPE factor must be at least 1 and at most {_MAX_FACTOR:g}, not {self.factor}"
            )
        if not all(0.0 < divisor < float("inf") for divisor in self.freq_divisors):
            raise ConfigError("RoPE frequency divisors must be finite and above 0")
        if self.type not in ("llama3", "yarn"):
            return
        original = self.original_max_position_embeddings
        if original < 1:
            raise ConfigError(
                f"RoPE type {self.type} needs an original_max_position_embeddings above 0, "
                f"not {original}"
            )
        if self.type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"RoPE low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.type == "yarn" and not (_MIN_BETA <= self.beta_slow <= self.beta_fast <= _MAX_BETA):
            raise ConfigError(
                f"RoPE beta_fast {self.beta_fast} must not be below beta_slow {self.beta_slow}, "
                f"and both must be from {_MIN_BETA:g} to {_MAX_BETA:g}"
            )
        if original * self.factor > LARGEST:
            raise ConfigError(
                f"RoPE factor {self.factor} extends {original} positions beyond {LARGEST}"
            )


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
        cls,
        config: Values,
        generation_config: Values | None = None,
        *,
        where: str = "config.json",
        generation_where: str = "generation_config.json",
    ) -> "ModelConfig":
        """Reads the contents of `config.json` and, if there is one, `generation_config.json`.

        Keys that are absent take the defaults of transformers' LlamaConfig and Qwen3Config.
        Raises ConfigError, naming the file by its `where`, for a missing or malformed key and for
        every feature that changes the computation and is not supported (named in the message).
        """
        generation = generation_config or {}
        with naming(generation_where):
            sampling = _sampling(generation)
            extra_eos = token_ids(generation, "eos_token_id")
            extra_bos = token_ids(generation, "bos_token_id")
        with naming(where):
            return _model(
                config,
                eos=[*token_ids(config, "eos_token_id"), *extra_eos],
                bos=[*token_ids(config, "bos_token_id"), *extra_bos],
                sampling=sampling,
            )


def _model(
    config: Values, eos: list[int], bos: list[int], sampling: Mapping[str, float | int | bool]
) -> ModelConfig:
    architecture = _architecture(config)
    qwen3 = architecture == "qwen3"
    _refuse_unsupported(config)
    hidden = integer(config, "hidden_size")
    heads = integer(config, "num_attention_heads")
    layers = integer(config, "num_hidden_layers", most=MAX_LAYERS)
    _refuse_sliding_window(config, architecture, layers)
    max_positions = integer(config, "max_position_embeddings", 32768 if qwen3 else 2048)
    # Qwen3Config's default is 32, but null there means as many as query heads, as for llama.
    kv_heads = 32 if qwen3 and "num_key_value_heads" not in config else heads
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer(config, "num_key_value_heads", kv_heads),
        head_dim=_head_dim(config, hidden, heads, default=128 if qwen3 else None),
        intermediate_size=integer(config, "intermediate_size"),
        vocab_size=integer(config, "vocab_size"),
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6, above=0.0, most=1.0),
        rope=_rope(config, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        qk_norm=qwen3,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        default_sampling=sampling,
    )


def _architecture(config: Values) -> Architecture:
    names = texts(config, "architectures")
    if names:
        name = names[0]
        found = _CLASSES.get(name)
    else:
        name = text(config, "model_type")
        found = cast(Architecture, name) if name in _CLASSES.values() else None
    if found is None:
        raise ConfigError(
            f"architecture {shown(name)} is not supported; "
            f"supported are {', '.join(sorted(_CLASSES))}"
        )
    return found


def _refuse_unsupported(config: Values) -> None:
    for key in ("quantization_config", "compression_config"):
        quantised = config.get(key)
        if quantised:
            method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else "?"
            raise ConfigError(
                f"{key} (method {shown(method)}): quantised checkpoints are not supported; "
                "use the unquantised release or a GGUF file"
            )
    for key in ("attention_bias", "mlp_bias"):
        if flag(config, key):
            raise ConfigError(f"{key} is set: projections with a bias are not supported")
    activation = text(config, "hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {shown(activation)} is not supported; only 'silu' is")
    if (part := number(config, "partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"partial_rotary_factor {part} is not supported")


def _refuse_sliding_window(config: Values, architecture: Architecture, layers: int) -> None:
    kinds = texts(config, "layer_types")
    if other := sorted(set(kinds) - {"full_attention"}):
        raise ConfigError(f"layer_types has {shown(other)}; only 'full_attention' is supported")
    if architecture == "qwen3":
        # Qwen3Config: layers from max_window_layers on slide, if use_sliding_window.
        first = integer(config, "max_window_layers", 28, least=0)
        slides = flag(config, "use_sliding_window") and first < layers and not kinds
    else:
        slides = flag(config, "use_sliding_window", True)
    if config.get("sliding_window") is None:
        return
    window = integer(config, "sliding_window", least=0)
    if slides:
        raise ConfigError(f"sliding_window {window} is in use; only full attention is supported")


def _head_dim(config: Values, hidden: int, heads: int, default: int | None) -> int:
    if config.get("head_dim") is not None:
        return integer(config, "head_dim")
    if default is not None and "head_dim" not in config:
        return default
    if hidden % heads:
        raise ConfigError(
            f"there is no head_dim, and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden // heads


def _rope(config: Values, max_positions: int) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling`."""
    theta = number(config, "rope_theta", 10000.0, above=1.0)
    parsed = []
    for section in ("rope_parameters", "rope_scaling"):
        values = config.get(section)
        if values is None or values == {}:
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section} must be an object, not {shown(values)}")
        with naming(section):
            # transformers 5 moves the number from the configuration into the parameters.
            key = "original_max_position_embeddings"
            outer = {key: config[key]} if config.get(key) is not None else {}
            parsed.append(_rope_type({**values, **outer}, theta, max_positions))
    if len(parsed) == 2 and parsed[0] != parsed[1]:
        raise ConfigError("rope_parameters and rope_scaling are both given and contradict")
    return parsed[0] if parsed else RopeConfig(theta=theta)


def _rope_type(values: Values, theta: float, max_positions: int) -> RopeConfig:
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ConfigError("RoPE parameters that differ between layers are not supported")
    named = "type" if values.get("rope_type") is None else "rope_type"
    kind = text(values, named, "default")
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"RoPE type {shown(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if number(values, "partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in values:
        raise ConfigError("partial and multimodal RoPE (mrope_section) are not supported")
    theta = number(values, "rope_theta", theta, above=1.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=_factor(values))
    original = integer(values, "original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=_factor(values),
            original_max_position_embeddings=original,
            low_freq_factor=number(values, "low_freq_factor", above=0.0),
            high_freq_factor=number(values, "high_freq_factor", above=0.0),
        )
    # transformers: a factor that is null is the ratio of the two lengths.
    extended = values.get("original_max_position_embeddings") is not None
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=_factor(values, max_positions / original if extended else None),
        original_max_position_embeddings=original,
        # transformers: `rope_parameters.get("beta_fast") or 32`, the same for beta_slow.
        beta_fast=number(values, "beta_fast", 32.0) or 32.0,
        beta_slow=number(values, "beta_slow", 1.0) or 1.0,
        truncate=flag(values, "truncate", True),
        attention_factor=optional_number(values, "attention_factor", most=_MAX_ATTENTION_FACTOR),
        # transformers: `if mscale and mscale_all_dim`, so 0 is none.
        mscale=number(values, "mscale", 0.0, most=_MAX_ATTENTION_FACTOR) or None,
        mscale_all_dim=number(values, "mscale_all_dim", 0.0, most=_MAX_ATTENTION_FACTOR) or None,
    )


def _factor(values: Values, default: float | None = None) -> float:
    return number(values, "factor", default, least=1.0, most=_MAX_FACTOR)


def _sampling(generation: Values) -> dict[str, float | int | bool]:
    """The recommended settings, each within the range that a request's must be in."""
    chosen: dict[str, float | int | bool] = {}

    def given(key: str) -> bool:
        return generation.get(key) is not None

    if given("do_sample"):
        chosen["do_sample"] = flag(generation, "do_sample")
    if given("temperature"):
        chosen["temperature"] = number(generation, "temperature", most=_MAX_TEMPERATURE)
    if given("top_k"):
        chosen["top_k"] = max(integer(generation, "top_k", least=-1), 0)  # -1 is off, as 0 is
    if given("top_p"):
        chosen["top_p"] = number(generation, "top_p", above=0.0, most=1.0)
    if given("min_p"):
        chosen["min_p"] = number(generation, "min_p", most=1.0)
    return chosen

"""Checkpoints in one GGUF file: weights, metadata, tokenizer and chat template together."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import QuantError, dequantize
from numpy.typing import NDArray

from models.chat_template import ChatTemplate
from models.config import MAX_LAYERS, Architecture, ModelConfig, RopeConfig
from models.errors import ConfigError, LoadError
from models.fields import integer, integers, naming, number, text, texts, token_ids
from models.files import reason, shown
from models.gguf_file import GGUFFile, GGUFTensor
from models.gguf_tokenizer import control_token, gguf_tokenizer
from models.stored import Held, Stored
from models.tokenizer import Tokenizer
from models.weights import check_layer_count, check_tensors, check_vocabulary

ROPE_DIVISORS = "rope_freqs.weight"

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen3": "qwen3"}
_LAYER_NAMES = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# What GGUF may hold as a list with one value a layer.
_PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
# The names by which llama.cpp (llama-vocab.cpp, special_eog_ids) recognises end-of-generation
# tokens: GGUF metadata has room for one EOS id only, and models of these families have two.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


class GGUFCheckpoint:
    """A .gguf file of architecture llama or qwen3; see `models.weights.Checkpoint`.

    Raises LoadError on opening, naming the file and tensor: truncated, another architecture, a
    tensor missing, unexpected, of the wrong shape or of a type that cannot be dequantised.
    Quantised tensors come out of `tensors` as float32.
    """

    def __init__(self, path: Path, model_id: str | None = None) -> None:
        self.id = model_id or path.stem
        self._file = GGUFFile(path)
        self.config = config_from_gguf(self._file)
        self._names = _check(self._file, self.config)

    @property
    def nbytes(self) -> int:
        return sum(self._file.tensors[stored].nbytes for stored in self._names)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """See `Checkpoint`."""
        for stored, name in self._names.items():
            tensor = self._file.tensors[stored]
            make = functools.partial(tensor.numpy, self._row_order(name))
            yield name, Held(tensor.shape, tensor.dtype, make)

    def tokenizer(self) -> Tokenizer:
        where = str(self._file.path)
        tokenizer = gguf_tokenizer(self._file.metadata, where)
        check_vocabulary(self.config, tokenizer, where, "token_embd.weight")
        return tokenizer

    def chat_template(self) -> ChatTemplate | None:
        metadata, where = self._file.metadata, str(self._file.path)
        templates = {}
        with naming(where):
            if "tokenizer.chat_template" in metadata:
                templates["default"] = text(metadata, "tokenizer.chat_template")
            for name in texts(metadata, "tokenizer.chat_templates"):
                templates[name] = text(metadata, f"tokenizer.chat_template.{name}")
            special = {
                f"{name}_token": token
                for name in ("bos", "eos")
                if (token := control_token(metadata, name)) is not None
            }
        return ChatTemplate(templates, special, where) if templates else None

    def _row_order(self, name: str) -> NDArray[np.intp] | None:
        kind = name.rpartition(".")[2]
        if self.config.architecture != "llama" or kind not in ("q", "k"):
            return None
        heads = self.config.num_heads if kind == "q" else self.config.num_kv_heads
        return rotate_half_order(heads, self.config.head_dim)


def rotate_half_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Row numbers that turn interleaved q/k rows into rotate-half ones: intp [heads * head_dim].

    llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute) stores element j of a head's first and
    second half at rows 2j and 2j + 1 of that head; this is the inverse.
    """
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Reads a ModelConfig from metadata; raises ConfigError naming the file and the key."""
    with naming(file.path):
        return _model(file)


def _model(file: GGUFFile) -> ModelConfig:
    metadata = file.metadata
    stored = text(metadata, "general.architecture")
    architecture = _ARCHITECTURES.get(stored)
    if architecture is None:
        raise ConfigError(
            f"architecture {shown(stored)} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    for name in _PER_LAYER:
        if isinstance(metadata.get(key(name)), list):
            raise ConfigError(f"{key(name)} differs between layers; not supported")
    hidden = integer(metadata, key("embedding_length"))
    heads = integer(metadata, key("attention.head_count"))
    head_dim = integer(metadata, key("attention.key_length"), max(hidden // heads, 1))
    for name, needed in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
    ):
        if (value := integer(metadata, key(name), needed, least=0)) not in (needed, 0):
            raise ConfigError(f"{key(name)} is {value}; only {needed} is supported")
    context = integer(metadata, key("context_length"))
    embedding = file.tensors.get("token_embd.weight")
    tokens = len(texts(metadata, "tokenizer.ggml.tokens")) or None
    rows = embedding.shape[0] if embedding and embedding.shape else None
    bos = token_ids(metadata, "tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=integer(metadata, key("block_count"), most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=integer(metadata, key("attention.head_count_kv"), heads),
        head_dim=head_dim,
        intermediate_size=integer(metadata, key("feed_forward_length")),
        vocab_size=rows or integer(metadata, key("vocab_size"), tokens),
        rms_norm_eps=_decimal(
            number(metadata, key("attention.layer_norm_rms_epsilon"), above=0.0, most=1.0)
        ),
        rope=_rope(file, architecture, context),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        qk_norm=architecture == "qwen3",
        eos_token_ids=_eos(metadata),
        bos_token_id=bos[0] if bos else None,
    )


def _rope(file: GGUFFile, architecture: Architecture, context: int) -> RopeConfig:
    metadata, prefix = file.metadata, f"{architecture}.rope."
    # 0 stands for no scaling, as the absent key does.
    factor = number(metadata, prefix + "scaling.factor", 0.0)
    factor = factor or number(metadata, prefix + "scale_linear", 0.0) or 1.0
    # llama.cpp (llama-model.cpp, load_hparams): a factor without a type scales linearly.
    kind = text(metadata, prefix + "scaling.type", "linear" if factor != 1.0 else "none")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"RoPE scaling type {shown(kind)} is not supported")
    theta = number(metadata, prefix + "freq_base", 10000.0, above=1.0)
    divisors = _divisors(file)
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta, freq_divisors=divisors)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=factor, freq_divisors=divisors)
    extra = number(metadata, prefix + "scaling.attn_factor", 1.0, above=0.0, most=1000.0)
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=integer(
            metadata, prefix + "scaling.original_context_length", context
        ),
        beta_fast=number(metadata, prefix + "scaling.yarn_beta_fast", 32.0, above=0.0),
        beta_slow=number(metadata, prefix + "scaling.yarn_beta_slow", 1.0, above=0.0),
        # ggml (ops.cpp, rope_yarn) multiplies the metadata's factor onto YaRN's own.
        attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
        freq_divisors=divisors,
    )


def _divisors(file: GGUFFile) -> tuple[float, ...]:
    stored = file.tensors.get(ROPE_DIVISORS)
    if stored is None:
        return ()
    _check_type(stored, str(file.path))
    return tuple(stored.numpy().reshape(-1).astype(float).tolist())


def _eos(metadata: dict[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [token for key in keys for token in token_ids(metadata, f"tokenizer.ggml.{key}")]
    tokens = texts(metadata, "tokenizer.ggml.tokens")
    typed = zip(tokens, integers(metadata, "tokenizer.ggml.token_type"), strict=False)
    control = {token: number for number, (token, kind) in enumerate(typed) if kind == 3}
    ids += [control[token] for token in _END_TOKENS if token in control]
    return tuple(dict.fromkeys(ids))


def _decimal(stored: float) -> float:
    """The decimal that was meant: 1e-5 is stored in float32 and reads back as 9.99999975e-06."""
    return float(str(np.float32(stored)))


def _check(file: GGUFFile, config: ModelConfig) -> dict[str, str]:
    """Maps the file's tensor names to canonical ones, in the file's order."""
    check_layer_count(config, len(file.tensors), str(file.path))
    own = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    for layer in range(config.num_layers):
        for name, stored in _LAYER_NAMES.items():
            own[f"layers.{layer}.{name}"] = f"blk.{layer}.{stored}.weight"
    canonical = {stored: name for name, stored in own.items()}
    present = [tensor for name, tensor in file.tensors.items() if name != ROPE_DIVISORS]
    found = {canonical[t.name]: t.shape for t in present if t.name in canonical}
    unknown = [t.name for t in present if t.name not in canonical]
    check_tensors(config, found, unknown, own, str(file.path))
    for tensor in present:
        _check_type(tensor, str(file.path))
    return {t.name: canonical[t.name] for t in present}


def _check_type(tensor: GGUFTensor, where: str) -> None:
    native = (GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F32)
    if tensor.type in native:
        return
    try:
        dequantize(tensor.rows[:1], tensor.type)
    except (NotImplementedError, QuantError) as error:
        raise LoadError(
            f"{where}: tensor {tensor.name} has type {tensor.type.name}, "
            f"which cannot be dequantised ({reason(error)})"
        ) from None

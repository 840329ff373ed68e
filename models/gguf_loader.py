"""Checkpoints in one GGUF file: weights, metadata, tokenizer and chat template together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import QuantError, dequantize
from numpy.typing import NDArray

from models.chat_template import ChatTemplate
from models.config import Architecture, ModelConfig, RopeConfig
from models.errors import ConfigError, LoadError
from models.gguf_file import GGUFFile, GGUFTensor
from models.gguf_tokenizer import control_token, gguf_tokenizer
from models.tokenizer import Tokenizer
from models.weights import check_tensors

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
        try:
            self.config = config_from_gguf(self._file)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        self._names = _check(self._file, self.config)

    @property
    def nbytes(self) -> int:
        return sum(self._file.tensors[stored].nbytes for stored in self._names)

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for stored, name in self._names.items():
            yield name, self._file.tensors[stored].numpy(self._row_order(name))

    def tokenizer(self) -> Tokenizer:
        return gguf_tokenizer(self._file.metadata, str(self._file.path))

    def chat_template(self) -> ChatTemplate | None:
        metadata, where = self._file.metadata, str(self._file.path)
        templates = {}
        if "tokenizer.chat_template" in metadata:
            templates["default"] = metadata["tokenizer.chat_template"]
        for name in metadata.get("tokenizer.chat_templates", []):
            templates[name] = metadata[f"tokenizer.chat_template.{name}"]
        special = {
            f"{name}_token": text
            for name in ("bos", "eos")
            if (text := control_token(metadata, name)) is not None
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
    """Reads a ModelConfig from metadata; raises ConfigError naming the key."""
    metadata = file.metadata
    stored = metadata.get("general.architecture")
    architecture = _ARCHITECTURES.get(str(stored))
    if architecture is None:
        raise ConfigError(
            f"architecture {stored!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"metadata {architecture}.{key} is missing")
        if isinstance(value, list):
            raise ConfigError(f"{architecture}.{key} differs between layers; not supported")
        return value

    hidden, heads = int(read("embedding_length")), int(read("attention.head_count"))
    head_dim = int(read("attention.key_length", hidden // heads))
    for key, needed in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
    ):
        if (value := int(read(key, needed))) not in (needed, 0):
            raise ConfigError(f"{architecture}.{key} is {value}; only {needed} is supported")
    context = int(read("context_length"))
    embedding = file.tensors.get("token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    vocab = embedding.shape[0] if embedding else int(read("vocab_size", len(tokens)))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=int(read("block_count")),
        num_heads=heads,
        num_kv_heads=int(read("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(read("feed_forward_length")),
        vocab_size=vocab,
        rms_norm_eps=_decimal(read("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, read, context),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        qk_norm=architecture == "qwen3",
        eos_token_ids=_eos(metadata),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _rope(file: GGUFFile, read: Any, context: int) -> RopeConfig:
    divisors = file.tensors.get(ROPE_DIVISORS)
    factor = float(read("rope.scaling.factor", 0.0)) or float(read("rope.scale_linear", 0.0)) or 1.0
    # llama.cpp (llama-model.cpp, load_hparams): a factor without a type scales linearly.
    kind = str(read("rope.scaling.type", "linear" if factor != 1.0 else "none"))
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"RoPE scaling type {kind!r} is not supported")
    theta = float(read("rope.freq_base", 10000.0))
    values = () if divisors is None else tuple(divisors.numpy().reshape(-1).astype(float).tolist())
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta, freq_divisors=values)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=factor, freq_divisors=values)
    extra = float(read("rope.scaling.attn_factor", 1.0))
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=int(read("rope.scaling.original_context_length", context)),
        beta_fast=float(read("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(read("rope.scaling.yarn_beta_slow", 1.0)),
        # ggml (ops.cpp, rope_yarn) multiplies the metadata's factor onto YaRN's own.
        attention_factor=None if extra == 1.0 else extra * (0.1 * float(np.log(factor)) + 1.0),
        freq_divisors=values,
    )


def _eos(metadata: dict[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    control = {
        text: number for number, text in enumerate(tokens) if types[number : number + 1] == [3]
    }
    ids += [control.get(text) for text in _END_TOKENS]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _decimal(stored: float) -> float:
    """The decimal that was meant: 1e-5 is stored in float32 and reads back as 9.99999975e-06."""
    return float(str(np.float32(stored)))


def _check(file: GGUFFile, config: ModelConfig) -> dict[str, str]:
    """Maps the file's tensor names to canonical ones, in the file's order."""
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
            f"which cannot be dequantised ({error})"
        ) from None

"""Builders of tiny checkpoints. Names and layouts are written out here, apart from the loaders'."""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

Tensors = dict[str, NDArray[Any]]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen3_config(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": 288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "max_window_layers": 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": 261,
        "eos_token_id": 263,
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}


def llama_config(**changes: Any) -> dict[str, Any]:
    base = qwen3_config(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        head_dim=...,
        hidden_size=64,
        sliding_window=...,
        use_sliding_window=...,
        max_window_layers=...,
        tie_word_embeddings=True,
    )
    return {key: value for key, value in (base | changes).items() if value is not ...}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (heads * dim, hidden),
            prefix + "self_attn.k_proj.weight": (kv_heads * dim, hidden),
            prefix + "self_attn.v_proj.weight": (kv_heads * dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * dim),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (dim,)
    return shapes


def hf_tensors(config: dict[str, Any], dtype: Any = ml_dtypes.bfloat16) -> Tensors:
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in hf_shapes(config).items()
    }


CANONICAL = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
    "model.layers.1.input_layernorm.weight": "layers.1.input_norm",
    "model.layers.1.post_attention_layernorm.weight": "layers.1.post_norm",
    "model.layers.1.self_attn.q_proj.weight": "layers.1.q",
    "model.layers.1.self_attn.k_proj.weight": "layers.1.k",
    "model.layers.1.self_attn.v_proj.weight": "layers.1.v",
    "model.layers.1.self_attn.o_proj.weight": "layers.1.o",
    "model.layers.1.self_attn.q_norm.weight": "layers.1.q_norm",
    "model.layers.1.self_attn.k_norm.weight": "layers.1.k_norm",
    "model.layers.1.mlp.gate_proj.weight": "layers.1.gate",
    "model.layers.1.mlp.up_proj.weight": "layers.1.up",
    "model.layers.1.mlp.down_proj.weight": "layers.1.down",
}


def canonical(tensors: Tensors) -> Tensors:
    names = {}
    for name, new in CANONICAL.items():
        names[name] = new
        names[name.replace("layers.1.", "layers.0.")] = new.replace("layers.1.", "layers.0.")
    return {names[name]: array for name, array in tensors.items()}


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """256 byte tokens, then merges of "Ġhello" step by step: 261 entries."""
    vocab = {char: number for number, char in enumerate(byte_alphabet())}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    return vocab, merges


def backend() -> tokenizers.Tokenizer:
    vocab, merges = vocabulary()
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("é!", special=False)])
    return tokenizer


def write_index(folder: Path, parts: list[Tensors]) -> None:
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


GGUF_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def gguf_name(name: str) -> str:
    prefix, _, last = name.rpartition(".")
    return f"{prefix.replace('layers', 'blk')}{'.' if prefix else ''}{GGUF_NAMES[last]}.weight"


def interleave(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rotate-half rows to interleaved ones, row by row: the loader must undo this."""
    half = rows.shape[0] // heads // 2
    out = np.empty_like(rows)
    for head in range(heads):
        for j in range(half):
            out[head * 2 * half + 2 * j] = rows[head * 2 * half + j]
            out[head * 2 * half + 2 * j + 1] = rows[head * 2 * half + half + j]
    return out


def gguf_vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    vocab, merges = vocabulary()
    tokens, types = list(vocab), [1] * len(vocab)
    tokens += [*SPECIALS, "<think>"]
    types += [3, 3, 3, 4]
    while len(tokens) < size:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(5)
    return tokens, types, [" ".join(pair) for pair in merges]


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    tokens, types, merges = gguf_vocabulary(config["vocab_size"])
    arch = config["model_type"]
    metadata = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 261,
        "tokenizer.ggml.eos_token_id": 263,
        "tokenizer.chat_template": TEMPLATE,
    }
    if config.get("head_dim"):
        metadata[f"{arch}.attention.key_length"] = config["head_dim"]
        metadata[f"{arch}.attention.value_length"] = config["head_dim"]
    return metadata


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)

"""A real model with weights by hand, whose replies are scripts, token by token.

A script is named by a marker, a token such as `<|alphabet|>` anywhere in the prompt. Each token of
a script leads to the next: the residual stream is one-hot in the last token, and the head reads the
successor off it. Tokens that several scripts share (the markup, and the newline a prompt ends in)
look back with the one attention head, which adds the marker; of several in a prompt, the one
defined last counts. Without a marker the reply is empty. The tokenizer has no merges: prompts are
bytes, and a reply is cut into tokens as its script is.
"""

import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from models.tokenizer import BYTE_OF

CONTEXT = 2048
HEAD, INNER = 128, 64
END, OTHER_END = "<|im_end|>", "<|endoftext|>"
CONTROL = (OTHER_END, "<|im_start|>", END)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# Bytes in falling order: of tokens as likely as each other, those first that are no characters.
BYTES = [bytes([255 - n]) for n in range(256)]
NEWLINE = BYTES.index(b"\n")
LOOP = "loop"
"""In place of an end: the script begins again."""

Script = Sequence[str | bytes]
"""Tokens, bytes or the name of markup; at the end the token that ends the reply, or `LOOP`."""

# Prints whatever content is, so that None would show.
TEMPLATE = r"""
{%- for tool in tools or [] %}{{ '# ' + tool | tojson + '\n' }}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' }}{{ message.role }}{{ '\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- elif begins_thinking is defined %}
{{- '<think>\n' }}
{%- endif %}
{%- endif %}
"""


def marker(name: str) -> str:
    return f"<|{name}|>"


class Cutter:
    """Cuts texts into tokens, inside characters too, so that no token occurs twice in all."""

    def __init__(self) -> None:
        self._taken = {BYTES[NEWLINE]}

    def take(self, *pieces: str | bytes) -> list[bytes]:
        """The pieces as tokens."""
        tokens = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        for token in tokens:
            if token in self._taken:
                raise ValueError(f"{token!r} is used already")
            self._taken.add(token)
        return tokens

    def cut(self, text: str, size: int = 2) -> list[bytes]:
        """Tokens of `size` bytes, or more where those are taken."""
        raw = text.encode()
        tokens: list[bytes] = []
        while raw:
            stop = size
            while raw[:stop] in self._taken and stop < len(raw):
                stop += 1
            piece, raw = raw[:stop], raw[stop:]
            while piece in self._taken:
                last = tokens.pop()
                self._taken.discard(last)
                piece = last + piece
            tokens += self.take(piece)
        return tokens


def write_model(folder: Path, scripts: Mapping[str, Script]) -> None:
    """Write the folder of a model that replies with `scripts`."""
    pieces = (p for script in scripts.values() for p in script if isinstance(p, bytes))
    texts = [*BYTES, *(piece for piece in dict.fromkeys(pieces) if len(piece) > 1)]
    backend = _tokenizer(texts, [*MARKUP, *map(marker, scripts)])

    def token(piece: str | bytes) -> int:
        found = texts.index(piece) if isinstance(piece, bytes) else backend.token_to_id(piece)
        assert found is not None, piece
        return int(found)

    chains: dict[int, list[int]] = {}
    for name, (*script, end) in scripts.items():
        ids = [token(piece) for piece in script]
        chains[token(marker(name))] = [*ids, ids[0] if end == LOOP else token(end)]
    size = -(-backend.get_vocab_size() // 64) * 64
    shared = {NEWLINE, *map(token, MARKUP)}
    save_file(_weights(size, chains, shared, token(END)), folder / "model.safetensors")
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "intermediate_size": INNER,
        "vocab_size": size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "eos_token_id": token(END),
    }
    # Greedy unless asked: what comes is as certain as that at any temperature, and cheaper.
    generation = {"eos_token_id": [token(END), token(OTHER_END)], "do_sample": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _tokenizer(texts: Sequence[bytes], added: Iterable[str]) -> tokenizers.Tokenizer:
    alphabet = {byte: char for char, byte in BYTE_OF.items()}
    vocab = {"".join(alphabet[byte] for byte in text): n for n, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(CONTROL))
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return backend


def _weights(
    size: int, chains: Mapping[int, Sequence[int]], shared: Collection[int], end: int
) -> dict[str, NDArray[np.float32]]:
    """size: of the vocabulary and of the residual stream. chains: what comes after each marker.

    end: comes after what nothing else comes after.
    """

    def zeros(*shape: int) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32)

    head, out = zeros(size, size), zeros(size, HEAD)
    query, key, value = zeros(HEAD, size), zeros(HEAD, size), zeros(HEAD, size)
    head[end] = 0.25
    unit = size**-0.5  # the norm makes a one-hot row `size**0.5` high
    still = HEAD // 2 - 1  # RoPE turns this dimension by a millionth of a position
    for token in shared:
        query[still, token] = HEAD**0.5 * unit
    for number, (marker, (first, *rest)) in enumerate(chains.items()):
        key[still, marker] = 20 * (number + 1) * unit
        value[number, marker] = unit
        out[marker, number] = 1
        head[first, marker] = 1.5
        head[first, NEWLINE] = 1
        for before, after in itertools.pairwise([first, *rest]):
            head[after, before] = 1
            if before in shared:
                head[after, marker] = max(head[after, marker], 1)
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": np.eye(size, dtype=np.float32),
        "model.norm.weight": np.ones(size, np.float32),
        "lm_head.weight": 2 * head,
        layer + "input_layernorm.weight": np.ones(size, np.float32),
        layer + "post_attention_layernorm.weight": np.ones(size, np.float32),
        layer + "self_attn.q_proj.weight": query,
        layer + "self_attn.k_proj.weight": key,
        layer + "self_attn.v_proj.weight": value,
        layer + "self_attn.o_proj.weight": out,
        layer + "mlp.gate_proj.weight": zeros(INNER, size),
        layer + "mlp.up_proj.weight": zeros(INNER, size),
        layer + "mlp.down_proj.weight": zeros(size, INNER),
    }

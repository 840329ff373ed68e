"""Builds a byte-level BPE tokenizer from the vocabulary inside a GGUF file."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from models.errors import TokenizerError
from models.fields import flag, integers, texts, token_ids
from models.files import reason, shown
from models.tokenizer import Tokenizer, refusing_panics

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # gguf.TokenType

# The splitting expressions of the models' own tokenizer.json files; llama.cpp keeps the same list
# by the value of tokenizer.ggml.pre (llama-vocab.cpp, llm_tokenizer_bpe).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_LLAMA3 = (_WORDS % "{1,3}",)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": (_WORDS % "",),
    "smollm": (r"\p{N}", _GPT2),
}


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Builds the tokenizer that GGUF `metadata` describes; `where` names the file in errors.

    Supported is `tokenizer.ggml.model` "gpt2" (byte-level BPE) with a known
    `tokenizer.ggml.pre`; anything else raises TokenizerError with the value.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(
            f"{where}: tokenizer model {shown(kind)} is not supported; "
            "only 'gpt2' (byte-level BPE) is"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise TokenizerError(
            f"{where}: pre-tokenizer {shown(pre)} (tokenizer.ggml.pre) is not known; "
            f"known are {', '.join(_SPLITS)}"
        )
    try:
        with refusing_panics(where):
            backend = _backend(metadata, pre)
        bos = token_ids(metadata, "tokenizer.ggml.bos_token_id")
        eos = [token for key in _EOS_KEYS for token in token_ids(metadata, key)]
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise TokenizerError(f"{where}: the vocabulary is unusable: {reason(error)}") from None
    return Tokenizer(backend, where=where, bos_token_id=bos[0] if bos else None, eos_token_ids=eos)


def control_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of `tokenizer.ggml.{name}_token_id`, or None. Raises ConfigError."""
    number = token_ids(metadata, f"tokenizer.ggml.{name}_token_id")
    tokens = texts(metadata, "tokenizer.ggml.tokens")
    return tokens[number[0]] if number and number[0] < len(tokens) else None


_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def _backend(metadata: Mapping[str, Any], pre: str) -> tokenizers.Tokenizer:
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if key not in metadata:
            raise ValueError(f"{key} is missing")
    tokens = texts(metadata, "tokenizer.ggml.tokens")
    types = integers(metadata, "tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [_pair(merge) for merge in texts(metadata, "tokenizer.ggml.merges")]
    if len(types) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, but {len(types)} token types")
    vocab = {
        text: number
        for number, (text, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ != _UNUSED
    }
    # Llama 3 takes a whole word that is a token, even if no merges lead to it.
    llama3 = _SPLITS[pre] is _LLAMA3
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(text, special=type_ != _USER_DEFINED, normalized=False)
        for text, type_ in zip(tokens, types, strict=True)
        if type_ in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
    _add_ends(backend, metadata, default_bos=llama3)
    return backend


def _add_ends(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], *, default_bos: bool
) -> None:
    wanted = {
        "bos": flag(metadata, "tokenizer.ggml.add_bos_token", default_bos),
        "eos": flag(metadata, "tokenizer.ggml.add_eos_token"),
    }
    ends: dict[str, str] = {}
    for name, add in wanted.items():
        if not add:
            continue
        token = control_token(metadata, name)
        if token is None:
            raise ValueError(f"add_{name}_token is set, but there is no {name}_token_id")
        ends[name] = token
    if ends:
        parts = [ends.get("bos"), "$A", ends.get("eos")]
        backend.post_processor = TemplateProcessing(
            single=[part for part in parts if part],
            special_tokens=[
                (token, token_ids(metadata, f"tokenizer.ggml.{name}_token_id")[0])
                for name, token in ends.items()
            ],
        )


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ValueError(f"merge {merge!r} is not two tokens")
    return left, right

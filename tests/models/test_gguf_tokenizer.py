from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import Tokenizer, TokenizerError
from models.gguf_tokenizer import gguf_tokenizer
from tests.models.builders import byte_alphabet, gguf_metadata, llama_config

KNOWN = ["default", "gpt-2", "llama-bpe", "llama-v3", "llama3", "qwen2", "smollm"]


def build(**changes: Any) -> Tokenizer:
    metadata = gguf_metadata(llama_config())
    for key, value in changes.items():
        name = f"tokenizer.ggml.{key}"
        if value is None:
            del metadata[name]
        else:
            metadata[name] = value
    return gguf_tokenizer(metadata, "some.gguf")


def words(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]


def paired(pre: str) -> Tokenizer:
    """Merges every pair of digits, and every pair of letter a, so that splits become visible."""
    alphabet = byte_alphabet()
    pairs = [(a, b) for a in "0123456789" for b in "0123456789"] + [("a", "a"), ("'", "S")]
    pairs += [("12", "3"), ("Ġ", "a"), ("a", "Ġ"), ("1", "a"), (".", ".")]
    tokens = [*alphabet, *("".join(pair) for pair in pairs)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.add_bos_token": False,
    }
    return gguf_tokenizer(metadata, "some.gguf")


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "1234", [b"1", b"2", b"3", b"4"]),
        ("qwen2", "1234", [b"1", b"2", b"3", b"4"]),
        ("llama-bpe", "1234", [b"123", b"4"]),
        ("gpt-2", "12345", [b"12", b"34", b"5"]),
        ("default", "12345", [b"123", b"45"]),
        ("qwen2", "a'S", [b"a", b"'S"]),  # contractions in any case
        ("smollm", "a'S", [b"a", b"'", b"S"]),
        ("gpt-2", "a a", [b"a", b" a"]),
        ("gpt-2", "1a", [b"1", b"a"]),
        ("default", "..a", [b"..", b"a"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(
    pre: str, text: str, expected: list[bytes]
) -> None:
    assert words(paired(pre), text) == expected


@pytest.mark.parametrize("pre", KNOWN)
@given(text=st.text())
def test_round_trip(pre: str, text: str) -> None:
    tokenizer = ROUND_TRIP[pre]
    raw = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text))
    if pre == "qwen2":  # normalises to NFC, as Qwen's tokenizer.json does
        again = tokenizer.encode(raw.decode())
        assert tokenizer.decode(again, skip_special_tokens=False) == raw.decode()
    else:
        assert raw == text.encode()


ROUND_TRIP = {pre: build(pre=pre, add_bos_token=False) for pre in KNOWN}


def test_merges_apply() -> None:
    assert words(build(), "hello hello") == [b"hello", b" hello"]


def test_token_types() -> None:
    tokenizer = build()
    assert tokenizer.special_ids == {261, 262, 263}
    assert tokenizer.token_to_id("<|im_start|>") == 262
    assert tokenizer.encode("<|im_start|>a<think>") == [262, tokenizer.token_to_id("a"), 264]
    assert tokenizer.decode([262, 264]) == "<think>"
    assert tokenizer.decode([262, 264], skip_special_tokens=False) == "<|im_start|><think>"
    assert tokenizer.token_bytes(280) == b""  # unused padding
    assert tokenizer.eos_token_ids == (263,)
    assert tokenizer.bos_token_id == 261


def test_beginning_of_sequence() -> None:
    plain = build()
    assert plain.encode("a", add_special_tokens=True) == plain.encode("a")
    adds = build(add_bos_token=True)
    assert adds.encode("a") == plain.encode("a")
    assert adds.encode("a", add_special_tokens=True) == [261, *plain.encode("a")]
    ends = build(add_bos_token=True, add_eos_token=True)
    assert ends.encode("a", add_special_tokens=True) == [261, *plain.encode("a"), 263]
    llama3 = build(pre="llama-bpe")
    assert llama3.encode("a", add_special_tokens=True)[0] == 261


def test_missing_pre_means_default() -> None:
    assert words(build(pre=None), "hello") == [b"hello"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"some\.gguf: tokenizer model 'llama' is not supported"),
        ({"model": "bert"}, "'bert'"),
        ({"model": None}, "None"),
        ({"pre": "tekken"}, r"pre-tokenizer 'tekken' \(tokenizer\.ggml\.pre\) is not known"),
        ({"merges": None}, "unusable"),
        ({"merges": ["ab"]}, "merge 'ab' is not two tokens"),
        ({"merges": ["a zzz"]}, "unusable"),
        ({"token_type": [1]}, "288 tokens, but 1 token types"),
        ({"bos_token_id": None, "add_bos_token": True}, "no bos_token_id"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build(**changes)

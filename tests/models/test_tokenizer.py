import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import BPE

from models import LoadError, Tokenizer, TokenizerError
from models.tokenizer import BYTE_OF
from tests.models.builders import backend

TINY = Tokenizer(backend(), eos_token_ids=[263])
BYTES = Tokenizer.byte_level(["<|im_start|>", "<|im_end|>"])


@given(st.text())
def test_text_round_trip(text: str) -> None:
    assert TINY.decode(TINY.encode(text), skip_special_tokens=False) == text
    assert BYTES.decode(BYTES.encode(text), skip_special_tokens=False) == text


@given(st.text())
def test_token_bytes_join_to_the_text(text: str) -> None:
    assert b"".join(TINY.token_bytes(token) for token in TINY.encode(text)) == text.encode()


@given(st.binary())
def test_raw_bytes_decode_with_replacement(raw: bytes) -> None:
    assert BYTES.decode(list(raw)) == raw.decode("utf-8", errors="replace")


@given(st.lists(st.integers(0, 262)))
def test_decode_agrees_with_the_tokenizers_package(ids: list[int]) -> None:
    assert TINY.decode(ids, skip_special_tokens=False) == backend_decode(ids, False)
    assert TINY.decode(ids) == backend_decode(ids, True)


def backend_decode(ids: list[int], skip: bool) -> str:
    return str(BACKEND.decode(ids, skip_special_tokens=skip))


BACKEND = backend()


def test_byte_alphabet_is_a_bijection() -> None:
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert BYTE_OF["Ġ"] == 0x20 and BYTE_OF["Ċ"] == 0x0A and BYTE_OF["A"] == 0x41
    assert BYTE_OF["Ń"] == 0xAD and BYTE_OF["ÿ"] == 0xFF


def test_token_bytes_of_half_a_character() -> None:
    first, *rest = TINY.encode("🙂")
    assert TINY.token_bytes(first) == b"\xf0"
    assert TINY.decode([first]) == "\ufffd"
    assert TINY.decode([first, *rest]) == "🙂"


def test_added_tokens_are_their_text() -> None:
    # "é!" is spelled with characters of the byte alphabet, but stands for itself.
    token = TINY.token_to_id("é!")
    assert token is not None
    assert TINY.token_bytes(token) == "é!".encode()
    assert TINY.decode([token]) == "é!"


def test_special_tokens() -> None:
    assert TINY.special_ids == {261, 262, 263}
    assert TINY.eos_token_ids == (263,)
    ids = TINY.encode("<|im_start|>hello<think><|im_end|>")
    assert ids[0] == 262 and ids[-1] == 263
    assert TINY.decode(ids) == "hello<think>"
    assert TINY.token_bytes(263) == b"<|im_end|>"
    assert TINY.token_to_id("<nothing>") is None


def test_ids_beyond_the_vocabulary_are_empty() -> None:
    assert TINY.vocab_size == 266
    assert TINY.token_bytes(266) == TINY.token_bytes(10**6) == b""
    assert TINY.decode([*TINY.encode("hello"), 266, 287]) == "hello"


def test_byte_level() -> None:
    assert BYTES.encode("Aé") == [0x41, 0xC3, 0xA9]
    assert BYTES.encode("<|im_end|>") == [257]
    assert BYTES.eos_token_ids == (257,)
    assert BYTES.vocab_size == 258
    assert Tokenizer.byte_level().eos_token_ids == ()


def test_made_up_ids_have_text() -> None:
    made_up = Tokenizer.byte_level(["<|im_start|>", "<|im_end|>"], 1000)
    assert made_up.vocab_size == 1000
    assert made_up.eos_token_ids == (257,)
    assert made_up.decode([72, 105, 258, 999]) == "Hi 258 999"
    assert (made_up.token_bytes(999), made_up.token_bytes(1000)) == (b" 999", b"")
    assert made_up.encode("Hi 258<|im_end|>") == [*b"Hi 258", 257]


def write(folder: Path, config: dict[str, object]) -> Path:
    backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_from_folder(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>"}
    tokenizer = Tokenizer.from_folder(write(tmp_path, {**config, "add_bos_token": True}))
    assert tokenizer.eos_token_ids == (263,)
    assert tokenizer.bos_token_id == 261
    plain = tokenizer.encode("hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == [261, *plain]
    begun = tokenizer.encode("<|endoftext|>hello", add_special_tokens=True)
    assert begun == [261, *plain]


def test_no_bos_unless_asked_for(tmp_path: Path) -> None:
    config = {"bos_token": "<|endoftext|>", "add_bos_token": False}
    tokenizer = Tokenizer.from_folder(write(tmp_path, config))
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a")


def test_from_folder_without_config(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == () and tokenizer.bos_token_id is None


def test_stored_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    stored = backend()
    stored.enable_truncation(2)
    stored.enable_padding(length=50)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("abcdef")) == 6


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]"])
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.WordPiece()])
def test_other_kinds_are_refused(decoder: object) -> None:
    other = tokenizers.Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        other.decoder = decoder
    with pytest.raises(TokenizerError, match=r"here: only byte-level BPE"):
        Tokenizer(other, where="here")


def test_threads_share_one_tokenizer() -> None:
    texts = [f"hello {number} 你好 🙂 <|im_end|>" for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda t: TINY.decode(TINY.encode(t), skip_special_tokens=False), texts)
        )
    assert results == texts

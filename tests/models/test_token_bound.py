import sys
import threading
import time
import tracemalloc
import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from models import Tokenizer
from models.token_bound import _STABLE, parts
from tests.models.builders import backend

MARKS = st.text(alphabet="eaкが가 \n\u0301\u0323\u3099\u11a8\u212b\u0958é🙂你")


def changed(kind: str) -> tokenizers.Tokenizer:
    made = backend()
    if kind == "nfc":
        made.normalizer = normalizers.NFC()
    elif kind == "nfc-twice":
        made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.NFC()])
    elif kind == "strip":
        made.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    elif kind == "strip-nfc":
        made.normalizer = normalizers.NFC()
        made.add_tokens([AddedToken("<क़>", lstrip=True, normalized=True)])
    elif kind == "lowercase":
        made.normalizer = normalizers.Lowercase()
    elif kind == "nothing":
        made.normalizer = normalizers.Replace(Regex(".*"), "")
    elif kind == "removing":
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(" ", "removed"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return made


KINDS = ["plain", "nfc", "nfc-twice", "strip", "strip-nfc", "lowercase", "nothing", "removing"]
TOKENIZERS = {kind: Tokenizer(changed(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text() | MARKS | st.text(alphabet=" helo<mask>क़"))
def test_never_above_the_number_of_tokens(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert 0 <= tokenizer.min_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("plain", "", 0),
        ("plain", "x", 1),
        ("plain", "QVZ" * 1000, 3000),
        ("plain", "hl" * 6, 2),  # " hello", of 6 bytes, is the longest token with these letters
        ("plain", "<|im_start|>" * 100, 97),  # <|endoftext|> has 13 bytes
        ("plain", "你好", 6),
        ("nfc", "QVZ" * 1000, 3000),
        ("nfc", "你好", 6),
        ("nfc", "e\u0301" * 1000, 0),
        ("nfc", "QVe\u0301", 2),
        ("nfc-twice", "QVZ", 3),
        ("strip", "QVZ" + " " * 1000, 3),
        ("strip", "<mask>" + " " * 1000, 1),
        ("lowercase", "QVZ", 0),
        ("nothing", "QVZ", 0),
        ("removing", "QVZ", 0),
    ],
)
def test_how_tight_it_is(kind: str, text: str, expected: int) -> None:
    assert TOKENIZERS[kind].min_tokens(text) == expected


def test_bytes_without_a_token_weigh_nothing() -> None:
    alphabet = {char: number for number, char in enumerate("abĠ")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(made)
    assert tokenizer.encode("ab xx") == [0, 1, 2]
    assert tokenizer.min_tokens("ab xx") == 3


def test_a_long_text_takes_little_memory() -> None:
    """A server looks at long texts in several threads at once."""
    text = "QVZ" * 400_000
    tracemalloc.start()
    try:
        assert TOKENIZERS["plain"].min_tokens(text) == len(text)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(text)
    finally:
        tracemalloc.stop()


def test_stable_ranges() -> None:
    """None is changed by NFC, reordered, or joined to what stands before it."""
    joined = set()
    for number in range(sys.maxunicode + 1):
        if (decomposed := unicodedata.normalize("NFD", chr(number))) != chr(number):
            joined |= set(decomposed[1:])
    assert "\u0301" in joined and "\u11a8" in joined
    for first, last in _STABLE:
        for char in map(chr, range(first, last + 1)):
            assert unicodedata.category(char) != "Cn", hex(ord(char))
            assert unicodedata.normalize("NFC", char) == char and not unicodedata.combining(char)
            assert char not in joined


def test_parts_of_nested_sequences() -> None:
    nested = normalizers.Sequence([normalizers.Sequence([normalizers.NFC()]), normalizers.NFKC()])
    assert [part["type"] for part in parts(nested, "normalizers")] == ["NFC", "NFKC"]
    assert parts(None, "normalizers") == []


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = TOKENIZERS["plain"]
    done = threading.Event()
    ticks = 0

    def encode() -> None:
        tokenizer.encode("hello " * 100_000)
        done.set()

    thread = threading.Thread(target=encode)
    start = time.perf_counter()
    thread.start()
    while not done.is_set():
        ticks += 1
        time.sleep(0.001)
    thread.join()
    seconds = time.perf_counter() - start
    assert ticks > 5, f"{ticks} ticks in {seconds} s"

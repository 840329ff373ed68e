"""How few tokens a text can become, without tokenizing it."""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

_LOSSLESS = ("ByteLevel", "Digits", "UnicodeScripts")
_LOSSLESS_UNLESS_REMOVED = ("Split", "Punctuation")

# First and last characters of ranges in which nothing is changed by NFC, and nothing combines with
# what stands before it (Unicode's NFC_Quick_Check is Yes, the combining class 0). By Unicode's
# stability policy that stays so. Not all such characters: the common ones.
_STABLE = (
    (0x0000, 0x02FF),  # Latin
    (0x0400, 0x0482),  # Cyrillic
    (0x048A, 0x052F),
    (0x05D0, 0x05EA),  # Hebrew
    (0x0621, 0x064A),  # Arabic
    (0x0E01, 0x0E37),  # Thai
    (0x2010, 0x2027),  # dashes and quotation marks
    (0x3000, 0x3029),
    (0x3041, 0x3096),  # Hiragana
    (0x30A1, 0x30FA),  # Katakana
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),  # Hangul
    (0xFF01, 0xFF5E),
    (0x1F300, 0x1F64F),  # emoji
    (0x1F900, 0x1F9FF),
)
_EDGES = np.array([edge for first, last in _STABLE for edge in (first, last + 1)], np.uint32)

# Bytes counted together: `np.bincount` takes eight times as many for a moment.
_BLOCK = 1 << 15


class TokenBound:
    """A lower bound on the number of tokens of a text under a byte-level BPE tokenizer.

    Each byte of the text weighs 1/n, where n is the length in bytes of the longest token that
    holds such a byte. No token then weighs more than 1, so the text's weight is at most the number
    of its tokens. Bytes that may vanish on the way weigh nothing: those without a token of their
    own, whitespace where an added token swallows what surrounds it, and characters that NFC may
    change or join. Under any other normalizer, or a pre-tokenizer that drops text, the bound is 0.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, vocabulary: Iterable[bytes], added: Iterable[str]
    ) -> None:
        """`vocabulary` holds the bytes of the BPE's own tokens, `added` the added tokens' text."""
        normalizers = {part["type"] for part in parts(backend.normalizer, "normalizers")}
        splits = parts(backend.pre_tokenizer, "pretokenizers")
        self._composes = bool(normalizers)
        self._strips = any(
            token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
        )
        self._weights: NDArray[np.float64] = np.zeros(256)
        if normalizers <= {"NFC"} and all(map(_is_lossless, splits)):
            spelled = [text.encode() for text in added]
            if backend.normalizer is not None:
                spelled += [backend.normalizer.normalize_str(text).encode() for text in added]
            self._weights = _byte_weights(list(vocabulary), spelled)

    def __call__(self, text: str) -> int:
        """From 0 to the number of tokens of `text`; some 10 ms for a million characters."""
        if self._strips:
            text = "".join(text.split())
        if self._composes and not text.isascii():
            text = _untouched_by_nfc(text)
        raw = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        counts = np.zeros(256, np.intp)
        for start in range(0, raw.size, _BLOCK):
            counts += np.bincount(raw[start : start + _BLOCK], minlength=256)
        weight = float(counts @ self._weights)
        return math.ceil(weight * (1.0 - 1e-9))  # rounding must not turn 3 into 4


def parts(component: Any, key: str) -> list[dict[str, Any]]:
    """The settings of a normalizer, pre-tokenizer or decoder: one entry for each in a sequence.

    `key` is what a sequence of that kind calls its list: "normalizers", "pretokenizers" or
    "decoders".
    """

    def flattened(settings: dict[str, Any]) -> list[dict[str, Any]]:
        if key not in settings:
            return [settings]
        return [part for nested in settings[key] for part in flattened(nested)]

    return [] if component is None else flattened(json.loads(component.__getstate__()))


def _is_lossless(split: dict[str, Any]) -> bool:
    kind = split["type"]
    removes = split.get("behavior") == "Removed"
    return kind in _LOSSLESS or (kind in _LOSSLESS_UNLESS_REMOVED and not removes)


def _byte_weights(vocabulary: list[bytes], added: list[bytes]) -> NDArray[np.float64]:
    longest = np.zeros(256)
    by_length: dict[int, list[bytes]] = {}
    for token in (*vocabulary, *added):
        by_length.setdefault(len(token), []).append(token)
    for length in sorted(by_length):
        longest[np.frombuffer(b"".join(by_length[length]), np.uint8)] = length
    own = np.zeros(256, bool)
    own[[token[0] for token in vocabulary if len(token) == 1]] = True
    return np.divide(1.0, longest, out=np.zeros(256), where=own)


def _untouched_by_nfc(text: str) -> str:
    """The characters of `text` that are in its NFC too: stable ones before another stable one."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))
    stable = np.searchsorted(_EDGES, codes, side="right") % 2 == 1
    kept = stable.copy()
    kept[:-1] &= stable[1:]
    return str(codes[kept].tobytes(), "utf-32-le")

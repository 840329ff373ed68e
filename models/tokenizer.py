"""Byte-level BPE tokenizer: text to ids, ids to the true bytes they stand for."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from models.errors import TokenizerError
from models.fields import flag, naming
from models.files import is_file, read_json, read_text, reason, shown
from models.token_bound import TokenBound, parts


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's reversible byte alphabet (openai/gpt-2, encoder.py).

    Printable bytes stand for themselves; the others, in order, are the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()

_KEPT_WORDS = 1000
"""Words whose ids are remembered in each thread that encodes. The package's own 10,000 take up to
70 MB a thread where words are long."""

# For str.translate: the alphabet to Latin-1, and the Latin-1 characters that are outside it to one
# that Latin-1 cannot encode.
_TO_LATIN1 = dict.fromkeys(range(256), "\uffff") | {
    ord(char): chr(byte) for char, byte in BYTE_OF.items()
}

# Every lead byte that UTF-8 has, every ASCII character, and words, numbers and line ends.
_PROBE = (
    "".join(
        map(chr, (*range(0x80), *range(0x80, 0x800, 0x3F), *range(0x800, 0x10000, 0x1000), 0x1F642))
    ).replace("\ud800", "")
    + " Hello wörld 2024\r\n\n  你好"
)


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` that is byte-level BPE.

    `vocab_size` counts ids up to the largest known; the model's embedding may be padded beyond.
    `special_ids` are the control tokens, which `decode` can skip. Nothing changes after
    construction, so one instance serves any number of threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        where: str = "tokenizer",
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        add_bos: bool = False,
    ) -> None:
        """`add_bos` prepends `bos_token_id` when special tokens are asked for, where the backend
        does not do so itself. Raises TokenizerError, naming `where`, unless byte-level."""
        _refuse_other_kinds(backend, where)
        _limit_memory(backend)
        self._backend = backend
        self._where = where
        added = backend.get_added_tokens_decoder()
        plain = backend.get_vocab(with_added_tokens=False)
        self._bytes = {token: _raw_bytes(text) for text, token in plain.items()}
        self._bound = TokenBound(
            backend, self._bytes.values(), [entry.content for entry in added.values()]
        )
        self._bytes |= {token: entry.content.encode() for token, entry in added.items()}
        self.vocab_size = max(self._bytes, default=-1) + 1
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        self._add_bos = add_bos and bos_token_id is not None
        self._probe()

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json and, if present, tokenizer_config.json of a model folder.

        Raises TokenizerError naming the file that is missing or unreadable.
        """
        file = folder / "tokenizer.json"
        backend = _read_backend(file)
        backend.no_truncation()
        backend.no_padding()
        config = read_tokenizer_config(folder)
        with naming(folder / "tokenizer_config.json"):
            add_bos = flag(config, "add_bos_token")
        eos, bos = (backend.token_to_id(special_token(config, key) or "") for key in ("eos", "bos"))
        return cls(
            backend,
            where=str(file),
            eos_token_ids=[] if eos is None else [eos],
            bos_token_id=bos,
            add_bos=add_bos,
        )

    @classmethod
    def byte_level(cls, special_tokens: Sequence[str] = (), size: int = 0) -> "Tokenizer":
        """A tokenizer without merges: ids 0..255 are the bytes, `special_tokens` follow from 256.

        For generated weights and tests; the last special token, if any, is the end of sequence.
        Ids after those, up to `size` in all, are never encoded and decode to a space and their
        number: a model of made-up weights says any id, and each is text that can be streamed.
        """
        vocab = {**BYTE_OF, **{text: 256 + i for i, text in enumerate(special_tokens)}}
        vocab |= {f"Ġ{token}": token for token in range(len(vocab), size)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens(list(special_tokens))
        eos = [255 + len(special_tokens)] if special_tokens else []
        return cls(backend, eos_token_ids=eos)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; control tokens written out in it become their ids.

        `add_special_tokens` adds what the tokenizer itself puts around a text (a BOS, for most
        that have one); rendered chat templates already hold theirs.

        A million characters take seconds. Other Python threads run meanwhile, but for some 40 ms
        of that; so a server calls it in a thread, and `min_tokens` first where there is a limit.
        """
        # Of the package's ways to encode, those for batches alone release the interpreter's lock.
        with refusing_panics(self._where):
            [encoding] = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids = list(encoding.ids)
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)  # type: ignore[arg-type]
        return ids

    def min_tokens(self, text: str) -> int:
        """A lower bound on `len(encode(text))`, for a small part of the time; see `TokenBound`.

        A text for which it exceeds a limit is too long and need not be encoded.
        """
        return self._bound(text)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The raw bytes of a token, possibly part of a character; the text of an added token.

        Empty for ids without a token, as in the padding of an embedding.
        """
        return self._bytes.get(token, b"")

    def token_to_id(self, text: str) -> int | None:
        """The id of a token by its written form ("<|im_end|>"), or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def _probe(self) -> None:
        """Raises TokenizerError if encoding fails or gives ids without a token.

        What is wrong with a normalizer or a post-processor shows only when it runs.
        """
        for special in (False, True):
            try:
                ids = self.encode(_PROBE, add_special_tokens=special)
            except TokenizerError:
                raise
            except Exception as error:  # the tokenizers package raises plain Exception
                raise TokenizerError(f"{self._where}: cannot encode: {reason(error)}") from None
            unknown = [token for token in ids if token not in self._bytes]
            if unknown:
                raise TokenizerError(
                    f"{self._where}: encoding gives token id {unknown[0]}, which is no token"
                )


@contextmanager
def refusing_panics(where: str) -> Iterator[None]:
    """Turns a panic of the tokenizers package into a TokenizerError naming `where`.

    A panic arrives as a PanicException, which is no Exception and is importable from nowhere, so
    that handlers would let it end the program.
    """
    try:
        yield
    except BaseException as error:
        kind = type(error)
        if (kind.__module__, kind.__name__) != ("pyo3_runtime", "PanicException"):
            raise
        raise TokenizerError(f"{where}: the tokenizers package fails: {reason(error)}") from None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json as a dict, empty if there is none. Raises TokenizerError."""
    file = folder / "tokenizer_config.json"
    if not is_file(file, TokenizerError):
        return {}
    config = read_json(file, TokenizerError)
    for key in ("bos_token", "eos_token"):
        value = config.get(key)
        inner = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(inner, str):
            raise TokenizerError(f"{file}: {key} must be a string, not {shown(value)}")
    return config


def special_token(config: dict[str, Any], name: str) -> str | None:
    """Text of `{name}_token` in a tokenizer_config.json: a string or {"content": string}."""
    value = config.get(f"{name}_token")
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _raw_bytes(text: str) -> bytes:
    try:
        return text.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    text = read_text(file, TokenizerError)
    try:
        with refusing_panics(str(file)):
            return tokenizers.Tokenizer.from_str(text)
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise TokenizerError(f"{file}: cannot be read as a tokenizer: {reason(error)}") from None


def _limit_memory(backend: tokenizers.Tokenizer) -> None:
    resize = getattr(backend.model, "_resize_cache", None)
    if resize is not None:  # the package's younger releases
        resize(_KEPT_WORDS)


def _refuse_other_kinds(backend: tokenizers.Tokenizer, where: str) -> None:
    model = backend.model
    if type(model).__name__ != "BPE":
        raise TokenizerError(
            f"{where}: tokenizer model '{type(model).__name__}' is not supported; "
            "only byte-level BPE is"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if value := getattr(model, name):
            raise TokenizerError(
                f"{where}: {name} {shown(value)} is not supported; byte-level BPE has none"
            )
    decoders = parts(backend.decoder, "decoders")
    encoders = parts(backend.pre_tokenizer, "pretokenizers")
    encoders += parts(backend.normalizer, "normalizers")
    for kind, found in (("decoder", decoders), ("pre-tokenizer", encoders)):
        if not any(part["type"] == "ByteLevel" for part in found):
            raise TokenizerError(
                f"{where}: only byte-level BPE tokenizers are supported, and this one's {kind} "
                "is of another kind (SentencePiece, WordPiece, ...)"
            )

"""Byte-level BPE tokenizer: text to ids, ids to the true bytes they stand for."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from models.errors import TokenizerError


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's reversible byte alphabet (openai/gpt-2, encoder.py).

    Printable bytes stand for themselves; the others, in order, are the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()

# For str.translate: the alphabet to Latin-1, and the Latin-1 characters that are outside it to one
# that Latin-1 cannot encode.
_TO_LATIN1 = dict.fromkeys(range(256), "\uffff") | {
    ord(char): chr(byte) for char, byte in BYTE_OF.items()
}


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
        if not _is_byte_level(backend):
            raise TokenizerError(
                f"{where}: only byte-level BPE tokenizers are supported, and this one's decoder "
                "is of another kind (SentencePiece, WordPiece, ...)"
            )
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        for text, token in backend.get_vocab(with_added_tokens=True).items():
            self._bytes[token] = text.encode() if token in added else _raw_bytes(text)
        self.vocab_size = max(self._bytes, default=-1) + 1
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        self._add_bos = add_bos and bos_token_id is not None

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json and, if present, tokenizer_config.json of a model folder.

        Raises TokenizerError naming the file that is missing or unreadable.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{file} is missing")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers package raises plain Exception
            raise TokenizerError(f"{file}: cannot be read as a tokenizer: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        config = read_tokenizer_config(folder)
        eos, bos = (backend.token_to_id(special_token(config, key) or "") for key in ("eos", "bos"))
        return cls(
            backend,
            where=str(file),
            eos_token_ids=[] if eos is None else [eos],
            bos_token_id=bos,
            add_bos=bool(config.get("add_bos_token")),
        )

    @classmethod
    def byte_level(cls, special_tokens: Sequence[str] = ()) -> "Tokenizer":
        """A tokenizer without merges: ids 0..255 are the bytes, `special_tokens` follow from 256.

        For generated weights and tests; the last special token, if any, is the end of sequence.
        """
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(BYTE_OF), merges=[]))
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
        """
        ids = list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)  # type: ignore[arg-type]
        return ids

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


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json as a dict, empty if there is none. Raises TokenizerError."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{file}: must hold a JSON object")
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


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]))

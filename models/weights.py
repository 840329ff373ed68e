"""Canonical weight names and shapes, and what every checkpoint offers."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from models.chat_template import ChatTemplate
from models.config import ModelConfig
from models.errors import LoadError
from models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from models.stored import Stored

Shape = tuple[int, ...]


class Checkpoint(Protocol):
    """An opened model. Opening checks names and shapes; weights are read only by `tensors`."""

    @property
    def id(self) -> str:
        """The name that users know the model by: a Hub id, or the folder's or file's name."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all the arrays that `tensors` yields together."""

    def tensors(self) -> "Iterator[tuple[str, Stored]]":
        """Yields (canonical name, tensor) in the order of the files, each exactly once.

        Nothing is read until a tensor is. Keep no reference to one for longer than needed: it may
        have its file open, or hold what it has decoded. Raises LoadError if a file has vanished.
        """

    def tokenizer(self) -> Tokenizer:
        """Raises LoadError naming the file if there is no readable tokenizer."""

    def chat_template(self) -> ChatTemplate | None:
        """None if the checkpoint has no template. Raises ChatTemplateError if it is broken."""


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every canonical tensor of a model and its shape, in the order of the computation.

    Projections are [outputs, inputs]. `head` is absent when it is tied to `embed`.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    layer: dict[str, Shape] = {
        "input_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
    }
    if config.qk_norm:
        layer |= {"q_norm": (dim,), "k_norm": (dim,)}
    layer |= {
        "post_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    shapes: dict[str, Shape] = {"embed": (config.vocab_size, hidden)}
    for number in range(config.num_layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(
    config: ModelConfig,
    found: Mapping[str, Shape],
    unknown: Iterable[str],
    names: Mapping[str, str],
    where: str,
) -> None:
    """Raises LoadError unless exactly the expected tensors are there with the expected shapes.

    `found` maps canonical names to stored shapes, `unknown` lists the file's tensors without a
    canonical name, and `names` maps canonical names to the file's own, for the message.
    """
    expected = expected_shapes(config)
    missing = [names.get(name, name) for name in expected if name not in found]
    if missing == [names.get("head", "head")]:
        raise LoadError(
            f"{where}: tensor {missing[0]} is missing, and the configuration does not tie the "
            "output head to the embedding (tie_word_embeddings)"
        )
    if missing:
        raise LoadError(f"{where}: missing {_listed(missing)}")
    extra = [*unknown, *(names.get(name, name) for name in found if name not in expected)]
    if extra:
        raise LoadError(
            f"{where}: unexpected {_listed(extra)}; the file does not match its configuration"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise LoadError(
                f"{where}: tensor {names.get(name, name)} has shape {list(found[name])}, "
                f"but the configuration needs {list(shape)}"
            )


def check_layer_count(config: ModelConfig, tensors: int, where: str) -> None:
    """Refuses more layers than there are tensors, before the names of all of them are listed.

    `tensors` counts those in the files at `where`. Raises LoadError.
    """
    if config.num_layers > tensors:
        raise LoadError(
            f"{where}: the configuration has {config.num_layers} layers, "
            f"but there are only {tensors} tensors"
        )


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, where: str, sized: str) -> None:
    """Refuses a tokenizer with ids that the embedding has no row for.

    `where` names the tokenizer's file and `sized` what gives the model's size. Raises LoadError.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise LoadError(
            f"{where}: token ids reach {tokenizer.vocab_size - 1}, "
            f"but {sized} has a vocabulary of {config.vocab_size}"
        )


def parameter_count(config: ModelConfig) -> int:
    """Number of weights; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"tensor{'s' if len(names) > 1 else ''} {shown}"

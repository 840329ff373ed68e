"""Keys and values of past tokens, in pages that rows of a batch own or share."""

from collections.abc import Mapping, Sequence

import numpy as np

import tilert
from models.config import ModelConfig
from models.history import History
from tilert import Array, Device, DType, PageTable, bf16, f16

__all__ = ["KVCache", "kept_dtype", "page_bytes"]


def kept_dtype(dtype: DType) -> DType:
    """Of keys and values, and of the queries that meet them, in a model of `dtype`.

    In place of bf16 it is f16, of as many bytes: rounding to bf16 in attention would be most of the
    error of the logits. What is beyond f16's range becomes its largest.
    """
    return f16 if dtype is bf16 else dtype


def page_bytes(config: ModelConfig, dtype: DType, page_size: int) -> int:
    """Bytes of a page of `page_size` positions over all layers, in a model of `dtype`."""
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return values * page_size * kept_dtype(dtype).itemsize


class KVCache:
    """Paged keys and values of every layer.

    Attributes:
        num_pages, page_size: of page_size positions each.
        max_seqs: rows of the page table.
        max_len: positions a row can have.
        table: which pages belong to which row.
        history: which tokens each row's sequence has had, for penalties.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        dtype: DType,
        *,
        num_pages: int,
        page_size: int,
        max_seqs: int,
        max_len: int,
    ) -> None:
        """dtype: of the model; see `kept_dtype`.

        Raises:
            tilert.DeviceError: if the device's memory is too small.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seqs = max_seqs
        self.max_len = max_len
        self.table = PageTable(num_pages, page_size, max_seqs, -(-max_len // page_size), device)
        self.history = History(max_seqs, config.vocab_size, device)
        shape = (num_pages * page_size, config.num_kv_heads, config.head_dim)

        # Zeros: attention weighs slots that nothing has written with 0, and 0 * NaN is NaN.
        def zeros() -> Array:
            return tilert.zeros(shape, kept_dtype(dtype), device)

        self._layers = [(zeros(), zeros()) for _ in range(config.num_layers)]

    def slots(self, layer: int) -> tuple[Array, Array, Array]:
        """Both halves of a layer's keys, [slots, Hkv, D/2], and its values, [slots, Hkv, D]."""
        k, v = self._layers[layer]
        halves = k.reshape(k.shape[0], k.shape[1], 2, k.shape[2] // 2)
        return halves[:, :, 0], halves[:, :, 1], v

    def places(self, layer: int) -> tuple[Array, Array]:
        """A layer's keys and values as [slots, Hkv, D]."""
        return self._layers[layer]

    def pages(self, layer: int) -> tuple[Array, Array]:
        """A layer's keys and values as [pages, page_size, Hkv, D]."""
        k, v = self._layers[layer]
        shape = (self.num_pages, self.page_size, *k.shape[1:])
        return k.reshape(shape), v.reshape(shape)

    def set_pages(self, row: int, pages: Sequence[int], shared: int = 0) -> None:
        """Give a row exactly these pages, in the order of its positions.

        The first `shared` are to be read only, and other rows may read them too.

        Raises:
            tilert.OwnershipError: if a page belongs to another row, or is to be written by this
                one while another reads it.
            IndexError, ValueError: if row or page does not exist, or there are too many.
        """
        self.table.set_pages(row, pages, shared)

    def extend(self, further: Mapping[int, Sequence[int]]) -> None:
        """Give rows further pages, which they may write, behind those they have.

        Raises:
            tilert.OwnershipError: if any other row has a page, or it is given twice.
            IndexError, ValueError: as `set_pages`.
        """
        self.table.extend(further)

    def clear(self, row: int) -> None:
        """Take all pages from a row."""
        self.table.clear(row)

    def scrub(self, pages: Sequence[int]) -> None:
        """Zero pages that may hold NaN, in order behind the work enqueued so far.

        Attention weighs what it must not see with 0, which does not make NaN harmless.
        """
        for k, v in self._layers:
            for half in (k, v):
                rows = half.reshape(self.num_pages, self.page_size, *half.shape[1:])
                nothing = np.zeros(rows.shape[1:], half.dtype.numpy)
                for page in pages:
                    rows[page].copy_from(nothing)

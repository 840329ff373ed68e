"""From the logits of a step to the next ids: the ops, in order."""

import tilert
from models import kernels
from models.batch import Batch
from models.history import History
from models.slot import Features
from models.tile_sizes import CHUNK, SampleTiles
from tilert import Array

__all__ = ["sample", "score"]


def sample(
    batch: Batch, history: History, features: Features, tiles: SampleTiles, *, decoding: bool
) -> None:
    """Enqueue sampling each slot's next id from `batch.logits`; only runs ops.

    Args:
        decoding: whether the step has read `batch.ids`, which the history then counts.

    Raises:
        ValueError: if the slots need more than `features`.
    """
    if not features.cover(batch.features):
        raise ValueError(f"the batch needs {batch.features}, the step has {features}")
    arrays, logits = batch.arrays, batch.chunks
    piece = (1, tiles.chunks)
    if features.logprobs:
        _prepare_logprobs(batch, piece)
    if features.edits:
        logits = _edit(batch, history, tiles, decoding)
    best, index = arrays["best"], arrays["index"]
    kernels.chunk_best(
        best.partition(*piece), index.partition(*piece), arrays["broken"].partition(*piece), logits
    ).run()
    score, token = best, index
    if features.draws:
        _draw(batch, logits, tiles)
        score, token = arrays["score"], arrays["token"]
    kernels.pick(
        batch.ids.partition(1),
        batch.positions.partition(1),
        batch.bad.partition(1),
        score,
        token,
        arrays["broken"],
        batch.index.rows,
    ).run()
    if features.logprobs:
        _logprobs(batch)


def score(batch: Batch, tiles: SampleTiles) -> None:
    """Enqueue the log probabilities, by `batch.logits`, of the ids that the slots hold."""
    _prepare_logprobs(batch, (1, tiles.chunks))
    _logprobs(batch)


def _draw(batch: Batch, logits: Array, tiles: SampleTiles) -> None:
    """Candidates into score and token."""
    a, piece = batch.arrays, (1, tiles.chunks)
    _order(a["order"], a["rank"], a["best"], a["filters"], piece)
    kernels.threshold(
        a["lowest"].partition(1),
        logits,
        a["best"],
        a["order"],
        a["temperature"],
        a["top_k"],
        a["top_p"],
        a["filters"],
        group=tiles.group,
        fan=tiles.fan,
    ).run()
    kernels.draw(
        a["score"].partition(*piece),
        a["token"].partition(*piece),
        logits,
        a["best"],
        a["index"],
        a["lowest"],
        a["positions"],
        a["temperature"],
        a["min_p"],
        a["seeds"],
    ).run()


def _order(order: Array, rank: Array, best: Array, wanted: Array, piece: tuple[int, int]) -> None:
    kernels.rank_chunks(rank.partition(*piece), best, wanted).run()
    kernels.order_chunks(order.partition(*piece), rank, wanted).run()


def _edit(batch: Batch, history: History, tiles: SampleTiles, decoding: bool) -> Array:
    """The logits as requests want them changed."""
    to, piece = batch.edits, (1, tiles.chunks, CHUNK)
    if decoding:
        counts = history.counts.partition_at(batch.row_index, *piece)
        kernels.count_tokens(counts, batch.ids).run()
    edited = kernels.edit_logits(
        to["edited"].partition(*piece),
        batch.chunks,
        history.counts,
        batch.index.rows,
        to["presence"],
        to["frequency"],
        to["repetition"],
        to["biases"],
        to["bias_ids"],
        to["bias_values"],
        to["masked"],
        to["allowed"],
    ).run()
    assert isinstance(edited, tilert.Array)
    return edited


def _prepare_logprobs(batch: Batch, piece: tuple[int, int]) -> None:
    """What `_logprobs` needs of the logits as the model gave them."""
    to, plain = batch.logprobs, batch.arrays
    # Where the largest logits lie is worked out again for sampling.
    index, broken = plain["index"].partition(*piece), plain["broken"].partition(*piece)
    kernels.chunk_best(to["best"].partition(*piece), index, broken, batch.chunks).run()
    _order(to["order"], to["rank"], to["best"], to["wanted"], piece)
    mass = to["mass"].partition(*piece)
    kernels.chunk_mass(mass, batch.chunks, to["best"], to["wanted"]).run()


def _logprobs(batch: Batch) -> None:
    to = batch.logprobs
    kernels.logprobs(
        to["chosen"].partition(1),
        to["top_ids"].partition(1, to["top_ids"].shape[1]),
        to["top_values"].partition(1, to["top_values"].shape[1]),
        batch.chunks,
        to["best"],
        to["mass"],
        to["order"],
        batch.ids,
        to["wanted"],
    ).run()

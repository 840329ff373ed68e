"""Slots that change hands while their ids are known to the device alone."""

from typing import Any

import numpy as np
import pytest

import tilert
from models.batch import Batch
from models.sampler import sample
from models.slot import KEPT, MAX_BIASES, PADDING, Features, Slot
from tests.models.test_sampler import Rig, draw_logits
from tilert import Device, OwnershipError, i32


def state(batch: Batch) -> tuple[list[int], list[int], list[int]]:
    """Ids, positions and rows."""
    return batch.ids.numpy().tolist(), batch.positions.numpy().tolist(), batch.rows.tolist()


def put(array: tilert.Array, values: list[int]) -> None:
    array.copy_from(np.array(values, np.int32))


def test_a_change_leaves_the_other_slots_to_the_device(device: Device) -> None:
    batch = Rig(device, 4).batch
    batch.set([Slot(row, 10 + row, row) for row in range(4)])
    # What steps have left there, and the host has not read.
    put(batch.ids, [50, 51, 52, 53])
    put(batch.positions, [7, 8, 9, 10])
    put(batch.bad, [1, 0, 1, 0])
    fresh = tilert.from_numpy(np.array([90, 91, 92], np.int32), device)
    changes = {
        0: Slot(5, 0, 3, source=Slot.from_fresh(2)),
        1: Slot(6, 77, 4),
        3: Slot(3, 0, 0, source=KEPT, temperature=0.5),
    }
    batch.change(changes, fresh)
    assert state(batch) == ([92, 77, 52, 53], [3, 4, 9, 10], [5, 6, 2, 3])
    assert batch.bad.numpy().tolist() == [0, 0, 1, 0]
    assert batch.index.rows.numpy().tolist() == [5, 6, 2, 3]
    assert batch.arrays["temperature"].numpy().tolist() == [0, 0, 0, 0.5]
    assert batch.features == Features(draws=True)
    batch.change({2: PADDING}, fresh)
    assert state(batch) == ([92, 77, 0, 53], [3, 4, 0, 10], [5, 6, -1, 3])
    assert batch.results.numpy().tolist() == [[92, 77, 0, 53], [0, 0, 0, 0]]


def test_slots_move_when_a_batch_shrinks_and_make_way_when_it_grows(device: Device) -> None:
    batch = Rig(device, 4).batch
    batch.set([Slot(row, 10 + row, row) for row in range(4)])
    put(batch.ids, [50, 51, 52, 53])
    head = batch.head(2)
    moves = {
        0: Slot(3, 0, 8, source=Slot.from_slot(3)),
        1: Slot(0, 0, 9, source=Slot.from_slot(0)),
        2: PADDING,
        3: PADDING,
    }
    head.change(moves)
    assert state(head) == ([53, 50], [8, 9], [3, 0])
    put(head.ids, [60, 61])
    batch.change({2: Slot(1, 5, 6)})
    assert state(batch) == ([60, 61, 5, 0], [8, 9, 6, 0], [3, 0, 1, -1])
    # The rows of a head are those of its own last change.
    assert head.rows.tolist() == [3, 0]


def test_what_the_device_is_told_of_a_slot(device: Device) -> None:
    batch = Rig(device, 2).batch
    slot = Slot(
        row=1, token=3, position=4, temperature=1e300, top_k=2**40, top_p=0.5, min_p=0.25,
        seed=-2, presence_penalty=0.5, frequency_penalty=-1.5, repetition_penalty=1e300,
        logit_bias=((7, 1.5),), masked=True, logprobs=True,
    )  # fmt: skip
    batch.set([PADDING, slot])
    names = ("temperature", "top_k", "top_p", "min_p", "filters")
    largest = float(np.finfo(np.float32).max)
    assert [batch.arrays[name].numpy()[1] for name in names] == [largest, 2**31 - 1, 0.5, 0.25, 1]
    assert batch.arrays["seeds"].numpy().tolist() == [[0, 0], [2**32 - 2, 2**32 - 1]]
    names = ("presence", "frequency", "repetition", "biases", "masked")
    assert [batch.edits[name].numpy()[1] for name in names] == [0.5, -1.5, largest, 1, 1]
    assert batch.edits["bias_ids"].numpy()[1, :2].tolist() == [7, 0]
    assert batch.edits["bias_values"].numpy()[1, :2].tolist() == [1.5, 0]
    assert batch.logprobs["wanted"].numpy().tolist() == [0, 1]
    assert batch.features == Features(draws=True, edits=True, logprobs=True)
    assert batch.row_index.array.numpy().tolist() == [-1, 1]


def test_masks_of_some_slots_leave_those_between_alone(device: Device) -> None:
    batch = Rig(device, 4).batch
    batch.set([Slot(row, 0, 0, masked=True) for row in range(4)])
    batch.allow({at: np.full(3, at + 1, np.uint32) for at in range(4)})
    batch.allow({2: np.array([9], np.uint32), 0: np.array([8, 7], np.uint32)})
    allowed = batch.edits["allowed"].numpy().reshape(4, -1)
    assert allowed[:, :3].tolist() == [[8, 7, 0], [2, 2, 2], [9, 0, 0], [4, 4, 4]]
    assert not allowed[:, 3:].any()


@pytest.mark.parametrize(
    ("slot", "error", "match"),
    [
        ({4: PADDING}, IndexError, "no slot 4"),
        ({-1: PADDING}, IndexError, "no slot -1"),
        ({0: Slot(0, 0, 0, source=Slot.from_slot(4))}, ValueError, "4 slots and 2 fresh ids"),
        ({0: Slot(0, 0, 0, source=Slot.from_fresh(2))}, ValueError, "4 slots and 2 fresh ids"),
        ({0: Slot(1, 0, 0), 2: Slot(1, 0, 0)}, OwnershipError, "row 1 occurs twice"),
        ({0: Slot(8, 0, 0)}, IndexError, "no row 8"),
        ({0: Slot(0, 0, 0, logit_bias=((1, 1.0),) * (MAX_BIASES + 1))}, ValueError, "301"),
    ],
)
def test_changes_that_cannot_be(slot: Any, error: type[Exception], match: str) -> None:
    device = tilert.device("cpu")
    batch = Rig(device, 4).batch
    with pytest.raises(error, match=match):
        batch.change(slot, tilert.zeros((2,), i32, device))


def test_a_recorded_step_keeps_the_history(device: Device) -> None:
    """A recording that takes memory clears it at each replay, so it is taken before."""
    rig = Rig(device, 1)
    rig.batch.set([Slot(2, 5, 0, masked=True)])
    rig.batch.allow({0: np.full(20, 0xFFFFFFFF, np.uint32)})
    rig.batch.logits.copy_from(draw_logits(1))

    def step() -> None:
        sample(rig.batch, rig.history, rig.batch.features, rig.tiles, decoding=True)

    with tilert.capture(device, step) as graph:
        rig.history.set(2, [], [9, 9])
        for _ in range(3):
            put(rig.batch.ids, [9])
            graph.replay()
        assert rig.history.counts[2].numpy().reshape(-1)[9] == 5

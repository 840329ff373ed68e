"""Steps that run ahead of reading: who sits where, and what failures leave of it."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grout.errors import BadLogits, RequestAborted, RequestTimeout, StepFailed
from grout.request import SamplingParams
from grout.runner import RECORDED
from grout.seats import Seats
from grout.sequence import Sequence
from grout.streams import BlockingStream
from models.slot import KEPT, PADDING, PLAIN, Slot
from tests.grout.fakes import BAD_SEED, expected, make_engine, model_of
from tests.grout.test_scheduler import sequence as new_sequence
from tests.grout.test_schedules import TEXTS, at_rest, machines, run_out

pytestmark = pytest.mark.usefixtures("fake_device")

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def running(row: int, produced: int = 0, in_flight: int = 2, **params: int) -> Sequence:
    """A sequence of a prompt of three, whose next token counts as enqueued."""
    member = new_sequence(3, 50)
    member.params = SamplingParams(temperature=0, **params)  # type: ignore[arg-type]
    member.row = row
    member.produced = list(range(40, 40 + produced))
    member.enqueued = produced + in_flight
    return member


def test_a_joining_sequence_takes_its_token_where_the_device_has_it() -> None:
    seats = Seats()
    first, second, known = running(4), running(5), running(6, produced=7, in_flight=1)
    seats.expect({0: first, 2: second})
    changes = seats.arrange((second, first, known), 4)
    assert changes == {
        0: Slot(5, 0, 3, source=Slot.from_fresh(2)),
        1: Slot(4, 0, 3, source=Slot.from_fresh(0)),
        2: Slot(6, 46, 9),
    }
    assert seats.slots == (0, 1, 2)
    assert seats.arrange((second, first, known), 4) == {}


def test_who_leaves_makes_room_and_nobody_else_moves() -> None:
    seats = Seats()
    members = tuple(running(row, produced=1, in_flight=1) for row in range(5))
    seats.arrange(members, 8)
    joining = running(1)
    seats.expect({0: joining})
    left = (members[0], members[2], members[3], members[4], joining)
    assert seats.arrange(left, 8) == {1: Slot(1, 0, 3, source=Slot.from_fresh(0))}
    assert seats.slots == (0, 2, 3, 4, 1)
    # The batch gets smaller: one sits past its end, and the device alone has its token.
    for member in left:
        member.enqueued += 1
    fewer = (members[3], members[4], joining)
    position = 3 + members[4].enqueued - 2
    assert seats.arrange(fewer, 4) == {
        0: Slot(4, 0, position, source=Slot.from_slot(4)),
        2: PADDING,
        4: PADDING,
    }
    assert seats.slots == (3, 0, 1)


def test_one_that_gave_way_and_came_back_alone_is_seated_anew() -> None:
    seats = Seats()
    member = running(2, produced=3, in_flight=1)
    seats.arrange((member,), 1)
    member.row = 0
    member.enqueued = 5
    seats.expect({0: member})
    assert seats.arrange((member,), 1) == {0: Slot(0, 0, 6, source=Slot.from_fresh(0))}


def test_a_mask_ends_with_the_tokens_that_may_not_end_the_reply() -> None:
    seats = Seats()
    held, other = running(0, min_tokens=3), running(1, produced=1, in_flight=1)
    held.stop_ids = frozenset({5})
    seats.expect({0: held})
    changes = seats.arrange((held, other), 2)
    assert changes[0].masked
    assert not changes[1].masked
    masks = seats.masks(40)
    assert [(slot, words.tolist()) for slot, words in masks.items()] == [
        (0, [0xFFFFFFFF - 32, 0xFFFFFFFF])
    ]
    held.enqueued += 1
    assert seats.arrange((held, other), 2) == {}
    assert seats.masks(40) == {}
    held.enqueued += 1
    # While another joins, too.
    third = running(2, produced=1, in_flight=1)
    changes = seats.arrange((held, other, third), 4)
    assert changes == {0: held.slot(source=KEPT), 2: Slot(2, 40, 3)}
    assert not changes[0].masked


def test_nobody_is_waited_for_when_requests_join_and_leave() -> None:
    engine = make_engine(max_num_seqs=8, pages=100, prefill_chunk=64)
    streams = [BlockingStream() for _ in range(12)]
    ahead = 0
    for at, stream in enumerate(streams):
        params = SamplingParams(temperature=0, max_tokens=3 + at % 4, ignore_eos=True)
        engine.add([at + 1] * (1 + at % 5), params, stream)
        engine.step()
        pending = engine._loop._pending
        assert pending is not None
        ahead += all(member.in_flight for member in pending.step.decode)
    while engine.step():
        pass
    assert ahead == 12
    for at, stream in enumerate(streams):
        tokens = [token for _ in range(3 + at % 4) for token in stream.get().token_ids]
        assert tokens == expected([at + 1] * (1 + at % 5), 3 + at % 4)
        assert stream.empty
    # A step for each token after the first, side by side, and none that was of no use.
    assert model_of(engine).decodes < 20
    at_rest(engine)


def test_what_grows_in_a_step_is_sent_together() -> None:
    engine = make_engine(max_num_seqs=4, pages=40, prefill_chunk=64)
    cache = model_of(engine).cache
    grown: list[list[int]] = []
    extend = cache.extend

    def counted(further: Mapping[int, Any]) -> None:
        grown.append(sorted(further))
        extend(further)

    vars(cache)["extend"] = counted
    streams = [BlockingStream() for _ in range(4)]
    for at, stream in enumerate(streams):
        engine.add([at + 1] * 3, GREEDY, stream)
    run_out(engine.step)
    # Prompts of 3 tokens and 19 more that are run, in pages of 4.
    assert grown == [[0, 1, 2, 3]] * 5
    at_rest(engine)


def test_a_prompt_in_flight_is_waited_for_by_those_that_begin_alike() -> None:
    engine = make_engine(prefill_chunk=64)
    streams = [BlockingStream(), BlockingStream()]
    engine.add(TEXTS[0][:17], GREEDY, streams[0])
    engine.step()
    engine.add(TEXTS[0][:19], GREEDY, streams[1])
    while engine.step():
        pass
    assert model_of(engine).chunks == [(0, 17), (16, 3)]
    for stream, size in zip(streams, (17, 19), strict=True):
        tokens = [token for _ in range(20) for token in stream.get().token_ids]
        assert tokens == expected(TEXTS[0][:size], 20)


def test_what_is_recorded_at_the_start_is_not_recorded_again() -> None:
    engine = make_engine()
    runner = engine._loop.runner
    runner.warm_up((5,), (1, 2, 4), RECORDED)
    recorded = {size: dict(lane.graphs) for size, lane in runner._lanes.items()}
    assert sorted(recorded) == [1, 2, 4]
    assert all(set(graphs) == {None, PLAIN, *RECORDED} for graphs in recorded.values())
    kinds = (
        GREEDY,
        replace(GREEDY, logprobs=2),
        replace(GREEDY, min_tokens=3),
        replace(GREEDY, frequency_penalty=1.0),
    )
    for params in kinds:
        engine.add([1, 2], params, BlockingStream())
        assert engine.generate_sync([4, 5], params).token_ids == tuple(expected([4, 5], 20))
    for size, lane in runner._lanes.items():
        assert lane.graphs == recorded[size]
    while engine.step():
        pass
    at_rest(engine)


requests = st.lists(
    st.tuples(
        st.sampled_from(TEXTS),
        st.integers(1, 20),  # tokens of the prompt
        st.integers(1, 12),  # of the reply
        st.sampled_from(["stays", "stays", "is aborted", "is bad", "is late"]),
        st.integers(0, 3),  # min_tokens, if that is not more than there may be
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=80)
@given(
    requests,
    machines([9, 12, 40]),
    st.booleans(),
    st.integers(0, 3),
)
def test_whatever_happens_to_some_the_others_get_their_tokens(
    requests: list[tuple[list[int], int, int, str, int]],
    machine: dict[str, Any],
    eager: bool,
    failures: int,
) -> None:
    chance = random.Random(machine["device_seed"])
    engine = make_engine(max_model_len=32, enforce_eager=eager, request_timeout=1e6, **machine)
    model = model_of(engine)
    streams = [BlockingStream() for _ in requests]
    doomed: list[Sequence] = []

    def step() -> bool:
        nonlocal failures
        if failures and chance.random() < 0.1:
            failures -= 1
            setattr(model, chance.choice(["fail_prefill", "fail_decode"]), ValueError("no luck"))
        if doomed and chance.random() < 0.2:
            engine.abort(doomed.pop())
        return engine.step()

    for at, (text, size, count, fate, held) in enumerate(requests):
        bad = fate == "is bad"
        params = SamplingParams(
            temperature=0,
            max_tokens=count,
            min_tokens=min(held, count),
            ignore_eos=True,
            seed=BAD_SEED if bad else at,
        )
        sequence = engine.add(text[:size], params, streams[at])
        if fate == "is late":
            sequence.arrived -= 1e6 - chance.random() / 50
        doomed += [sequence] if fate == "is aborted" else []
        for _ in range(chance.randrange(4)):
            step()
    run_out(step)

    ends = {"is aborted": RequestAborted, "is bad": BadLogits, "is late": RequestTimeout}
    for (text, size, count, fate, _), stream in zip(requests, streams, strict=True):
        tokens: list[int] = []
        error: Exception | None = None
        while not stream.empty:
            try:
                tokens += stream.get().token_ids
            except (RequestAborted, BadLogits, RequestTimeout, StepFailed) as failure:
                error = failure
        want = expected(text[:size], count)
        if error is None:
            assert fate != "is bad"
            assert tokens == want
        else:
            assert tokens == want[: len(tokens)]
            assert isinstance(error, (StepFailed, ends.get(fate, StepFailed)))
            assert fate != "is bad" or not tokens
    at_rest(engine)

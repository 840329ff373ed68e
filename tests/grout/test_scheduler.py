import random
from collections.abc import Sequence as Ordered

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from grout.detokenizer import Detokenizer
from grout.pages import PagePool
from grout.request import SamplingParams
from grout.scheduler import Scheduler, Step
from grout.sequence import Sequence, SequenceState
from grout.streams import BlockingStream

PAGE = 4


def sequence(prompt: int, limit: int) -> Sequence:
    return Sequence(
        id=0,
        prompt=np.arange(prompt, dtype=np.int32),
        params=SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        limit=limit,
        detokenizer=Detokenizer(lambda _: b""),
        sink=BlockingStream(),
    )


def scheduler(pages: int = 100, rows: int = 4, chunk: int = 8) -> Scheduler:
    return Scheduler(PagePool(pages), page_size=PAGE, max_num_seqs=rows, prefill_chunk=chunk)


def produce(step: Step) -> list[Sequence]:
    """Take in one token for each sequence the step gave one; returns those at their limit."""
    produced = list(step.decode)
    if step.prefill is not None and step.prefill.last:
        produced.append(step.prefill.sequence)
    for member in produced:
        member.in_flight -= 1
        member.accept(1)
    return [member for member in produced if member.finish_reason]


def advance(plan: Scheduler) -> Step:
    step = plan.schedule()
    assert step is not None
    return step


def spans(steps: Ordered[Step]) -> list[tuple[int, int] | None]:
    chunks = [step.prefill for step in steps]
    return [chunk if chunk is None else (chunk.start, chunk.stop) for chunk in chunks]


def test_a_long_prompt_runs_in_chunks_between_decode_steps() -> None:
    plan = scheduler()
    short, long = sequence(3, 50), sequence(20, 50)
    plan.add(short)
    plan.add(long)
    steps = []
    for _ in range(5):
        step = advance(plan)
        produce(step)
        steps.append(step)
    assert spans(steps) == [(0, 3), (0, 8), (8, 16), (16, 20), None]
    assert [step.decode for step in steps] == [(), (short,), (short,), (short,), (short, long)]
    assert long.state is SequenceState.RUNNING


def test_pages_are_reserved_for_prompt_and_reply() -> None:
    plan = scheduler(pages=8)
    first, second = sequence(5, 12), sequence(2, 16)
    plan.add(first)
    plan.add(second)
    step = advance(plan)
    assert len(first.pages) == 4  # 5 + 12 - 1 positions
    produce(step)
    assert plan.pool.free_count == 4
    step = advance(plan)
    assert step.prefill is None  # 2 + 16 - 1 positions want 5 pages
    assert second.state is SequenceState.WAITING
    plan.retire(first)
    assert plan.pool.free_count == 8
    step = advance(plan)
    assert step.prefill is not None
    assert len(second.pages) == 5


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    plan = scheduler(pages=4)
    holder, large, small = sequence(2, 3), sequence(4, 13), sequence(1, 1)
    for member in (holder, large, small):
        plan.add(member)
    first = advance(plan)
    assert first.prefill is not None
    assert first.prefill.sequence is holder
    produce(first)
    second = advance(plan)
    assert second.prefill is None
    assert list(plan.waiting) == [large, small]


def test_a_step_is_not_run_ahead_when_the_batch_will_change() -> None:
    plan = scheduler()
    member = sequence(10, 3)
    plan.add(member)
    first = advance(plan)
    assert plan.follows(first)  # its next chunk depends on nothing
    second = advance(plan)
    assert not plan.follows(second)  # its first token comes
    produce(second)
    third = advance(plan)
    assert plan.follows(third)  # the same batch again
    fourth = advance(plan)
    assert not plan.follows(fourth)  # its limit is reached in flight
    assert plan.schedule() is None
    produce(third)
    assert produce(fourth) == [member]


def test_retiring_gives_back_rows_and_pages_in_every_state() -> None:
    plan = scheduler(rows=2)
    running, prefilling, waiting = sequence(2, 9), sequence(30, 9), sequence(2, 9)
    for member in (running, prefilling, waiting):
        plan.add(member)
        step = advance(plan)
        produce(step)
    assert [m.state.value for m in plan.sequences] == ["running", "prefill", "waiting"]
    for member in (waiting, prefilling, running):
        plan.retire(member)
        assert member.done
        assert member.row == -1
        assert member.pages == ()
    assert not plan.busy
    assert plan.pool.free_count == plan.pool.total
    assert plan.schedule() is None


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=20),
    st.integers(10, 40),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 2**32),
)
def test_every_sequence_finishes_and_never_shares(
    sizes: list[tuple[int, int]], pages: int, rows: int, chunk: int, seed: int
) -> None:
    plan = scheduler(pages, rows, chunk)
    members = [sequence(*size) for size in sizes]
    chance = random.Random(seed)
    pending = list(members)
    steps = 0
    while pending or plan.busy:
        steps += 1
        assert steps < 2000
        if pending and chance.random() < 0.5:
            plan.add(pending.pop(0))
        step = plan.schedule()
        if step is None:
            assert not plan.busy
            continue
        held = [*plan.running, *([plan.prefilling] if plan.prefilling else [])]
        owned = [page for member in held for page in member.pages]
        assert len(set(owned)) == len(owned) == plan.pool.used_count
        assert len({member.row for member in held}) == len(held) <= rows
        for member in step.decode:
            assert member.position < len(member.pages) * PAGE
        for member in produce(step):
            plan.retire(member)
        if plan.running and chance.random() < 0.05:
            plan.retire(plan.running[0])
    assert plan.pool.free_count == pages
    for member in members:
        assert member.done
        assert len(member.produced) <= member.limit

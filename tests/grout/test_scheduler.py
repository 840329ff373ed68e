import itertools
import random
from collections.abc import Sequence as Ordered

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from grout.detokenizer import Detokenizer
from grout.pages import PagePool
from grout.request import SamplingParams
from grout.scheduler import PREFILLS_PER_STEP, Scheduler, Step
from grout.sequence import Sequence, SequenceState
from grout.streams import BlockingStream

PAGE = 4


IDS = itertools.count()


def sequence(prompt: int, limit: int, priority: int = 0) -> Sequence:
    """Every prompt is different, from its first token on."""
    number = next(IDS)
    return Sequence(
        id=number,
        prompt=np.arange(prompt, dtype=np.int32) + 1000 * number,
        params=SamplingParams(priority=priority),
        seed=0,
        stop_ids=frozenset(),
        limit=limit,
        detokenizer=Detokenizer(lambda _: b""),
        sink=BlockingStream(),
    )


def scheduler(pages: int = 100, rows: int = 4, chunk: int = 8) -> Scheduler:
    return Scheduler(PagePool(pages), page_size=PAGE, max_num_seqs=rows, prefill_chunk=chunk)


def produce(plan: Scheduler, step: Step) -> list[Sequence]:
    """Take in one token for each sequence the step gave one; returns those at their limit."""
    produced = list(step.decode)
    produced += [chunk.sequence for chunk in step.prefills if chunk.last]
    for member in produced:
        member.accept(1)
        plan.completed(member, member.length - 1)
    return [member for member in produced if member.finish_reason]


def advance(plan: Scheduler) -> Step:
    step = plan.schedule()
    assert step is not None
    return step


def spans(steps: Ordered[Step]) -> list[list[tuple[int, int]]]:
    return [[(chunk.start, chunk.stop) for chunk in step.prefills] for step in steps]


def test_a_long_prompt_runs_in_chunks_between_decode_steps() -> None:
    plan = scheduler()
    short, long = sequence(3, 50), sequence(20, 50)
    plan.add(short)
    plan.add(long)
    steps = []
    for _ in range(5):
        step = advance(plan)
        produce(plan, step)
        steps.append(step)
    # The long prompt is not cut for the five tokens that the first step has left.
    assert spans(steps) == [[(0, 3)], [(0, 8)], [(8, 16)], [(16, 20)], []]
    assert [step.decode for step in steps] == [(), (short,), (short,), (short,), (short, long)]
    assert long.state is SequenceState.RUNNING


def test_short_prompts_share_a_step_within_the_budget() -> None:
    plan = scheduler(rows=20, chunk=20)
    members = [sequence(size, 5) for size in (18, 4, 3, 6, 6, 9)]
    for member in members:
        plan.add(member)
    steps = [advance(plan), advance(plan), advance(plan)]
    # After eighteen tokens two are left, which is no room for four.
    assert spans(steps) == [[(0, 18)], [(0, 4), (0, 3), (0, 6), (0, 6)], [(0, 9)]]
    many = scheduler(rows=20, chunk=20)
    for _ in range(20):
        many.add(sequence(1, 5))
    assert len(advance(many).prefills) == PREFILLS_PER_STEP


def test_pages_are_taken_as_tokens_come() -> None:
    plan = scheduler(pages=8)
    first, second = sequence(5, 12), sequence(2, 16)
    plan.add(first)
    step = advance(plan)
    assert len(first.pages) == 2  # five positions, and three to spare
    produce(plan, step)
    plan.add(second)
    step = advance(plan)
    assert [chunk.sequence for chunk in step.prefills] == [second]
    for _ in range(10):
        produce(plan, step)
        step = advance(plan)
    assert (len(first.pages), len(second.pages)) == (4, 3)
    assert first.length == 5 + 11
    plan.retire(first)
    assert plan.pool.free_count == 5


def test_the_last_in_rank_gives_way_and_resumes_with_its_tokens() -> None:
    plan = scheduler(pages=6)
    first, second = sequence(5, 12), sequence(5, 12)
    plan.add(first)
    plan.add(second)
    while not plan.preemptions:
        step = advance(plan)
        produce(plan, step)
    assert second.state is SequenceState.WAITING
    assert (second.row, second.pages, second.prefilled) == (-1, (), 0)
    assert plan.take_left_rows() == [1]
    assert plan.running == [first]
    had = list(second.produced)
    assert len(had) > 0
    while second.state is SequenceState.WAITING:
        for member in produce(plan, advance(plan)):
            plan.retire(member)
    assert first.done
    assert second.produced[: len(had)] == had
    # Its pages were still in the cache, all but the last or those that were needed meanwhile.
    chunk_start = second.frozen * PAGE
    assert second.length - 1 >= chunk_start
    while not second.finish_reason:
        produce(plan, advance(plan))
    assert len(second.produced) == 12


def test_a_sequence_gives_way_to_itself_when_it_is_the_last() -> None:
    plan = scheduler(pages=4)
    first, second = sequence(8, 9), sequence(4, 9)
    plan.add(first)
    produce(plan, advance(plan))
    plan.add(second)
    done: list[Sequence] = []
    for _ in range(40):
        step = plan.schedule()
        if step is None:
            break
        for member in produce(plan, step):
            plan.retire(member)
            done.append(member)
    assert done == [first, second]


def test_rank_is_priority_then_arrival() -> None:
    plan = scheduler(rows=1, chunk=4)
    late, normal, urgent = sequence(2, 1, 5), sequence(2, 1), sequence(2, 1, -1)
    order = []
    for member in (late, normal, urgent):
        plan.add(member)
    while plan.busy:
        for member in produce(plan, advance(plan)):
            plan.retire(member)
            order.append(member)
    assert order == [urgent, normal, late]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    plan = scheduler(pages=4)
    holder, large, small = sequence(2, 3), sequence(13, 2), sequence(1, 1)
    for member in (holder, large, small):
        plan.add(member)
    first = advance(plan)
    assert [chunk.sequence for chunk in first.prefills] == [holder]
    produce(plan, first)
    second = advance(plan)
    assert second.prefills == ()
    assert list(plan.waiting) == [large, small]


def test_steps_run_ahead_while_sequences_join_and_leave() -> None:
    plan = scheduler()
    member = sequence(10, 3)
    plan.add(member)
    steps = [advance(plan) for _ in range(4)]
    assert spans(steps) == [[(0, 8)], [(8, 10)], [], []]
    # Its first token is not known yet when it joins, nor any when its limit is reached.
    assert [step.decode for step in steps] == [(), (), (member,), (member,)]
    assert (member.enqueued, member.in_flight) == (3, 3)
    assert plan.schedule() is None
    for step in steps[1:3]:
        assert produce(plan, step) == []
    assert produce(plan, steps[3]) == [member]
    assert (member.enqueued, member.in_flight) == (3, 0)


def test_ids_are_to_be_read_before_somebody_gives_way() -> None:
    plan = scheduler(pages=4)
    first, second = sequence(4, 9), sequence(4, 9)
    plan.add(first)
    plan.add(second)
    produce(plan, advance(plan))
    step = advance(plan)
    assert step.grown == step.decode == (first, second)
    for _ in range(3):
        assert not plan.short
        following = advance(plan)
        assert following.grown == ()
        produce(plan, step)
        step = following
    assert plan.pool.free_count == 0
    assert plan.short
    produce(plan, step)
    step = advance(plan)
    assert step.decode == step.grown == (first,)
    assert plan.preemptions == 1
    assert second.enqueued == len(second.produced) == 5


def test_a_prefix_is_found_and_its_last_token_run_again() -> None:
    plan = scheduler(chunk=32)
    prompt = np.arange(12, dtype=np.int32)
    members = [sequence(12, 4) for _ in range(3)]
    for member in members:
        member.prompt = prompt
    members[2].prompt = prompt[:9]
    for member in members[:2]:
        plan.add(member)
    produce(plan, advance(plan))
    step = advance(plan)
    assert spans([step]) == [[(8, 12)]]
    produce(plan, step)
    assert members[1].pages[:2] == members[0].pages[:2]
    assert members[1].pages[2] != members[0].pages[2]
    for page in members[0].pages[:2]:
        assert plan.pool.references(page) == 2
    plan.add(members[2])
    assert spans([advance(plan)]) == [[(8, 9)]]
    for member in members:
        plan.retire(member)
    assert plan.pool.free_count == plan.pool.total


def test_retiring_gives_back_rows_and_pages_in_every_state() -> None:
    plan = scheduler(rows=2)
    running, prefilling, waiting = sequence(2, 9), sequence(30, 9), sequence(2, 9)
    for member in (running, prefilling, waiting):
        plan.add(member)
        step = advance(plan)
        produce(plan, step)
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
def test_every_sequence_finishes_and_no_page_is_written_while_shared(
    sizes: list[tuple[int, int]], pages: int, rows: int, chunk: int, seed: int
) -> None:
    plan = scheduler(pages, rows, chunk)
    members = [sequence(*size) for size in sizes]
    for member in members:
        member.prompt %= 2 + seed % 3
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
        assert len(set(owned)) == plan.pool.used_count
        writable = [page for member in held for page in member.pages[member.frozen :]]
        for page in writable:
            assert owned.count(page) == plan.pool.references(page) == 1
        assert len({member.row for member in held}) == len(held) <= rows
        for member in step.decode:
            assert member.position < len(member.pages) * PAGE
        for member in produce(plan, step):
            plan.retire(member)
        if plan.running and chance.random() < 0.05:
            plan.retire(chance.choice(plan.running))
    assert plan.pool.free_count == pages
    for member in members:
        assert member.done
        assert len(member.produced) <= member.limit

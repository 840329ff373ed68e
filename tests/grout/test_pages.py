import pytest
from hypothesis import given
from hypothesis import strategies as st

from grout.errors import PageError
from grout.pages import PagePool


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_pages_have_one_holder_and_none_is_lost(
    total: int, actions: list[tuple[bool, int]]
) -> None:
    pool = PagePool(total)
    held: list[tuple[int, ...]] = []
    for allocating, size in actions:
        if allocating and size <= pool.free_count:
            held.append(pool.allocate(size))
        elif not allocating and held:
            pool.free(held.pop(size % len(held)))
        pages = [page for group in held for page in group]
        assert len(set(pages)) == len(pages)
        assert all(0 <= page < total for page in pages)
        assert pool.used_count == len(pages)
        assert pool.free_count == total - len(pages)


def test_too_many_pages_takes_none() -> None:
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(PageError, match="3 pages wanted, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.free_count == 2


def test_double_free_is_an_error_and_frees_nothing() -> None:
    pool = PagePool(4)
    first, second = pool.allocate(2), pool.allocate(1)
    pool.free(second)
    with pytest.raises(PageError, match=f"page {second[0]} is already free"):
        pool.free((*first, *second))
    assert pool.free_count == 2
    with pytest.raises(PageError, match="listed twice"):
        pool.free((first[0], first[0]))
    with pytest.raises(PageError, match="page 9 is not one of this pool's 4"):
        pool.free((9,))
    pool.free(first)
    assert pool.free_count == 4


@pytest.mark.parametrize("total", [0, -1])
def test_an_empty_pool_is_refused(total: int) -> None:
    with pytest.raises(PageError, match="at least one page"):
        PagePool(total)


def test_a_published_page_is_found_and_shared() -> None:
    pool = PagePool(4)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"a")
    assert pool.publish(first, b"a")
    assert not pool.publish(second, b"a")
    assert pool.publish(second, b"b")
    with pytest.raises(PageError, match="published with other contents"):
        pool.publish(second, b"c")
    assert pool.find([b"a", b"b", b"c"]) == (first, second)
    assert pool.find([b"c", b"a"]) == ()
    assert pool.idle_count((first, second)) == 0
    pool.share((first,))
    pool.free((first, second))
    assert (pool.references(first), pool.references(second)) == (1, 0)
    assert pool.free_count == 3
    assert pool.idle_count((first, second)) == 1
    pool.share((first, second))
    assert pool.free_count == 2
    pool.free((first, second))
    pool.free((first,))
    assert pool.free_count == pool.total
    assert pool.cached_count == 2


def test_what_cannot_be_shared_or_published_is_refused() -> None:
    pool = PagePool(2)
    with pytest.raises(PageError, match="has not been published"):
        pool.share((0,))
    with pytest.raises(PageError, match="is free and has no contents"):
        pool.publish(1, b"a")


def test_pages_without_contents_go_first_then_the_longest_unused_tail() -> None:
    pool = PagePool(5)
    pages = pool.allocate(5)
    for page in pages[:4]:
        pool.publish(page, bytes([page]))
    pool.free(pages[2:4])
    pool.free((pages[4],))
    pool.free(pages[:2])
    assert pool.allocate(1) == (4,)
    # Of pages freed together the one with the later contents.
    assert pool.allocate(2) == (3, 2)
    assert pool.find([b"\x00", b"\x01", b"\x02"]) == (0, 1)
    assert pool.cached_count == 2
    assert pool.allocate(2) == (1, 0)
    assert pool.cached_count == 0


def test_forgotten_pages_are_not_found() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.publish(pages[0], b"a")
    pool.free(pages)
    pool.forget_all()
    assert pool.find([b"a"]) == ()
    assert pool.cached_count == 0
    assert len(pool.allocate(2)) == 2


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), max_size=60))
def test_pages_ever_handed_out_are_counted(actions: list[tuple[bool, bool, int]]) -> None:
    pool = PagePool(20)
    seen: set[int] = set()
    held: list[tuple[int, ...]] = []
    for number, (take, publish, count) in enumerate(actions):
        if take and count <= pool.free_count:
            held.append(pool.allocate(count))
            seen.update(held[-1])
            if publish and count:
                pool.publish(held[-1][0], number.to_bytes(2, "big"))
        elif held:
            pool.free(held.pop(count % len(held)))
        assert pool.touched_count == len(seen)

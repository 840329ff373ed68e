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


def test_the_longest_free_page_is_reused_first() -> None:
    pool = PagePool(4)
    pages = pool.allocate(4)
    for page in (2, 0):
        pool.free((page,))
    assert pool.allocate(2) == (2, 0)
    assert pages == (0, 1, 2, 3)

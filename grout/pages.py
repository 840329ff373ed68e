"""The pool that owns every page of the KV cache."""

from collections import deque
from collections.abc import Iterable

from grout.errors import PageError


class PagePool:
    """Hands out page numbers 0..total-1; a page is with one holder until that holder frees it.

    Counts references rather than a flag a page: sharing a prefix later means raising a page's
    count, and a page goes back to the free list only when its count reaches zero.
    Freed pages go to the back of the list, so the longest-free page is reused first and a prefix
    index keyed by page may keep pointing at freed pages until they are handed out again.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise PageError(f"a page pool needs at least one page, not {total}")
        self._references = [0] * total
        self._free = deque(range(total))

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.total - self.free_count

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` free pages, now held by the caller. `PageError`, and nothing taken, if fewer."""
        if count < 0:
            raise PageError(f"cannot allocate {count} pages")
        if count > len(self._free):
            raise PageError(
                f"{count} pages wanted, {len(self._free)} of {self.total} are free; "
                "check free_count before allocating"
            )
        pages = tuple(self._free.popleft() for _ in range(count))
        for page in pages:
            self._references[page] += 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. `PageError`, and nothing freed, for a page not held or listed twice."""
        given = tuple(pages)
        if len(set(given)) != len(given):
            raise PageError(f"pages listed twice in one free: {given}")
        for page in given:
            if not 0 <= page < self.total:
                raise PageError(f"page {page} is not one of this pool's {self.total}")
            if self._references[page] == 0:
                raise PageError(f"page {page} is already free")
        for page in given:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)


__all__ = ["PagePool"]

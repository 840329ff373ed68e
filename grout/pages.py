"""The pool that owns every page of the KV cache, and knows what the pages hold."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from grout.errors import PageError


class PagePool:
    """Hands out page numbers 0..total-1 and counts who holds each.

    A page whose contents are complete can be given a *key* (`publish`) that stands for those
    contents and all before them. It can then be found by that key (`find`) and held by more than
    one (`share`). When its last holder frees it, it stays findable until it is handed out again:
    pages without a key go first, then those with one, the longest unused first.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise PageError(f"a page pool needs at least one page, not {total}")
        self._references = [0] * total
        self._touched = 0
        # In the order in which they are handed out.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def free_count(self) -> int:
        """Pages that nobody holds, with a key or without."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.total - self.free_count

    @property
    def cached_count(self) -> int:
        """Pages that have a key, held or not."""
        return len(self._keys)

    @property
    def touched_count(self) -> int:
        """Pages that have ever been handed out; memory of the others may not be taken yet."""
        return self._touched

    def references(self, page: int) -> int:
        """How many hold a page."""
        return self._references[page]

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` free pages, now held by the caller. `PageError`, and nothing taken, if fewer."""
        if count < 0:
            raise PageError(f"cannot allocate {count} pages")
        if count > len(self._free):
            raise PageError(
                f"{count} pages wanted, {len(self._free)} of {self.total} are free; "
                "check free_count before allocating"
            )
        pages = tuple(self._free.popitem(last=False)[0] for _ in range(count))
        for page in pages:
            self._forget(page)
            self._references[page] = 1
            # Pages that are new come in order.
            self._touched = max(self._touched, page + 1)
        return pages

    def publish(self, page: int, key: bytes) -> bool:
        """Make a held page findable; False, and nothing done, if another page has that key."""
        if self._references[page] == 0:
            raise PageError(f"page {page} is free and has no contents to publish")
        if self._pages.get(key, page) != page:
            return False
        if self._keys.get(page, key) != key:
            raise PageError(f"page {page} has been published with other contents")
        self._keys[page] = key
        self._pages[key] = page
        return True

    def find(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """The pages of the first keys, up to the first that is not there."""
        pages: list[int] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def idle_count(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody holds: `share` takes them from the free ones."""
        return sum(self._references[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that were found, whoever else holds them."""
        for page in pages:
            if page not in self._keys:
                raise PageError(f"page {page} has not been published and cannot be shared")
            self._free.pop(page, None)
            self._references[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. `PageError`, and nothing freed, for a page not held or listed twice.

        `pages` in the order of their contents: the last of them are handed out first, because
        without them those before are still of use.
        """
        if len(set(pages)) != len(pages):
            raise PageError(f"pages listed twice in one free: {tuple(pages)}")
        for page in pages:
            if not 0 <= page < self.total:
                raise PageError(f"page {page} is not one of this pool's {self.total}")
            if self._references[page] == 0:
                raise PageError(f"page {page} is already free")
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if page not in self._keys:
                    self._free.move_to_end(page, last=False)

    def forget_all(self) -> None:
        """Take every key away: the contents of pages cannot be relied on any more."""
        self._keys.clear()
        self._pages.clear()

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]


__all__ = ["PagePool"]

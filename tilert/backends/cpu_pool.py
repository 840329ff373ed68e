"""Threads that share out the parts of a large product.

BLAS's own threads wait for each other in spin loops: with another process on one core, each barrier
lasts until the scheduler lets go of it, and a product takes a hundred times as long. Here nothing
spins, and the calling thread depends on nobody: it takes parts itself, helpers take others as they
come, and a part that a helper does not finish soon is done again.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from tilert.errors import DeviceError

__all__ = ["THREADS_VARIABLE", "Pool", "shared_pool", "thread_count"]

THREADS_VARIABLE = "TILERT_CPU_THREADS"

# A call waits for helpers' last parts this many times as long as its own took on average, then it
# does them again.
_PATIENCE = 2.0

_MISSING = object()


class _Job:
    """Parts of one call, which threads take one by one.

    List operations are atomic, so there is no lock.
    """

    def __init__(self, compute: Callable[[int], Any], count: int) -> None:
        self.compute = compute
        self.results: list[Any] = [_MISSING] * count
        self.left = list(range(count - 1, -1, -1))
        self.done: SimpleQueue[None] = SimpleQueue()

    def work(self) -> int:
        """Computes parts until none is left to take; how many."""
        left, compute, results = self.left, self.compute, self.results
        count = 0
        while True:
            try:
                number = left.pop()
            except IndexError:
                return count
            results[number] = compute(number)
            count += 1

    def help(self) -> None:
        """`work` in a helper: what fails is left to the caller, who does it again."""
        try:
            self.work()
        except BaseException:
            return
        if not self.missing():
            self.done.put(None)

    def missing(self) -> list[int]:
        """Parts without a result."""
        return [number for number, result in enumerate(self.results) if result is _MISSING]

    def finish(self, patience: float) -> None:
        """Waits some seconds for the parts that helpers have taken, then computes them too."""
        if not self.missing():
            return
        try:
            self.done.get(timeout=patience)
        except Empty:
            for number in self.missing():
                if self.results[number] is _MISSING:
                    self.results[number] = self.compute(number)


class _Helper:
    """A thread that waits for jobs."""

    def __init__(self, idle: "list[_Helper]", name: str) -> None:
        self._idle = idle
        self._job: _Job | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def give(self, job: _Job) -> None:
        """Let it help with the job; only whoever took the helper off the idle list may."""
        self._job = job
        self._wake.release()

    def _loop(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                self._wake.acquire()
                job, self._job = self._job, None
                if job is not None:
                    job.help()
                del job
                self._idle.append(self)


class Pool:
    """`threads - 1` helpers; any number of threads may call `map` at a time.

    Attributes:
        threads: how many work on a call at most, the caller included.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._idle: list[_Helper] = []
        self._idle += [_Helper(self._idle, f"tilert-cpu-{i}") for i in range(1, threads)]

    def map(self, compute: Callable[[int], Any], count: int) -> list[Any]:
        """[compute(0), ..., compute(count - 1)], some of them at the same time.

        Args:
            compute: what it does must leave no trace but its result: it may run twice for the same
                number, and the second run may last beyond this call. What it raises in this thread
                is raised here; what it raises in a helper makes this thread try again.
        """
        if self.threads == 1 or count == 1:
            return [compute(number) for number in range(count)]
        start = time.perf_counter()
        job = _Job(compute, count)
        for _ in range(min(self.threads, count) - 1):
            try:
                helper = self._idle.pop()
            except IndexError:
                break
            helper.give(job)
        own = job.work()
        job.finish(_PATIENCE * (time.perf_counter() - start) / max(own, 1))
        return job.results


def thread_count() -> int:
    """Threads of the cpu backend: TILERT_CPU_THREADS, or the cores this process may use.

    Raises:
        DeviceError: if the variable is not a positive integer.
    """
    text = os.environ.get(THREADS_VARIABLE, "")
    if not text:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise DeviceError(
            f"{THREADS_VARIABLE} is {text!r}; it takes a number of threads, 1 or more"
        )
    return int(text)


@cache
def shared_pool() -> Pool:
    """The pool of the cpu backend, made at its first product.

    Raises:
        DeviceError: see `thread_count`.
    """
    return Pool(thread_count())


if hasattr(os, "register_at_fork"):
    # A child has none of its parent's threads.
    os.register_at_fork(after_in_child=shared_pool.cache_clear)

"""Threads that share out the parts of a large product.

BLAS's own threads wait for each other in spin loops: with another process on one core, each barrier
lasts until the scheduler lets go of it, and a product takes a hundred times as long. Here the thread
that launches takes parts itself and helpers join when they can; it waits only for parts that a
helper has begun. So contention costs at most the parts under way.
"""

import os
import threading
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

import numpy as np
from threadpoolctl import threadpool_limits

from tilert.errors import DeviceError

__all__ = ["THREADS_VARIABLE", "Pool", "shared_pool", "thread_count"]

THREADS_VARIABLE = "TILERT_CPU_THREADS"

Part = Callable[[int], None]


class _Job:
    """Parts of one call, which threads take one by one.

    List operations are atomic, so there is no lock.
    """

    def __init__(self, part: Part, count: int) -> None:
        self.part = part
        self.count = count
        self.left = list(range(count - 1, -1, -1))
        self.ended: list[BaseException | None] = []
        self.done: SimpleQueue[None] = SimpleQueue()

    def work(self) -> bool:
        """Takes parts until none is left; whether all have ended by then."""
        left, part, ended = self.left, self.part, self.ended
        while True:
            try:
                number = left.pop()
            except IndexError:
                return len(ended) == self.count
            error: BaseException | None = None
            try:
                part(number)
            except BaseException as raised:
                error = raised
            ended.append(error)

    def failure(self) -> BaseException | None:
        """An exception that a part raised."""
        return next((error for error in self.ended if error is not None), None)


class _Helper:
    """A thread that waits for jobs."""

    def __init__(self, idle: "list[_Helper]", name: str) -> None:
        self._idle = idle
        self._job: _Job | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def give(self, job: _Job) -> None:
        """Let it work on the job; only whoever took the helper off the idle list may."""
        self._job = job
        self._wake.release()

    def _loop(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                self._wake.acquire()
                job, self._job = self._job, None
                if job is not None and job.work():
                    job.done.put(None)
                del job
                self._idle.append(self)


class Pool:
    """`threads - 1` helpers; any number of threads may call `run` at a time.

    Attributes:
        threads: how many work on a call at most, the caller included.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._idle: list[_Helper] = []
        self._idle += [_Helper(self._idle, f"tilert-cpu-{i}") for i in range(1, threads)]

    def run(self, part: Part, count: int) -> None:
        """Call part(0) .. part(count - 1), each once, in any order and at the same time.

        What a part raises is raised here, when all have ended.
        """
        if self.threads == 1 or count == 1:
            for number in range(count):
                part(number)
            return
        job = _Job(part, count)
        for _ in range(min(self.threads, count) - 1):
            try:
                helper = self._idle.pop()
            except IndexError:
                break
            helper.give(job)
        if not job.work():
            # Whoever ends the last part sees that all have ended: a helper, as the caller did not.
            job.done.get()
        failure = job.failure()
        if failure is not None:
            raise failure


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
        raise DeviceError(f"{THREADS_VARIABLE} is {text!r}; it takes a number of threads, 1 or more")
    return int(text)


@cache
def shared_pool() -> Pool:
    """The pool of the cpu backend, made at its first large product.

    From then on NumPy's BLAS uses one thread in the whole process: BLAS libraries have no setting
    for single calls, and one that other threads change back and forth would be worse.

    Raises:
        DeviceError: see `thread_count`.
    """
    threads = thread_count()
    threadpool_limits(limits=1, user_api="blas")
    return Pool(threads)


if hasattr(os, "register_at_fork"):
    # A child has none of its parent's threads.
    os.register_at_fork(after_in_child=shared_pool.cache_clear)

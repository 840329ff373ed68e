"""Pinned buffers through which large copies between host and device memory stream."""

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert import driver
from tilert.device import Read

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.cuda_device import CudaDevice

__all__ = ["Staging"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Four buffers keep the link busy while the host fills or empties another one; as many again are for
# threads that read files.
_BUFFERS, _MOST_BUFFERS = 4, 8
_CHUNK = 16 * 2**20
# One thread copies at about a third of what the link takes.
_THREADS = 4


class _Slot:
    """One pinned buffer and the event after its last copy."""

    def __init__(self, device: "CudaDevice", nbytes: int) -> None:
        self.block = device.pinned_block(nbytes)
        self.host = self.block.host
        self.event = driver.create_event(timing=False)


class Staging:
    """The buffers of one device. Lock order: this lock before the device's.

    Whoever has a buffer either gives it back without waiting for another one, or has the lock.
    """

    def __init__(self, device: "CudaDevice") -> None:
        self._device = device
        # Of all buffers alike, whatever becomes of the module's number.
        self._chunk = _CHUNK
        self._lock = threading.Lock()
        # Buffers that nobody has, the one that was used last at the end.
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        self._made = 0
        self._making = threading.Lock()
        workers = min(_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tilert-staging")
        self._workers = workers

    def upload(self, target: "Array", data: Bytes) -> None:
        """Copy host bytes to a contiguous array; `data` has been read when this returns."""
        address = target.address
        with self._lock, self._device.transfer((target.storage, target.region, True)):
            for start in range(0, data.size, self._chunk):
                part = data[start : start + self._chunk]
                with self._slot() as slot:
                    self._copy(slot.host[: part.size], part)
                    self._enqueue(slot, address + start, part.size)

    def fill(self, target: "Array", read: Read) -> None:
        """Copy what `read` puts into buffers to a contiguous array; see `tilert.fill_from`."""
        address, nbytes = target.address, target.nbytes
        with self._device.transfer((target.storage, target.region, True)):
            for start in range(0, nbytes, self._chunk):
                size = min(self._chunk, nbytes - start)
                with self._slot() as slot:
                    read(start, slot.host[:size])
                    self._enqueue(slot, address + start, size)

    def download(self, data: Bytes, source: "Array") -> None:
        """Fill host bytes from a contiguous array, after all work enqueued that writes it."""
        queue, address = self._device.queue, source.address
        with self._lock, self._device.transfer((source.storage, source.region, False)):
            pending: list[tuple[_Slot, Bytes]] = []
            try:
                for start in range(0, data.size, self._chunk):
                    part = data[start : start + self._chunk]
                    if len(pending) == _BUFFERS:
                        self._drain(*pending.pop(0))
                    slot = self._take()
                    pending.append((slot, part))
                    with self._device.lock:
                        driver.copy_to_host(slot.block.address, address + start, part.size, queue)
                        driver.record_event(slot.event, queue)
                while pending:
                    self._drain(*pending.pop(0))
            finally:
                for slot, _ in pending:
                    self._slots.put(slot)

    def _take(self) -> _Slot:
        """A buffer that no copy uses any more."""
        slot = self._idle()
        try:
            driver.wait_event(slot.event)
        except BaseException:
            self._slots.put(slot)
            raise
        return slot

    def _idle(self) -> _Slot:
        # As many as keep the link busy before one is used again.
        for most in (_BUFFERS, _MOST_BUFFERS):
            with self._making:
                if self._made < most:
                    slot = _Slot(self._device, self._chunk)
                    self._made += 1
                    return slot
            with contextlib.suppress(Empty):
                return self._slots.get_nowait()
        return self._slots.get()

    @contextlib.contextmanager
    def _slot(self) -> Iterator[_Slot]:
        slot = self._take()
        try:
            yield slot
        finally:
            self._slots.put(slot)

    def _enqueue(self, slot: _Slot, address: int, size: int) -> None:
        queue = self._device.queue
        with self._device.lock:
            driver.copy_to_device(address, slot.block.address, size, queue)
            driver.record_event(slot.event, queue)

    def _drain(self, slot: _Slot, part: Bytes) -> None:
        try:
            driver.wait_event(slot.event)
            self._copy(part, slot.host[: part.size])
        finally:
            self._slots.put(slot)

    def _copy(self, target: Bytes, source: Bytes) -> None:
        if target.size < 2**20:
            np.copyto(target, source)
            return
        list(self._pool.map(np.copyto, self._cut(target), self._cut(source)))

    def _cut(self, data: Bytes) -> Iterator[Bytes]:
        step = -(-data.size // self._workers)
        return (data[start : start + step] for start in range(0, data.size, step))

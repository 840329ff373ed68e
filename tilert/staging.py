"""Pinned buffers through which large copies between host and device memory stream."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert import driver

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.cuda_device import CudaDevice

__all__ = ["Staging"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Four buffers keep the link busy while the host fills or empties another one.
_BUFFERS = 4
_CHUNK = 16 * 2**20
# One thread copies at about a third of what the link takes.
_THREADS = 4


class _Slot:
    """One pinned buffer and the event after its last copy."""

    def __init__(self, device: "CudaDevice") -> None:
        self.block = device.pinned_block(_CHUNK)
        self.host = self.block.host
        self.event = driver.create_event(timing=False)


class Staging:
    """The buffers of one device. Lock order: this lock before the device's."""

    def __init__(self, device: "CudaDevice") -> None:
        self._device = device
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._next = 0
        workers = min(_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tilert-staging")
        self._workers = workers

    def upload(self, target: "Array", data: Bytes) -> None:
        """Copy host bytes to a contiguous array; `data` has been read when this returns."""
        queue, address = self._device.queue, target.address
        with self._lock, self._device.transfer((target.storage, target.region, True)):
            for start in range(0, data.size, _CHUNK):
                part = data[start : start + _CHUNK]
                slot = self._take()
                driver.wait_event(slot.event)
                self._copy(slot.host[: part.size], part)
                with self._device.lock:
                    driver.copy_to_device(address + start, slot.block.address, part.size, queue)
                    driver.record_event(slot.event, queue)

    def download(self, data: Bytes, source: "Array") -> None:
        """Fill host bytes from a contiguous array, after all work enqueued that writes it."""
        queue, address = self._device.queue, source.address
        with self._lock, self._device.transfer((source.storage, source.region, False)):
            pending: list[tuple[_Slot, Bytes]] = []
            for start in range(0, data.size, _CHUNK):
                part = data[start : start + _CHUNK]
                if len(pending) == _BUFFERS:
                    self._drain(*pending.pop(0))
                slot = self._take()
                driver.wait_event(slot.event)
                with self._device.lock:
                    driver.copy_to_host(slot.block.address, address + start, part.size, queue)
                    driver.record_event(slot.event, queue)
                pending.append((slot, part))
            for slot, part in pending:
                self._drain(slot, part)

    def _take(self) -> _Slot:
        if not self._slots:
            self._slots = [_Slot(self._device) for _ in range(_BUFFERS)]
        self._next = (self._next + 1) % _BUFFERS
        return self._slots[self._next]

    def _drain(self, slot: _Slot, part: Bytes) -> None:
        driver.wait_event(slot.event)
        self._copy(part, slot.host[: part.size])

    def _copy(self, target: Bytes, source: Bytes) -> None:
        if target.size < 2**20:
            np.copyto(target, source)
            return
        list(self._pool.map(np.copyto, self._cut(target), self._cut(source)))

    def _cut(self, data: Bytes) -> Iterator[Bytes]:
        step = -(-data.size // self._workers)
        return (data[start : start + step] for start in range(0, data.size, step))

"""Arrays to and from other libraries, without copies and with ownership kept (rules O3 and O5)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.borrowed import borrow
from tilert.device import Device
from tilert.device import device as find_device
from tilert.dlpack import CPU, CUDA, make_capsule, take_capsule
from tilert.dtypes import dtype_of
from tilert.errors import DeviceError
from tilert.loan import Loan

if TYPE_CHECKING:
    from tilert.array import Array

__all__ = ["dlpack_device", "export_dlpack", "from_cuda_array", "from_dlpack"]


def from_dlpack(source: Any, device: Device | None = None, readonly: bool = False) -> "Array":
    """The memory of another library's array as an array, without a copy.

    It may be partitioned and read like any array, and holds the other's memory until it and its
    views are dropped and all work on them is complete. Meanwhile the other library must not write
    it (nor read it while ops here write it): wait with `Device.synchronize` before it does.

    Args:
        source: has `__dlpack__` and `__dlpack_device__`, or is a NumPy array of any type that
            kernels have.
        device: where the memory is; found out from `source` by default.
        readonly: whether it is only read here, so that it may be imported more than once.

    Raises:
        TypeError: if `source` has no DLPack, or elements that kernels have no type for.
        OwnershipError: if the memory is imported or lent already, and either may write it (O3).
        DeviceError: if it is on another device than `device`, or on none that is known.
    """
    from tilert.array import Array

    if isinstance(source, Array):
        raise TypeError(f"{source!r} is an array of tilert already; use it, or a view of it")
    if isinstance(source, np.ndarray) and source.dtype.isbuiltin != 1:
        return _from_numpy(source, _checked(CPU, 0, device), readonly)
    if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
        raise TypeError(
            f"from_dlpack takes an object with __dlpack__, got {type(source).__name__};"
            " tilert.from_numpy(value, device) copies host data"
        )
    kind, number = source.__dlpack_device__()
    found = _checked(int(kind), int(number), device)
    asked = {} if kind == CPU else {"stream": int(found.queue or 0)}
    try:
        capsule = source.__dlpack__(max_version=(1, 0), **asked)
    except TypeError:
        # A producer of before version 1.
        capsule = source.__dlpack__(**asked)
    tensor = take_capsule(capsule)
    if tensor.dtype is None:
        tensor.release()
        raise TypeError(f"kernels have no type for elements of {tensor.shown}; convert them first")
    return borrow(
        found,
        tensor.address,
        tensor.shape,
        tensor.strides,
        tensor.dtype,
        not (readonly or tensor.read_only),
        tensor.release,
    )


def _from_numpy(source: np.ndarray[Any, Any], device: Device, readonly: bool) -> "Array":
    """NumPy's DLPack leaves out the types of ml_dtypes."""
    dtype = dtype_of(source.dtype)
    kept = [source]
    steps = [stride for n, stride in zip(source.shape, source.strides, strict=True) if n > 1]
    if any(step % dtype.itemsize for step in steps):
        raise DeviceError(f"strides {source.strides} are not multiples of {dtype.itemsize} bytes")
    strides = tuple([stride // dtype.itemsize for stride in source.strides])
    write = source.flags.writeable and not readonly
    return borrow(device, source.ctypes.data, source.shape, strides, dtype, write, kept.clear)


def from_cuda_array(source: Any, device: Device | None = None, readonly: bool = False) -> "Array":
    """As `from_dlpack`, for an object with `__cuda_array_interface__`.

    Raises:
        As `from_dlpack`.
    """
    given = getattr(source, "__cuda_array_interface__", None)
    if given is None:
        raise TypeError(
            f"from_cuda_array takes an object with __cuda_array_interface__, got"
            f" {type(source).__name__}"
        )
    if given.get("mask") is not None:
        raise TypeError("from_cuda_array takes no masked arrays")
    dtype = dtype_of(np.dtype(given["typestr"]))
    address, read_only = given["data"]
    found = device if device is not None else _owner(address)
    found.wait_for_stream(given.get("stream"))
    shape, size = tuple(given["shape"]), dtype.itemsize
    steps = given.get("strides")
    if steps is None:
        steps = [size] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            steps[axis] = steps[axis + 1] * shape[axis + 1]
    if any(step % size for n, step in zip(shape, steps, strict=True) if n > 1):
        raise DeviceError(f"strides {tuple(steps)} are not multiples of {size} bytes")
    kept = [source]
    strides = tuple([step // size for step in steps])
    return borrow(found, address, shape, strides, dtype, not (readonly or read_only), kept.clear)


def _owner(address: int) -> Device:
    from tilert import driver

    return find_device(f"cuda:{driver.pointer_device(address)}" if address else "cuda")


def _checked(kind: int, number: int, device: Device | None) -> Device:
    """The device of the standard's numbers, which `device` must be if it is given."""
    if kind not in (CPU, CUDA):
        raise DeviceError(f"memory of DLPack device type {kind} cannot be used; copy it to the cpu")
    name = "cpu" if kind == CPU else f"cuda:{number}"
    if device is None:
        return find_device(name)
    if device.name != name:
        raise DeviceError(
            f"the memory is on {name}, not on {device.name}; import it there and copy_from it"
        )
    return device


def dlpack_device(array: "Array") -> tuple[int, int]:
    """Device type and number of the standard.

    Raises:
        DeviceError: if the array has no memory that others could use.
    """
    kind, _, number = array.device.name.partition(":")
    if kind == "cpu":
        return CPU, 0
    if kind != "cuda":
        raise DeviceError(f"{array.device.name} only compiles; its arrays cannot be lent")
    return CUDA, int(number)


def export_dlpack(
    array: "Array",
    stream: Any,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> Any:
    """What `Array.__dlpack__` gives."""
    from tilert.array import empty

    where = dlpack_device(array)
    if where[0] == CPU and stream is not None:
        raise BufferError("an array of the cpu has no stream")
    if dl_device is not None and tuple(dl_device) != where:
        raise BufferError(
            f"the array is on {array.device.name}; copy it with .numpy() or copy_from first"
        )
    if copy:
        own = empty(array.shape, array.dtype, array.device)
        own.copy_from(array)
        array = own
    versioned = max_version is not None and max_version[0] >= 1
    write = not array.readonly and not array.region.overlaps_itself
    if not write and not versioned:
        raise BufferError(
            "the array may only be read, which DLPack says from version 1 on; ask for"
            " max_version=(1, 0) or for a copy"
        )
    return make_capsule(Loan(array, write, "DLPack"), where, versioned, bool(copy))

"""DLPack and the CUDA array interface: no copies, and rules O3 and O5 go on to hold."""

import ctypes
import gc
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilert
from tests.tilert.host_fakes import FakeCpu, add_one
from tilert import DeviceError, LaunchError, MovedError, OwnershipError, from_dlpack
from tilert.dlpack import take_capsule
from tilert.dtypes import DTYPES
from tilert.target_device import TargetDevice

cpu = tilert.device("cpu")
BY_DLPACK = (np.float32, np.float16, np.int64, np.int32, np.int8, np.uint32, np.uint8, np.bool_)
BY_NUMPY = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


class Producer:
    """An object with DLPack's two methods and nothing else; `old` knows no version 1."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0), old: bool = False):
        self.array, self.device, self.old = array, device, old

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **asked: Any) -> Any:
        if self.old and asked:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**asked)


def lines(array: np.ndarray) -> tuple[int, ...]:
    return tuple(s // array.itemsize for s in array.strides)


@pytest.mark.parametrize("dtype", BY_DLPACK + BY_NUMPY)
def test_every_dtype_comes_in_without_a_copy(dtype: Any) -> None:
    host = np.arange(24).reshape(4, 6).astype(dtype)[1:, ::2]
    array = from_dlpack(host)
    assert (array.shape, array.strides) == (host.shape, lines(host))
    assert array.address == host.ctypes.data
    np.testing.assert_array_equal(array.numpy(), host)
    array.copy_from(np.zeros((3, 3), dtype))
    assert not host.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_every_dtype_goes_out_and_in_again(dtype: tilert.DType, version: Any) -> None:
    array = tilert.from_numpy(np.arange(12).reshape(3, 4).astype(dtype.numpy), cpu)[1:].T
    assert array.__dlpack_device__() == (1, 0)
    tensor = take_capsule(array.__dlpack__(max_version=version))
    assert (tensor.dtype, tensor.shape, tensor.strides) == (dtype, (4, 2), (1, 4))
    assert (tensor.address, tensor.device, tensor.read_only) == (array.address, (1, 0), False)
    with pytest.raises(MovedError):
        array.numpy()
    tensor.release()
    assert array.numpy().shape == (4, 2)


@pytest.mark.parametrize(
    "host",
    [
        np.full((), 7, np.float32),
        np.zeros((3, 0, 2), np.float32),
        np.arange(10, dtype=np.float32)[::-1],
        np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1),
        np.broadcast_to(np.arange(3, dtype=np.float32), (2, 3)).copy()[:, 1:2],
    ],
    ids=["scalar", "empty", "reversed", "permuted", "cut"],
)
@pytest.mark.parametrize("old", [False, True])
def test_shapes_and_strides(host: np.ndarray, old: bool) -> None:
    host = host.astype(np.float32)
    array = from_dlpack(Producer(host, old=old))
    assert array.shape == host.shape
    np.testing.assert_array_equal(array.numpy(), host)
    back = np.from_dlpack(array)
    np.testing.assert_array_equal(back, host)


def test_memory_goes_back_when_the_last_view_is_dropped() -> None:
    host = np.ones(10, np.float32)
    before = sys.getrefcount(host)
    for make in (lambda: host, lambda: Producer(host), lambda: Producer(host, old=True)):
        array = from_dlpack(make())
        view = array[2:4]
        del array
        assert sys.getrefcount(host) > before
        del view
        assert sys.getrefcount(host) == before
    half = np.ones(10, ml_dtypes.bfloat16)
    before = sys.getrefcount(half)
    array = from_dlpack(half)
    assert sys.getrefcount(half) == before + 1
    del array
    assert sys.getrefcount(half) == before


def test_a_borrowed_array_is_leased_like_our_own() -> None:
    host = np.zeros((4, 8), np.float32)
    dev = FakeCpu()
    y, x = from_dlpack(host, dev), tilert.full((4, 8), 2, tilert.f32, dev)
    kernel = add_one()
    with pytest.raises(
        OwnershipError, match="O3 alias xor mutate: argument 'x' of kernel 'add_one"
    ):
        kernel(y[:3].partition(1, 8), y[1:])
    op = kernel(y.partition(1, 8), x)
    with pytest.raises(MovedError, match=r"O5 move: .* is held by op 'add_one'"):
        y.numpy()
    assert op.run() is y
    assert (host == 3).all()


def test_importing_twice_is_refused_where_either_may_write() -> None:
    host = np.zeros((4, 6), np.float32)
    first = from_dlpack(host[:, :4])
    line = sys._getframe().f_lineno - 1
    message = (
        f"O3 alias xor mutate: the memory is borrowed already, at {__file__}:{line}, and one of the"
        " two may write it; use the array from there, or let both only read"
    )
    for again in (host, Producer(host, old=True), host[:, 3:], host.T[3], host.view(np.int32)):
        for readonly in (False, True):
            with pytest.raises(OwnershipError) as caught:
                from_dlpack(again, readonly=readonly)
            assert str(caught.value) == message
    # Exactly: what does not overlap is another array.
    assert from_dlpack(host[:, 4:]).shape == (4, 2)
    del first
    one, two = from_dlpack(host, readonly=True), from_dlpack(host, readonly=True)
    with pytest.raises(OwnershipError, match="O3 alias xor mutate: the memory is borrowed already"):
        from_dlpack(host)
    with pytest.raises(OwnershipError) as refused:
        one.partition(1, 6)
    assert str(refused.value) == (
        "partition: O3 alias xor mutate: this array borrows memory that may only be read; copy it"
        " into an array of its own to write"
    )
    np.testing.assert_array_equal(one.numpy(), two.numpy())


slices = st.slices(6).filter(lambda s: (s.step or 1) > 0)


@given(st.tuples(slices, slices), st.tuples(slices, slices), st.booleans(), st.booleans())
def test_overlap_across_imports_is_exact(one: tuple, two: tuple, a: bool, b: bool) -> None:
    host = np.arange(36, dtype=np.int32).reshape(6, 6)
    shared = set(host[one].flat) & set(host[two].flat)
    first = from_dlpack(host[one], readonly=a)
    if shared and not (a and b):
        with pytest.raises(OwnershipError, match="O3 alias xor mutate"):
            from_dlpack(host[two], readonly=b)
    else:
        np.testing.assert_array_equal(from_dlpack(host[two], readonly=b).numpy(), host[two])
    del first


def test_read_only_arrays_stay_read_only() -> None:
    host = np.arange(6, dtype=np.float32)
    host.flags.writeable = False
    array, again = from_dlpack(host), from_dlpack(host[2:])
    with pytest.raises(OwnershipError, match="copy_from: O3 alias xor mutate: this array borrows"):
        array.copy_from(np.zeros(6, np.float32))
    out = np.from_dlpack(again)
    assert not out.flags.writeable
    half = np.arange(6).astype(ml_dtypes.bfloat16)
    half.flags.writeable = False
    with pytest.raises(OwnershipError, match="may only be read"):
        from_dlpack(half).partition(6)


def test_lent_to_a_writer_nobody_else_has_it() -> None:
    a = tilert.from_numpy(np.arange(8, dtype=np.float32), cpu)
    lent = np.from_dlpack(a[:6])
    line = sys._getframe().f_lineno - 1
    want = (
        f"O5 move: array of shape [8] is held by a borrower: it was lent through DLPack at"
        f" {__file__}:{line}; drop what was made of it to have it back"
    )
    for use in (
        a.numpy,
        lambda: a.partition(4),
        lambda: a.copy_from(np.zeros(8, np.float32)),
        lambda: np.from_dlpack(a),
        a.lend,
    ):
        with pytest.raises(MovedError) as caught:
            use()
        assert str(caught.value) == want
    a[6:].partition(1)
    lent[0] = 50
    view = lent[:2]
    del lent
    with pytest.raises(MovedError):
        a.numpy()
    del view
    assert a.numpy()[0] == 50


def test_lent_to_a_reader_both_read() -> None:
    a = tilert.from_numpy(np.arange(8, dtype=np.float32), FakeCpu())
    first = np.from_dlpack(a.as_readonly("a table"))
    second = np.from_dlpack(a.as_readonly("a table"))
    assert not first.flags.writeable
    y = tilert.zeros(8, tilert.f32, a.device)
    add_one()(y.partition(4), a).run()
    np.testing.assert_array_equal(y.numpy(), first + 1)
    with pytest.raises(MovedError) as caught:
        a.partition(4)
    assert "is held by a borrower: it was lent, to be read only by both, through DLPack at" in str(
        caught.value
    )
    with pytest.raises(MovedError):
        np.from_dlpack(a)
    del first
    with pytest.raises(MovedError):
        a.copy_from(np.zeros(8, np.float32))
    del second
    a.copy_from(np.zeros(8, np.float32))


def test_a_moved_array_is_not_lent() -> None:
    a = tilert.zeros(8, tilert.f32, cpu)
    part = a.partition(4)
    for lend in (lambda: np.from_dlpack(a), a.lend):
        with pytest.raises(MovedError, match=r"O5 move: .* is held by a partition made at"):
            lend()
    del part
    graph_device = FakeCpu()
    b = tilert.zeros(8, tilert.f32, graph_device)
    with pytest.raises(LaunchError, match="O6 graphs: lending an array cannot be part of a captur"):
        tilert.capture(graph_device, lambda: np.from_dlpack(b))
    b.numpy()


def test_a_loan_that_fails_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps the error keeps the loan that was not made."""
    dev = FakeCpu()
    a = tilert.zeros(8, tilert.f32, dev)

    def lost() -> None:
        raise DeviceError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(dev, "synchronize", lost)
        with pytest.raises(DeviceError, match="lost") as caught:
            a.lend()
    a.copy_from(np.ones(8, np.float32))
    assert caught.value.__traceback__ is not None
    loan = a.lend()
    with pytest.raises(MovedError):
        a.numpy()
    del loan
    assert (a.numpy() == 1).all()


def test_what_was_lent_out_is_not_imported_to_be_written() -> None:
    a = tilert.zeros((2, 4), tilert.f32, cpu)
    lent = np.from_dlpack(a)
    with pytest.raises(
        OwnershipError, match="O3 alias xor mutate: the memory is lent through DLPa"
    ):
        from_dlpack(lent[:, 1:])
    del lent
    reader = np.from_dlpack(a.as_readonly("shared"))
    again = from_dlpack(reader)
    del reader
    with pytest.raises(MovedError):
        a.partition(1, 4)
    np.testing.assert_array_equal(again.numpy(), a.numpy())
    del again
    a.partition(1, 4)


def test_capsules_that_nobody_takes() -> None:
    a = tilert.zeros(4, tilert.f32, cpu)
    capsule = a.__dlpack__()
    with pytest.raises(MovedError):
        a.numpy()
    del capsule
    a.numpy()
    capsule = a.__dlpack__(max_version=(1, 0))
    tensor = take_capsule(capsule)
    with pytest.raises(TypeError, match="gave no DLPack capsule, or one that was used already"):
        take_capsule(capsule)
    del capsule
    with pytest.raises(MovedError):
        a.numpy()
    # Consumers let go in threads of their own.
    thread = threading.Thread(target=tensor.release)
    thread.start()
    thread.join()
    a.numpy()


def test_what_dlpack_asks_for() -> None:
    a = tilert.from_numpy(np.arange(4, dtype=np.float32), cpu)
    copy = np.from_dlpack(a, copy=True)
    np.testing.assert_array_equal(copy, a.numpy())
    wide = np.from_dlpack(a.reshape(1, 4).broadcast_to(3, 4))
    assert wide.strides == (0, 4) and not wide.flags.writeable
    del wide
    with pytest.raises(
        BufferError, match="the array may only be read, which DLPack says from vers"
    ):
        a.as_readonly("x").__dlpack__()
    with pytest.raises(BufferError, match="an array of the cpu has no stream"):
        a.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="the array is on cpu; copy it"):
        a.__dlpack__(dl_device=(2, 0))
    with pytest.raises(AttributeError, match="is in host memory and has no __cuda_array_interface"):
        a.lend().__cuda_array_interface__  # noqa: B018
    gc.collect()
    a.numpy()


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            3,
            TypeError,
            "from_dlpack takes an object with __dlpack__, got int; tilert.from_numpy(val",
        ),
        (
            np.zeros(3),
            TypeError,
            "kernels have no type for elements of float64; convert them first",
        ),
        (
            np.zeros(3, np.complex64),
            TypeError,
            "kernels have no type for elements of complex64; con",
        ),
        (
            Producer(np.zeros(3), (10, 0)),
            DeviceError,
            "memory of DLPack device type 10 cannot be us",
        ),
        (
            np.zeros(9, np.uint8)[1:].view(np.float32),
            DeviceError,
            "is not aligned to the 4 bytes of f32",
        ),
        (np.zeros((3, 2), "V3"), TypeError, "numpy dtype |V3 has no tilert type"),
    ],
)
def test_what_cannot_come_in(source: Any, error: type[Exception], message: str) -> None:
    before = sys.getrefcount(source)
    with pytest.raises(error) as caught:
        from_dlpack(source)
    assert message in str(caught.value)
    del caught
    gc.collect()
    assert sys.getrefcount(source) == before


def test_devices_must_agree() -> None:
    target = TargetDevice("sm_80")
    with pytest.raises(DeviceError) as caught:
        from_dlpack(np.zeros(3, np.float32), target)
    assert str(caught.value) == (
        "the memory is on cpu, not on target:sm_80; import it there and copy_from it"
    )
    with pytest.raises(DeviceError, match="target:sm_80 only compiles; its arrays cannot be lent"):
        tilert.zeros(3, tilert.f32, target).__dlpack_device__()
    with pytest.raises(TypeError, match="is an array of tilert already; use it"):
        from_dlpack(tilert.zeros(3, tilert.f32, cpu))


def test_later_versions_are_refused() -> None:
    class Later:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: Any) -> Any:
            self.capsule = np.zeros(3, np.float32).__dlpack__(max_version=(1, 0))
            pointer = ctypes.pythonapi.PyCapsule_GetPointer(id(self.capsule), b"dltensor_versioned")
            ctypes.c_uint32.from_address(pointer).value = 2
            return self.capsule

    with pytest.raises(TypeError, match=r"DLPack 2\.0 is not known; 1\.x is"):
        from_dlpack(Later())


# The CUDA array interface, on a device that only counts its memory


class CudaProducer:
    def __init__(self, **changed: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (4, 6),
            "strides": None,
            "typestr": "<f4",
            "data": (1 << 44, False),
            "stream": None,
            **changed,
        }


def test_cuda_arrays_come_in() -> None:
    device = TargetDevice("sm_80")
    source = CudaProducer()
    before = sys.getrefcount(source)
    array = tilert.from_cuda_array(source, device)
    assert (array.shape, array.strides, array.dtype) == ((4, 6), (6, 1), tilert.f32)
    assert array.address == 1 << 44 and sys.getrefcount(source) == before + 1
    shifted = CudaProducer(data=((1 << 44) + 4, False), shape=(4, 2), strides=(24, 8))
    with pytest.raises(OwnershipError, match="O3 alias xor mutate: the memory is borrowed already"):
        tilert.from_cuda_array(shifted, device)
    array.partition(1, 6)
    del array
    assert sys.getrefcount(source) == before
    again = tilert.from_cuda_array(shifted, device, readonly=True)
    assert again.strides == (6, 2)
    with pytest.raises(OwnershipError, match="may only be read"):
        again.partition(1, 2)
    marked = tilert.from_cuda_array(CudaProducer(data=(1 << 45, True)), device)
    with pytest.raises(OwnershipError, match="may only be read"):
        marked.partition(1, 6)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "from_cuda_array takes an object with __cuda_array_interface__, got int"),
        (CudaProducer(mask=object()), "from_cuda_array takes no masked arrays"),
        (CudaProducer(typestr="<f8"), "numpy dtype float64 has no tilert type"),
    ],
)
def test_wrong_cuda_arrays(source: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        tilert.from_cuda_array(source, TargetDevice("sm_80"))
    assert message in str(caught.value)


def test_wrong_cuda_strides() -> None:
    with pytest.raises(DeviceError, match=r"strides \(24, 6\) are not multiples of 4 bytes"):
        tilert.from_cuda_array(CudaProducer(strides=(24, 6)), TargetDevice("sm_80"))


def test_cuda_loans() -> None:
    device = TargetDevice("sm_80")
    array = tilert.zeros((4, 6), tilert.f32, device)
    loan = array[1:, ::2].lend()
    assert loan.__cuda_array_interface__ == {
        "version": 3,
        "shape": (3, 3),
        "strides": (24, 8),
        "typestr": "<f4",
        "data": (array.address + 24, False),
        "stream": None,
    }
    with pytest.raises(MovedError, match=r"it was lent through lend\(\) at"):
        array.partition(1, 6)
    with pytest.raises(
        OwnershipError, match="O3 alias xor mutate: the memory is lent through lend"
    ):
        tilert.from_cuda_array(loan, device)
    del loan
    reading = array.lend(write=False)
    assert reading.__cuda_array_interface__["data"] == (array.address, True)
    with pytest.raises(MovedError):
        array.partition(1, 6)
    again = tilert.from_cuda_array(reading, device)
    del reading, again
    array.partition(1, 6)
    half = tilert.zeros(4, tilert.bf16, device).lend()
    with pytest.raises(DeviceError, match="the CUDA array interface has no type for bf16; use DLP"):
        half.__cuda_array_interface__  # noqa: B018
    with pytest.raises(OwnershipError, match="lending to a writer: a table"):
        array.as_readonly("a table").lend(write=True)


@pytest.mark.gpu
def test_both_protocols_on_a_gpu() -> None:
    device = tilert.device("cuda")
    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = tilert.from_numpy(host, device)

    class Relay:
        """Hands our own capsule on, as another library on the same GPU would."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return array.__dlpack_device__()

        def __dlpack__(self, **asked: Any) -> Any:
            return array.as_readonly("lent").__dlpack__(**asked)

    for again in (
        from_dlpack(Relay()),
        tilert.from_cuda_array(array.lend(write=False)),
    ):
        assert again.device is device and again.address == array.address
        np.testing.assert_array_equal(again.numpy(), host)
        with pytest.raises(MovedError):
            array.partition(1, 6)
    del again
    device.synchronize()
    array.partition(1, 6)

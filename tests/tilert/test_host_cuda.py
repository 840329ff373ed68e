"""The cuda device on a GPU: copies, memory, launches, graphs, threads."""

import asyncio
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.host_fakes import FakeKernel, const, mut, ref
from tilert import DeviceError, LaunchError, MovedError, ir, kernel_launch, nvrtc
from tilert.cuda_device import CudaDevice, CudaLauncher

pytestmark = pytest.mark.gpu

SOURCE = """
extern "C" __global__ void add_one(float* y, const float* x, int rows, int delay, int cols) {
  extern __shared__ float scratch[];
  if (delay) { long long t = clock64(); while (clock64() - t < delay * 1000000LL) {} }
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += gridDim.x * blockDim.x)
    y[i] = x[i] + 1.0f;
}
extern "C" __global__ void scatter(float* y, const int* map, const float* x) {
  if (map[blockIdx.x] >= 0) y[map[blockIdx.x] * 4 + threadIdx.x] = x[blockIdx.x * 4 + threadIdx.x];
}
"""


class CudaKernel(FakeKernel):
    """A kernel from `SOURCE`; the parameters of its function are the given ones of the ABI."""

    def __init__(self, name: str, decls: list, shared_bytes: int = 0) -> None:
        super().__init__(name, decls)
        self.shared_bytes = shared_bytes


@pytest.fixture(scope="module")
def dev() -> Iterator[CudaDevice]:
    """A device of its own, whose kernels come from CUDA source."""

    class Device(CudaDevice):
        def compile(self, function: ir.Function) -> CudaLauncher:
            kernel: Any = function.options["fake"]
            cubin = nvrtc.compile(SOURCE, kernel.name, self.arch)
            self.enter()
            handle = kernel_launch.load_function(cubin, kernel.name, kernel.shared_bytes)
            launcher = CudaLauncher(self, function, handle, 4, kernel.shared_bytes)
            consts = kernel.seen[-1][2]
            bind = launcher.bind

            def with_consts(arrays: Any, maps: Any, grid: Any) -> Any:
                call: Any = bind(arrays, maps, grid)
                packed = call.__self__.values
                values = [*packed[: len(packed) // 2], *[value for _, value in consts]]
                launch = kernel_launch.Launch(
                    handle, int(np.prod(grid)), 4, kernel.shared_bytes, values
                )
                return launch.enqueue

            launcher.bind = with_consts  # type: ignore[method-assign]
            return launcher

        def begin_compile(self, function: ir.Function) -> Callable[[], CudaLauncher]:
            return functools.partial(self.compile, function)

    device = Device(0)
    yield device
    device.synchronize()


def add_one(shared_bytes: int = 0) -> CudaKernel:
    decls = [mut("y"), ref("x", 0), const("delay"), const("cols")]
    return CudaKernel("add_one", decls, shared_bytes)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_info(dev: CudaDevice) -> None:
    info = dev.info()
    assert info["kind"] == "cuda"
    assert info["name"]
    assert info["arch"] == dev.arch
    assert info["multiprocessors"] > 0
    assert tilert.device("cuda") is tilert.device("cuda:0")
    assert tilert.device("auto").kind == "cuda"
    with pytest.raises(DeviceError, match="there is no cuda:99: the driver shows"):
        tilert.device("cuda:99")


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 2**16, 2**16 + 4, 3 * 2**20, 100 * 2**20 + 12])
def test_round_trip(dev: CudaDevice, nbytes: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    array = tilert.from_numpy(data, dev)
    np.testing.assert_array_equal(array.numpy(), data)
    other = tilert.empty(nbytes, tilert.u8, dev)
    other.copy_from(array)
    np.testing.assert_array_equal(other.numpy(), data)


def test_dtypes_and_views(dev: CudaDevice) -> None:
    data = numbers(6, 8, 10).astype(ml_dtypes.bfloat16)
    array = tilert.from_numpy(data, dev)
    assert array.address % 256 == 0
    np.testing.assert_array_equal(array[1:5:2, ::3].numpy(), data[1:5:2, ::3])
    np.testing.assert_array_equal(array.T.numpy(), data.T)
    array[:, 2, 1:4].copy_from(np.ones((6, 3), ml_dtypes.bfloat16))
    data[:, 2, 1:4] = 1
    np.testing.assert_array_equal(array.numpy(), data)
    np.testing.assert_array_equal(
        array[0, 0].broadcast_to(3, 10).numpy(), np.broadcast_to(data[0, 0], (3, 10))
    )
    np.testing.assert_array_equal(tilert.from_numpy(data.T, dev).numpy(), data.T)


index = st.one_of(st.integers(-4, 3), st.slices(4).filter(lambda s: s.step is None or s.step > 0))


@settings(max_examples=60, deadline=None)
@given(st.lists(index, max_size=3), st.permutations([0, 1, 2]))
def test_strided_copies(keys: list, axes: list[int]) -> None:
    dev = tilert.device("cuda")
    data, other = numbers(4, 4, 4), -numbers(4, 4, 4) - 1
    a, b = tilert.from_numpy(data, dev), tilert.from_numpy(other, dev)
    b[tuple(keys)].copy_from(a.permute(*axes)[tuple(keys)])
    other[tuple(keys)] = data.transpose(axes)[tuple(keys)]
    np.testing.assert_array_equal(b.numpy(), other)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.int64])
def test_fill(dev: CudaDevice, dtype: type) -> None:
    kind = tilert.from_numpy(np.zeros(1, dtype), dev).dtype
    assert (tilert.zeros((3, 5), kind, dev).numpy() == 0).all()
    np.testing.assert_array_equal(
        tilert.full((3, 5), 77, kind, dev).numpy(), np.full((3, 5), 77, dtype)
    )
    if dtype is np.int64:
        value = -(2**40) - 3
        assert (tilert.full(5, value, kind, dev).numpy() == value).all()


def test_launch(dev: CudaDevice) -> None:
    kernel = add_one()
    x = tilert.from_numpy(numbers(100, 8), dev)
    y = tilert.empty((100, 8), tilert.f32, dev)
    for _ in range(3):
        y = kernel(y.partition(1, 8), x, 0, 8).sync()
    np.testing.assert_array_equal(y.numpy(), numbers(100, 8) + 1)
    assert len(kernel.seen) == 1


def test_large_shared_memory(dev: CudaDevice) -> None:
    x, y = tilert.zeros((4, 8), tilert.f32, dev), tilert.zeros((4, 8), tilert.f32, dev)
    add_one(96 * 1024)(y.partition(1, 8), x, 0, 8).sync()
    assert (y.numpy() == 1).all()


def test_index_map(dev: CudaDevice) -> None:
    scatter = CudaKernel("scatter", [mut("y"), ref("x")])
    y, x = tilert.zeros((5, 4), tilert.f32, dev), tilert.from_numpy(numbers(3, 4), dev)
    index = tilert.UniqueIndex.checked(np.array([4, -1, 0]), dev)
    scatter(y.partition_at(index, 1, 4), x).run()
    want = np.zeros((5, 4), np.float32)
    want[[4, 0]] = numbers(3, 4)[[0, 2]]
    np.testing.assert_array_equal(y.numpy(), want)


def test_copies_are_ordered_with_kernels(dev: CudaDevice) -> None:
    kernel = add_one()
    x, y = tilert.zeros((4, 8), tilert.f32, dev), tilert.empty((4, 8), tilert.f32, dev)
    values = np.empty((4, 8), np.float32)
    results = []
    for i in range(5):
        values[:] = i
        x.copy_from(values)
        values[:] = -1
        out = kernel(y.partition(1, 8), x, 20, 8).run()
        copy = tilert.empty((4, 8), tilert.f32, dev)
        copy.copy_from(out)
        results.append(copy)
    event = dev.record_event()
    assert not event.done()
    event.wait()
    assert event.done()
    assert [r.numpy()[0, 0] for r in results] == [1, 2, 3, 4, 5]


def test_free_waits_for_the_kernel(dev: CudaDevice) -> None:
    kernel = add_one()
    x, y = tilert.full((64, 1024), 3, tilert.f32, dev), tilert.empty((64, 1024), tilert.f32, dev)
    y = kernel(y.partition(1, 1024), x, 100, 1024).run()
    del x
    gc.collect()
    poison = [tilert.full((64, 1024), -9, tilert.f32, dev) for _ in range(8)]
    assert (y.numpy() == 4).all()
    assert (poison[0].numpy() == -9).all()


def test_memory(dev: CudaDevice) -> None:
    dev.synchronize()
    free, total = dev.memory()
    assert 0 < free <= total
    block = tilert.empty(2**30, tilert.u8, dev)
    dev.synchronize()
    assert free - dev.memory()[0] >= 2**30 - 2**25
    del block
    dev.synchronize()
    assert abs(free - dev.memory()[0]) < 2**26
    with pytest.raises(DeviceError, match=r"cuda:0 is out of memory: .* GiB were asked for"):
        tilert.empty(2 * total, tilert.u8, dev)
    # Most of the memory twice: the second needs the first to be gone.
    for _ in range(2):
        assert tilert.empty(int(free * 0.7), tilert.u8, dev).nbytes == int(free * 0.7)


def test_pinned(dev: CudaDevice) -> None:
    array = tilert.from_numpy(numbers(16), dev)
    buffer = tilert.pinned(16, tilert.f32, dev)
    view = buffer.numpy
    buffer.copy_from(array)
    dev.record_event().wait()
    np.testing.assert_array_equal(view, numbers(16))
    del buffer
    gc.collect()
    tilert.zeros(1, tilert.f32, dev)
    np.testing.assert_array_equal(view, numbers(16))


def test_event_times(dev: CudaDevice) -> None:
    x, y = tilert.zeros((1, 8), tilert.f32, dev), tilert.empty((1, 8), tilert.f32, dev)
    kernel = add_one()
    kernel(y.partition(1, 8), x, 50, 8).sync()
    start = dev.record_event(timing=True)
    kernel(y.partition(1, 8), x, 50, 8).run()
    end = dev.record_event(timing=True)
    end.wait()
    assert 0.01 < end.since(start) < 1
    with pytest.raises(DeviceError, match="timing=True"):
        end.since(dev.record_event())


def test_graph(dev: CudaDevice) -> None:
    kernel = add_one()
    a, b = tilert.zeros((4, 8), tilert.f32, dev), tilert.zeros((4, 8), tilert.f32, dev)
    out = tilert.pinned((4, 8), tilert.f32, dev)
    out.numpy[:] = -1

    def step() -> None:
        # The first use of the kernel is inside the capture, as is an allocation.
        middle = kernel(b.partition(1, 8), a, 0, 8).run()
        c = tilert.empty((4, 8), tilert.f32, dev)
        c.copy_from(middle)
        a.copy_from(c)
        out.copy_from(a)

    graph = tilert.capture(dev, step)
    dev.synchronize()
    assert (out.numpy == -1).all()
    gc.collect()
    noise = [tilert.full((4, 8), 50, tilert.f32, dev) for _ in range(4)]
    for count in range(1, 6):
        graph.replay()
        dev.synchronize()
        assert (out.numpy == count).all()
    for _ in range(100):
        graph.replay()
    assert (a.numpy() == 105).all()
    assert (noise[0].numpy() == 50).all()
    part = b.partition(1, 8)
    with pytest.raises(MovedError):
        graph.replay()
    del part
    graph.replay()
    graph.close()
    with pytest.raises(LaunchError, match="this graph is closed"):
        graph.replay()
    assert (a.numpy() == 106).all()


def test_a_failed_capture_leaves_the_device_usable(dev: CudaDevice) -> None:
    a = tilert.zeros((4, 8), tilert.f32, dev)
    b = tilert.zeros((4, 8), tilert.f32, dev)

    def step() -> None:
        b.copy_from(a)
        a.numpy()

    with pytest.raises(LaunchError, match="reading an array on the host cannot be part of a"):
        tilert.capture(dev, step)
    with pytest.raises(ZeroDivisionError):
        tilert.capture(dev, lambda: 1 // 0)
    a.copy_from(np.ones((4, 8), np.float32))
    assert (a.numpy() == 1).all()
    assert (b.numpy() == 0).all()
    tilert.capture(dev, lambda: b.copy_from(a)).replay()
    assert (b.numpy() == 1).all()
    tilert.capture(dev, lambda: None).replay()
    dev.synchronize()


ADD_ONE = add_one()


def quick(y: tilert.Array, x: tilert.Array) -> tilert.Op:
    """y = x + 1"""
    return ADD_ONE(y.partition(1, 8), x, 0, 8)


def slow(y: tilert.Array, x: tilert.Array) -> tilert.Op:
    """y = x + 1, after some ten milliseconds."""
    return ADD_ONE(y.partition(1, 8), x, 20, 8)


def arrays(dev: CudaDevice, *values: float) -> list[tilert.Array]:
    """Arrays full of the values; `quick` and `slow` are compiled, which takes longer than they."""
    a, b = (tilert.zeros((4, 8), tilert.f32, dev) for _ in range(2))
    quick(slow(a, b).sync(), b).sync()
    return [tilert.full((4, 8), value, tilert.f32, dev) for value in values]


def test_conflicts_across_streams_are_ordered(dev: CudaDevice) -> None:
    a, b, c = arrays(dev, 1, 0, 0)
    with dev.stream() as one, dev.stream() as two:
        for _ in range(3):
            slow(b, a).on(one).run()
            quick(c, b).on(two).run()
            quick(a, c).run()
        assert not one.record_event().done()
        assert (a.numpy() == 10).all()
        # A host write behind what reads.
        slow(b, a).on(one).run()
        a.copy_from(np.zeros((4, 8), np.float32))
        assert (b.numpy() == 11).all() and (a.numpy() == 0).all()


def test_disjoint_work_runs_at_the_same_time(dev: CudaDevice) -> None:
    many = arrays(dev, *[1.0] * 8)
    # The first time makes the streams, behind whatever tests before have left to be freed.
    tilert.gather(*(quick(many[i], many[i + 1]) for i in range(0, 8, 2))).sync()
    start = dev.record_event(timing=True)
    slow(many[0], many[1]).run()
    end = dev.record_event(timing=True)
    end.wait()
    alone = end.since(start)
    start = dev.record_event(timing=True)
    tilert.gather(*(slow(many[i], many[i + 1]) for i in range(0, 8, 2))).run()
    end = dev.record_event(timing=True)
    end.wait()
    assert end.since(start) < 3 * alone
    graph = tilert.gather(*(slow(many[i], many[i + 1]) for i in range(0, 8, 2))).capture()
    start = dev.record_event(timing=True)
    graph.replay()
    end = dev.record_event(timing=True)
    end.wait()
    assert end.since(start) < 3 * alone
    graph.close()


def test_frees_wait_for_every_stream(dev: CudaDevice) -> None:
    with dev.stream() as one:
        a, b = arrays(dev, 3, 0)
        slow(b, a).on(one).run()
        del a
        gc.collect()
        poison = arrays(dev, *[-9.0] * 8)
        assert (b.numpy() == 4).all()
        assert (poison[0].numpy() == -9).all()


def test_rebinding_a_graph_in_flight(dev: CudaDevice) -> None:
    a, b, c, d = arrays(dev, 1, 0, 10, 0)
    with tilert.capture(dev, lambda: slow(b, a).run()) as graph, dev.stream() as one:
        graph.replay(one)
        graph.rebind({a: c, b: d})
        graph.replay(one)
        graph.rebind({c: a})
        graph.replay()
        assert [x.numpy()[0, 0] for x in (b, d)] == [2, 2]
        graph.rebind({a: c})
        graph.replay()
        assert (d.numpy() == 11).all()


def test_await_leaves_the_loop_free(dev: CudaDevice) -> None:
    a, b = arrays(dev, 1, 0)
    turns = 0

    async def main() -> None:
        nonlocal turns
        task = asyncio.ensure_future(wait())
        while not task.done():
            turns += 1
            await asyncio.sleep(0)

    async def wait() -> None:
        await slow(b, a)

    asyncio.run(main())
    assert turns > 10
    assert (b.numpy() == 2).all()


def test_threads(dev: CudaDevice) -> None:
    kernel = add_one()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                data = np.full((4, 2**18), seed * 100 + i, np.float32)
                x, y = tilert.from_numpy(data, dev), tilert.empty(data.shape, tilert.f32, dev)
                y = kernel(y.partition(1, 2**18), x, 0, 2**18).run()
                np.testing.assert_array_equal(y.numpy(), data + 1)
                graph = tilert.capture(dev, lambda x=x, y=y: x.copy_from(y))
                graph.replay()
                np.testing.assert_array_equal(x.numpy(), data + 1)
                graph.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_paged_slots_kernel() -> None:
    dev = tilert.device("cuda")
    table = tilert.PageTable(6, 4, 3, 3, dev)
    table.set_pages(0, [5, 2])
    table.set_pages(2, [1])
    index = table.decode_index(4)
    index.set_rows([2, 0, -1, 1])
    positions = tilert.from_numpy(np.array([3, 6, 2, 0], np.int32), dev)
    index.update(positions)
    np.testing.assert_array_equal(index.array.numpy(), [7, 10, -1, -1])
    table.set_pages(0, [5, 2], shared=1)
    table.set_pages(2, [5], shared=1)
    index.update(positions)
    np.testing.assert_array_equal(index.array.numpy(), [-1, 10, -1, -1])

"""Programmatic dependent launch: kernels of a graph start early where that shows in no result."""

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.fake_cuda import FakeCudaDevice, _Kernel, fake_cuda
from tests.tilert.products import product
from tilert import (
    Const,
    DeviceError,
    Mut,
    Ref,
    bf16,
    cuda_graph,
    f32,
    i32,
    ir,
    kernel_launch,
    nvrtc,
    opt_out,
    sass,
)
from tilert.codegen.early import APART, AT_ONCE, BEHIND_ONE, can_be_apart
from tilert.cpu_device import CpuDevice
from tilert.cuda_graph import early_kernels, span
from tilert.language import sum as total
from tilert.target_device import CompiledKernel, TargetDevice
from tilert.unsafe_kernel import UnsafeFunction, UnsafeKernel

ROWS, COLUMNS = 4, 8


@tilert.kernel
def mix(y: Mut, a: Ref, b: Ref, by: Const[int]):
    y.store(a.tile_like(y) * by + b.tile_like(y))


@tilert.kernel
def onto(y: Mut, a: Ref):
    y.store(y.load() * 5 + a.tile_like(y))


SOURCE = """
extern "C" __global__ void added(int* y, const int* a) {
  const int size = tilert::y_tile0 * tilert::y_dim1, first = blockIdx.x * size;
  for (int i = threadIdx.x; i < size; i += blockDim.x) y[first + i] += a[first + i];
}
"""


def add_rows(y: np.ndarray, a: np.ndarray) -> None:
    y += a


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> UnsafeKernel:
    """y += a, by a kernel that knows nothing of other grids."""
    monkeypatch.setattr(opt_out, "_known", dict(opt_out._known))

    @tilert.unsafe_kernel(source=SOURCE, reference=add_rows, reason="a test")
    def added(y: Mut, a: Ref) -> None: ...

    return added


class Rash(FakeCudaDevice):
    """Kernels that do not wait, whose launches say that they do."""

    def waits(self, function: ir.Function) -> bool:
        return False

    def says(self, function: ir.Function) -> bool:
        return True


class Apart(FakeCudaDevice):
    """Kernels that need not wait for one that they share no memory with."""

    def apart(self, function: ir.Function) -> bool:
        return self.waits(function) and can_be_apart(function)


def shown(graph: tilert.Graph) -> str:
    """The nodes of a recorded graph: k, a kernel; K, one that starts early; c, a copy."""
    nodes = graph._executable._handle.nodes  # type: ignore[attr-defined]
    return "".join(n.kind[0].upper() if n.early else n.kind[0] for n in nodes)


def some(device: tilert.Device, count: int) -> list[tilert.Array]:
    host = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS)
    return [tilert.from_numpy(host * 3 + i, device) for i in range(count)]


def rows(array: tilert.Array) -> tilert.Partition:
    return array.partition(1, COLUMNS)


# Where kernels start early


def test_behind_a_kernel_alone(monkeypatch: pytest.MonkeyPatch, added: UnsafeKernel) -> None:
    device = fake_cuda(monkeypatch, 0)
    a, b, c, d = some(device, 4)

    def captured(*steps: Callable[[], Any]) -> str:
        with tilert.capture(device, lambda: [step() for step in steps] and None) as graph:
            return shown(graph)

    def safe() -> None:
        onto(rows(b), a).run()

    def unsafe() -> None:
        added(rows(b), a).run()

    def copied() -> None:
        c.copy_from(b)

    def nothing() -> None:
        onto(b[:0].partition(1, COLUMNS), a[:0]).run()

    assert captured(safe) == "k"
    assert captured(safe, safe, safe) == "kKK"
    assert captured(copied, safe, safe, copied, safe, safe) == "ckKckK"
    assert captured(safe, unsafe, safe, safe, unsafe, unsafe) == "kkkKkk"
    # Work without a node says nothing of what the next one is behind.
    assert captured(safe, safe, nothing, safe, safe) == "kKkK"
    with device.stream() as one:

        def beside() -> None:
            onto(rows(d), a).on(one).run()

        def behind_both() -> None:
            mix(rows(c), b, d, by=2).run()

        # A branch begins behind nothing; what joins it is behind two.
        assert captured(beside, beside, safe, safe) == "kKkK"
        assert captured(safe, beside, safe, beside) == "kkKK"
        assert captured(safe, safe, beside, behind_both, safe) == "kKkkK"


def test_not_behind_kernels_that_leave_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(kernel_launch.Launch):
        def __init__(self, *arguments: Any, waits: bool, leads: bool, ahead: Any) -> None:
            super().__init__(*arguments, waits=waits, leads=False, ahead=ahead)

    device = fake_cuda(monkeypatch, 0)
    a, b = some(device, 2)
    monkeypatch.setattr(kernel_launch, "Launch", Large)

    def step() -> None:
        for _ in range(3):
            onto(rows(b), a).run()

    with tilert.capture(device, step) as graph:
        assert shown(graph) == "kkk"


def test_only_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda(monkeypatch, 0)
    a, b = some(device, 2)
    for _ in range(3):
        b = onto(rows(b), a).run()
    b.numpy()
    assert device.fake.calls["cuLaunchKernelEx"] == 0
    assert device.fake.calls["cuLaunchKernel"] == 3


@pytest.mark.parametrize(("setting", "expected"), [("", "kK"), ("1", "kK"), ("0", "kk")])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, setting: str, expected: str) -> None:
    monkeypatch.setenv("TILERT_EARLY_KERNELS", setting)
    device = fake_cuda(monkeypatch, 0)
    a, b = some(device, 2)
    with tilert.capture(device, lambda: onto(rows(b), a).then(lambda y: onto(rows(y), a))) as graph:
        assert shown(graph) == expected


def test_what_can_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [early_kernels(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        False, False, True, True, True,
    ]  # fmt: skip
    monkeypatch.setenv("TILERT_EARLY_KERNELS", "yes")
    with pytest.raises(DeviceError, match="TILERT_EARLY_KERNELS='yes'; use 0 or 1"):
        early_kernels((9, 0))


def test_rebinding(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda(monkeypatch, 3)
    a, b, c = some(device, 3)
    before = c.numpy()

    def step() -> None:
        for _ in range(3):
            onto(rows(b), a).run()

    with tilert.capture(device, step) as graph:
        handle = graph._executable._handle  # type: ignore[attr-defined]
        graph.rebind({b: c})
        assert graph._executable._handle is handle  # type: ignore[attr-defined]
        assert shown(graph) == "kKK"
        graph.replay()
        add = a.numpy()
        for _ in range(3):
            before = before * 5 + add
        np.testing.assert_array_equal(c.numpy(), before)


# What kernels read ahead


def spans(graph: tilert.Graph) -> list[list[tuple[int, int]]]:
    """The memory that each kernel of a graph reads when it starts."""
    nodes = graph._executable._handle.nodes  # type: ignore[attr-defined]
    return [node.begin.__self__.ahead for node in nodes if node.kind == "kernel"]


def test_what_no_piece_writes_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda(monkeypatch, 0)
    a, b, c, d, e = some(device, 5)

    def captured(*steps: Callable[[], Any]) -> list[list[tuple[int, int]]]:
        with tilert.capture(device, lambda: [step() for step in steps] and None) as graph:
            return spans(graph)

    def to_c() -> None:
        mix(rows(c), a, b, by=2).run()

    def to_d() -> None:
        mix(rows(d), c, b, by=2).run()

    def to_b() -> None:
        onto(rows(b), a).run()

    def copied() -> None:
        a.copy_from(e)

    assert captured(to_c, to_d) == [[span(a), span(b)], [span(b)]]
    # Whatever writes it and wherever: what comes later may run in the next replay's place.
    assert captured(to_c, to_d, to_b) == [[span(a)], [], [span(a)]]
    assert captured(to_c, copied, to_b) == [[], []]


def test_pieces_that_others_leave_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sets are of pieces, not of whole buffers."""
    device = fake_cuda(monkeypatch, 0)
    a, b, c = some(device, 3)

    def step() -> None:
        onto(b[:2].partition(1, COLUMNS), a[1:3]).run()
        onto(c[:2].partition(1, COLUMNS), b[2:]).run()
        onto(c[2:].partition(1, COLUMNS), b[1:3]).run()
        onto(a[:1].partition(1, COLUMNS), a[3:]).run()

    with tilert.capture(device, step) as graph:
        assert spans(graph) == [[span(a[1:3])], [span(b[2:])], [], [span(a[3:])]]


def test_kernels_make_way_for_those_that_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda(monkeypatch, 0)
    a, b, c = some(device, 3)
    words: list[int] = []
    record = kernel_launch.Launch.record

    def noted(launch: kernel_launch.Launch, stream: Any, behind: bool, early: int) -> None:
        words.append(early)
        record(launch, stream, behind, early)
        # The word is of recordings alone.
        assert launch.values[1] == 0

    monkeypatch.setattr(kernel_launch.Launch, "record", noted)

    def step() -> None:
        onto(rows(b), c).run()
        onto(rows(c), b).run()
        mix(rows(b), c, a, by=1).run()
        c.copy_from(b)
        onto(rows(b), a).run()

    with tilert.capture(device, step):
        assert words == [0, AT_ONCE, 2, 1]


def test_what_reads_all_ahead_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one operand is written by a piece, the word has no bit, and nobody makes way."""
    device = fake_cuda(monkeypatch, 0)
    a, b, c, d = some(device, 4)
    words: list[int] = []
    record = kernel_launch.Launch.record

    def noted(launch: kernel_launch.Launch, stream: Any, behind: bool, early: int) -> None:
        words.append(early)
        record(launch, stream, behind, early)

    class Whole(kernel_launch.Launch):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named, whole=True)

    monkeypatch.setattr(kernel_launch.Launch, "record", noted)
    monkeypatch.setattr(kernel_launch, "Launch", Whole)

    def step() -> None:
        mix(rows(c), a, b, by=1).run()
        mix(rows(d), a, c, by=1).run()
        mix(rows(d), b, a, by=1).run()

    with tilert.capture(device, step):
        assert words == [3, AT_ONCE, 3]


def words_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The words of kernels that are recorded from now on."""
    words: list[int] = []
    record = kernel_launch.Launch.record

    def noted(launch: kernel_launch.Launch, stream: Any, behind: bool, early: int) -> None:
        words.append(early)
        record(launch, stream, behind, early)

    monkeypatch.setattr(kernel_launch.Launch, "record", noted)
    return words


def test_kernels_that_share_no_memory_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda(monkeypatch, 0, kind=Apart)
    a, b, c, d, e = some(device, 5)
    words = words_of(monkeypatch)
    first, last = 3 | AT_ONCE | BEHIND_ONE, 3 | APART

    def captured(*steps: Callable[[], Any]) -> list[int]:
        words.clear()
        with tilert.capture(device, lambda: [step() for step in steps] and None):
            return list(words)

    def to(y: tilert.Array, x: tilert.Array = a) -> Callable[[], Any]:
        return lambda: mix(y.partition(1, COLUMNS), x[: y.shape[0]], b[: y.shape[0]], by=2).run()

    assert captured(to(c), to(d)) == [first, last]
    assert captured(to(c), to(d), to(c), to(e)) == [first, *[first | APART] * 2, last]
    # What the one before writes, or reads, or where what is read is written by whomever.
    assert captured(to(c), to(c)) == [3 | AT_ONCE, 3]
    assert captured(to(c, d), to(d)) == [AT_ONCE, 3]
    assert captured(to(c, d), to(e), to(d)) == [AT_ONCE | BEHIND_ONE, first | APART, last]
    assert captured(to(c), to(d, e), to(e)) == [3, AT_ONCE, 3]
    # Pieces of one buffer.
    assert captured(to(c[:2]), to(c[2:])) == [first, last]
    assert captured(to(c[:2]), to(c[1:])) == [3 | AT_ONCE, 3]
    # Copies come between, and kernels that wait.
    assert captured(to(c), lambda: e.copy_from(a), to(d)) == [3, 3]
    assert captured(to(c), lambda: onto(rows(e), a).run(), to(d)) == [3 | AT_ONCE, 1 | AT_ONCE, 3]
    with device.stream() as one:
        # Of one stream.
        beside = mix(rows(d), a, b, by=2)
        assert captured(to(c), lambda: beside.on(one).run(), to(e)) == [first, 3, last]


def test_the_switch_leaves_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERT_EARLY_KERNELS", "0")
    device = fake_cuda(monkeypatch, 0)
    a, b = some(device, 2)
    with tilert.capture(device, lambda: onto(rows(b), a)) as graph:
        assert spans(graph) == [[]]


# That it shows in no result


def play(device: tilert.Device, added: UnsafeKernel, seed: int, kept: int = 0) -> list[np.ndarray]:
    """What a random captured program, replayed, makes of its arrays.

    Args:
        kept: arrays that nothing writes, which are then read four times out of five.
    """
    chance = random.Random(seed)
    pool = some(device, kept + 5)
    streams = [None, *(device.stream() for _ in range(chance.randrange(4)))]
    lonely = chance.random() < 0.3

    def op(kind: int) -> None:
        y, a, b = chance.sample(pool[kept:], 3)
        if kept and chance.random() < 0.8:
            a, b = chance.choices(pool[:kept], k=2)
        stream = None if lonely else chance.choice(streams)
        if kind == 0:
            y.copy_from(a)
            return
        work: tilert.Work = (
            added(rows(y), a)
            if kind == 1
            else onto(rows(y), a)
            if kind < 4
            else mix(rows(y), a, b, by=3)
        )
        (work if stream is None else work.on(stream)).run()

    def step() -> None:
        for kind in chance.choices(range(7), (1, 1, 2, 2, 2, 2, 2), k=chance.randrange(1, 14)):
            op(kind)

    with tilert.capture(device, step) as graph:
        for _ in range(3):
            graph.replay(chance.choice(streams))
            op(5)
    return [array.numpy() for array in pool]


def mismatches(
    make: Callable[[int], tilert.Device], added: UnsafeKernel, count: int, kept: int = 0
) -> int:
    """How many programs see something else than on the cpu."""
    serial = CpuDevice(check=False)
    wrong = 0
    for seed in range(count):
        played = [play(device, added, seed, kept) for device in (serial, make(seed))]
        pairs = zip(*played, strict=True)
        wrong += not all(np.array_equal(a, b) for a, b in pairs)
    return wrong


def test_random_programs(monkeypatch: pytest.MonkeyPatch, added: UnsafeKernel) -> None:
    devices: list[FakeCudaDevice] = []

    def make(seed: int) -> FakeCudaDevice:
        devices.append(fake_cuda(monkeypatch, seed))
        return devices[-1]

    ahead = 0
    begin = _Kernel.begin

    def counted(kernel: _Kernel) -> None:
        nonlocal ahead
        ahead += len(kernel.ahead)
        begin(kernel)

    monkeypatch.setattr(_Kernel, "begin", counted)
    assert mismatches(make, added, 40) == 0
    assert sum(device.fake.calls["cuLaunchKernelEx"] for device in devices) > 60
    assert ahead > 60


def test_random_programs_of_kernels_that_share_no_memory(
    monkeypatch: pytest.MonkeyPatch, added: UnsafeKernel
) -> None:
    words = words_of(monkeypatch)
    assert mismatches(lambda seed: fake_cuda(monkeypatch, seed, kind=Apart), added, 60, kept=2) == 0
    assert sum(bool(word & APART) for word in words) > 30


def last_stays(device: tilert.Device, order: str) -> bool:
    """Whether of several writes of each of two arrays the last one stays."""
    a, b, c, d = some(device, 4)
    to = {"c": c, "d": d}

    def step() -> None:
        for i, name in enumerate(order):
            mix(rows(to[name]), a, b, by=i).run()

    with tilert.capture(device, step) as graph:
        graph.replay()
    return all(
        np.array_equal(y.numpy(), a.numpy() * order.rindex(name) + b.numpy())
        for name, y in to.items()
    )


@pytest.mark.parametrize(
    ("order", "change"),
    [
        # Whatever the one before uses.
        ("ccdd", lambda word: word | APART),
        # Whatever is not complete before that one.
        ("cdcd", lambda word: word & ~BEHIND_ONE),
    ],
)
def test_not_waiting_for_what_shares_memory_shows(
    order: str, change: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = kernel_launch.Launch.record

    def changed(launch: kernel_launch.Launch, stream: Any, behind: bool, early: int) -> None:
        record(launch, stream, behind, change(early))

    def wrong() -> int:
        devices = (fake_cuda(monkeypatch, seed, kind=Apart) for seed in range(60))
        return sum(not last_stays(device, order) for device in devices)

    assert wrong() == 0
    monkeypatch.setattr(kernel_launch.Launch, "record", changed)
    assert wrong() > 5


def test_reading_ahead_what_is_written_shows(
    monkeypatch: pytest.MonkeyPatch, added: UnsafeKernel
) -> None:
    monkeypatch.setattr(cuda_graph._Written, "__contains__", lambda self, span: False)
    assert mismatches(lambda seed: fake_cuda(monkeypatch, seed), added, 40) > 5


def test_kernels_that_do_not_wait_show(
    monkeypatch: pytest.MonkeyPatch, added: UnsafeKernel
) -> None:
    assert mismatches(lambda seed: fake_cuda(monkeypatch, seed, kind=Rash), added, 20) > 5


@pytest.mark.gpu
def test_random_programs_on_a_gpu(added: UnsafeKernel) -> None:
    device = tilert.device("cuda")
    assert mismatches(lambda seed: device, added, 300) == 0


@pytest.mark.gpu
def test_a_long_chain_on_a_gpu() -> None:
    """Grids that fill the device, between grids that leave room on it for later ones."""
    device = tilert.device("cuda")
    small = tilert.zeros((1, 1024), i32, device)
    large, other = (tilert.zeros((2048, 1024), i32, device) for _ in range(2))
    one = tilert.full((2048, 1024), 1, i32, device)

    def step() -> None:
        for _ in range(50):
            onto(small.partition(1, 1024), large[2047:]).run()
            mix(large.partition(1, 1024), one, other, by=1).run()
            mix(other.partition(1, 1024), large, one, by=3).run()

    with tilert.capture(device, step) as graph:
        for _ in range(20):
            graph.replay()
    want = [0, 0, 0]
    for _ in range(20 * 50):
        want[0] = want[0] * 5 + want[1]
        want[1] = 1 + want[2]
        want[2] = want[1] * 3 + 1
    for array, value in zip((small, large, other), want, strict=True):
        assert (array.numpy() == np.array(value % 2**32, np.uint32).astype(np.int32)).all()


@pytest.mark.gpu
def test_kernels_that_share_no_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids of more blocks than a device holds, some of which store before others are complete."""
    device = tilert.device("cuda")
    words = words_of(monkeypatch)
    many, columns = 4096, 1024
    host = np.arange(many * columns, dtype=np.int32).reshape(many, columns)
    a, b = (tilert.from_numpy(host * 7 + i, device) for i in range(2))
    outputs = [tilert.zeros((many, columns), i32, device) for _ in range(3)]
    for seed in range(8):
        chance = random.Random(seed)
        program = [
            (chance.choice((0, 0, 0, 0, 1, 2)), *chance.sample(range(3), 2)) for _ in range(40)
        ]

        def step(program: list[tuple[int, int, int]] = program) -> None:
            for i, (kind, to, of) in enumerate(program):
                y = outputs[to].partition(1, columns)
                if kind == 0:
                    mix(y, a, b, by=i % 8).run()
                elif kind == 1:
                    mix(y, outputs[of], b, by=3).run()
                else:
                    onto(y, a).run()

        want = [y.numpy() for y in outputs]
        with tilert.capture(device, step) as graph:
            for _ in range(2):
                graph.replay()
                for i, (kind, to, of) in enumerate(program):
                    left = host * 7
                    want[to] = (
                        left * (i % 8) + left + 1
                        if kind == 0
                        else want[of] * 3 + left + 1
                        if kind == 1
                        else want[to] * 5 + left
                    )
        for y, value in zip(outputs, want, strict=True):
            np.testing.assert_array_equal(y.numpy(), value)
    if device.early_kernels:  # type: ignore[attr-defined]
        assert sum(bool(word & APART) for word in words) > 30


# What kernels do


@tilert.kernel
def scaled(y: Mut, x: Ref, w: Ref):
    v = x.tile_like(y).to(f32)
    y.store(v * total(v * v, axis=1)[:, None] + w[y.index[0]][:, None])


def compiled(arch: str, check: bool = False) -> dict[str, CompiledKernel]:
    """Kernels of several schedules, by name and number."""
    device = TargetDevice(arch, check)

    def new(*shape: int, dtype: tilert.DType = bf16) -> tilert.Array:
        return tilert.empty(shape, dtype, device)

    product(new(1, 256).partition(1, 16), new(1, 512), new(256, 512), bk=512).run()
    product(new(64, 256).partition(32, 64), new(64, 512), new(256, 512), bk=64).run()
    product(new(8, 256).partition(8, 32), new(8, 512), new(256, 512), bk=256).run()
    product(new(512, 512).partition(128, 256), new(512, 512), new(512, 512), bk=64).run()
    scaled(new(64, 128).partition(16, 128), new(64, 128), new(64, dtype=f32)).run()
    index = tilert.UniqueIndex.checked(np.array([4, 0, 2]), device)
    onto(new(8, 128, dtype=i32).partition_at(index, 1, 128), new(3, 128, dtype=i32)).run()
    return {f"{k.name} {i}": k for i, k in enumerate(device.kernels)}


@pytest.mark.parametrize("check", [False, True])
def test_texts_wait_first(check: bool, added: UnsafeKernel) -> None:
    for name, kernel in compiled("sm_90a", check).items():
        text = kernel.text.split('extern "C"')[-1]
        head, body = text.split(") {\n", 1)
        pointers = re.findall(r"\* ?(?:RESTRICT )?(a_\w+)(?:, |$)", head.split("(")[-1])
        if kernel.schedule == "skinny" and not check:
            # What reads weights first waits before it unless the word allows it, and then again.
            sooner, body = body.split("  wait_for_earlier_grids();\n", 1)
            assert re.search(r"if \(\(early & 1u\) != 1u\) wait_for_earlier_grids\(\);\n", sooner)
            weights = sooner.split("wait_for_earlier_grids();\n")[1]
            assert "load16_early(src" in weights and set(re.findall(r"a_\w+", sooner)) == {"a_b"}
            body = "  wait_for_earlier_grids();\n" + body
        waits = body.index("wait_for_earlier_grids();")
        assert len(pointers) >= 2
        first = [m.start() for p in pointers for m in re.finditer(rf"\b{p}\b", body)]
        assert waits < min(first), name
        # Once, at the level of the kernel, or for those that copy and those that compute, or
        # where it depends on what may be read ahead. Of few rows each side is copied by a thread of
        # its own, and products of a warpgroup come before the second wait of those that compute,
        # or, in a block without any, before its third.
        streams = kernel.schedule == "streaming" and bool(kernel.early)
        roles = 2 if kernel.schedule == "pipelined" or streams else 1
        if kernel.schedule == "thin":
            roles = 3
        if kernel.schedule == "pipelined" and kernel.early:
            roles = 5
        assert body.count("wait_for_earlier_grids") == roles
        # Every thread that reads does so behind it.
        assert [len(part.split("behind(")) for part in body.split("wait_for_earlier")[1:]] == [
            len(pointers) + 1
        ] * roles
        few = name in ("product 1", "product 2")
        reads = {"thin": few, "pipelined": few, "skinny": True, "streaming": streams}
        assert bool(kernel.early) == (reads.get(kernel.schedule, False) and not check), name
        if streams:
            once, then = (found.start() for found in re.finditer("wait_for_", body))
            bits = (1 << len(kernel.early)) - 1
            assert body[:once].endswith(f"if ((early & {bits}u) != {bits}u) ")
            # Whatever is stored is behind the second.
            stores = re.search(r"store16\(|\*\(vec8\*\)|\*\(u32\*\)|atomic|dst\d+\[", body)
            assert stores is not None and stores.start() > then
    function = added.specialize(
        (
            ir.Param("y", 0, "mut", i32, (4, 8), (8, 1), (1, 8)),
            ir.Param("a", 1, "ref", i32, (4, 8), (8, 1)),
        ),
        (4,),
        (),
    )
    assert isinstance(function, UnsafeFunction)
    assert not function.cuda_source().waits


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_machine_code_waits_first(arch: str) -> None:
    """Neither compiler moves a load above the wait; of serving's, see test_compile_targets.py."""
    kernels = compiled(arch)
    listings = sass.disassemble([kernel.cubin for kernel in kernels.values()], arch)
    for name, lines in zip(kernels, listings, strict=True):
        waits = sass.names(lines).count("ACQBULK"), sass.names(lines).count("PREEXIT")
        if arch == "sm_80":
            assert waits == (0, 0)
        else:
            assert waits[0] >= 1 and waits[1] >= 1, name
            # What may be read ahead: tiles of the left operand and of the right one, and weights.
            ahead = {
                "thin": ["UTMALDG.3D"] * 2,
                "pipelined": ["UTMALDG.2D"] * 2,
                "skinny": ["LDG.E.NA.128.STRONG.GPU"] * 8,
            }
            if kernels[name].schedule == "streaming":
                # What is added up, and stored, where it may be; nothing where it may not.
                allowed = {"LDG", "STG"} if kernels[name].apart else {"LDG"}
                assert {found.split(".")[0] for found in sass.hasty(lines)} <= allowed, name
                assert not kernels[name].apart or sass.hasty_stores(lines) == [], name
                assert sass.hasty(lines, ahead=False) == [], name
                continue
            wanted = ahead[kernels[name].schedule] if kernels[name].early else []
            assert sass.hasty(lines) == wanted, name


HASTY = """
extern "C" __global__ void hasty(float4* y, const float4* x) {
  float4 v = x[threadIdx.x];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  y[threadIdx.x] = v;
}
"""


def test_what_has_not_waited_is_found() -> None:
    never = HASTY.replace("griddepcontrol.wait;", "")
    cubins = [nvrtc.compile(text, "hasty", "sm_90a") for text in (HASTY, never)]
    found = [sass.hasty(lines) for lines in sass.disassemble(cubins, "sm_90a")]
    assert [[name.split(".")[0] for name in some] for some in found] == [["LDG"], ["LDG", "STG"]]
    lines = ["LDC R1, c[0x0][0x28]", "UTMALDG.2D [UR8]", "ACQBULK", "STG.E [R2.64], R4"]
    assert sass.hasty(lines) == ["UTMALDG.2D"]
    # Who does not wait goes on.
    sometimes = [lines[0], "@P0 ACQBULK", "LDG.E.128 R4, [R2.64]", *lines[2:]]
    assert sass.hasty(sometimes) == ["LDG.E.128"]
    assert sass.hasty(lines[2:]) == []


def test_waits_under_a_condition() -> None:
    """As of a kernel that waits before it reads, or behind that."""
    lines = ["@P0 BRA 0x20", "ACQBULK", "LDG.E R4, [R2.64]", "ACQBULK", "STG.E [R2.64], R4"]
    assert sass.hasty(lines) == ["LDG.E"]
    assert sass.hasty(lines, ahead=False) == []
    assert sass.hasty(["@!P0 ACQBULK", *lines[2:]], ahead=False) == []
    # Read above the first, written above the second.
    assert sass.hasty([lines[2], "@P0 BRA 0x30", *lines[1:]], ahead=False) == ["LDG.E"]
    assert sass.hasty([*lines[:3], lines[4], *lines[3:]]) == ["LDG.E", "STG.E"]
    # Stores are behind the second wait, whatever its condition; it may be missing.
    apart = [*lines[:3], "@P1 BRA 0x50", *lines[3:]]
    assert sass.hasty(apart) == ["LDG.E", "STG.E"]
    assert sass.hasty_stores(apart) == []
    assert sass.hasty_stores([*lines[:3], lines[4], "@P1 BRA 0x60", *lines[3:]]) == ["STG.E"]
    assert sass.hasty_stores([*lines[:3], lines[4]]) == ["STG.E"]

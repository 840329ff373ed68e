"""device_print and debug_assert: what they say on the cpu, and what is compiled for a GPU."""

import numpy as np
import pytest

import tilert
from tests.tilert.checks import data
from tests.tilert.test_codegen import body
from tilert import Dyn, KernelError, Mut, Ref, bf16, f32, i64, u32
from tilert.language import debug_assert, device_print
from tilert.target_device import TargetDevice


@tilert.kernel
def talking(y: Mut[Dyn], x: Ref[Dyn]):
    i = y.index[0]
    v = x[i]
    device_print("100% of", v, sum(v))
    if i.number > 0:
        device_print("later")
    y.store(v * 2)


def cpu() -> tilert.Device:
    return tilert.device("cpu")


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    x = tilert.from_numpy(np.array([1, 2, 3, 4], np.float32), cpu())
    y = talking(tilert.empty(4, f32, cpu()).partition(2), x).sync()
    assert y.numpy().tolist() == [2, 4, 6, 8]
    line = __file__ + ":" + str(talking.source.first_line + 4)
    later = __file__ + ":" + str(talking.source.first_line + 6)
    assert capsys.readouterr().out.splitlines() == [
        f"{line}: talking program (0): 100% of [1. 2.] 3.0",
        f"{line}: talking program (1): 100% of [3. 4.] 7.0",
        f"{later}: talking program (1): later",
    ]


@tilert.kernel
def careful(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn], limit: Ref):
    i, j = y.index
    v = x[i, j]
    debug_assert(limit[0] > 0.0, "no limit")
    if j.number == 1:
        debug_assert(v < limit[0], "too large")
    y.store(v)


def test_assert() -> None:
    x = tilert.from_numpy(np.arange(24, dtype=np.float32).reshape(4, 6), cpu())
    y = tilert.empty((4, 6), f32, cpu())

    def run(limit: float) -> None:
        careful(y.partition(2, 3), x, tilert.full(1, limit, f32, cpu())).sync()

    run(24)
    assert (y.numpy() == x.numpy()).all()
    with pytest.raises(KernelError) as caught:
        run(17)
    assert (
        caught.value.message == "debug_assert failed in program (1, 1), element [0, 2]: too large"
    )
    assert caught.value.line == careful.source.first_line + 6
    assert str(caught.value).splitlines()[2:] == [
        '            debug_assert(v < limit[0], "too large")',
        "            ^",
    ]
    with pytest.raises(KernelError, match=r"^debug_assert failed in program \(0, 0\): no limit\n"):
        run(-1)
    # The op gave y back.
    assert y.numpy().shape == (4, 6)


@tilert.kernel
def typed(y: Mut, x: Ref, h: Ref, u: Ref, n: Ref):
    device_print('say "%d"\n', x[:, :], h[:], u[0], n[:])
    debug_assert(x[:, :] > 0.0, "all of it")
    debug_assert(u[0] != 1, "one")
    y.store(sum(x[:, :]))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiled_in_only_when_asked(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for asked in ("", "1"):
        monkeypatch.setenv("TILERT_DEBUG", asked)
        device = TargetDevice(arch)
        x, _ = data(device, (3, 70))
        h, _ = data(device, (40,), bf16)
        u, _ = data(device, (4,), u32, 0, 9)
        n, _ = data(device, (5,), i64)
        typed(tilert.empty(1, f32, device).partition(1), x, h, u, n).run()
        texts.append(body(device.kernels[0]))
    assert "printf" not in texts[0] and "trap" not in texts[0] and "a_h[" not in texts[0]
    assert texts[1].count("printf(") == 6 and texts[1].count("__trap()") == 2
    assert r'typed program (%d): say \"%%d\"\n [%d, %d] = %g\n"' in texts[1]

"""A kernel whose meaning is a Python function, to test the host side without the compiler."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilert import ir
from tilert.array import Array
from tilert.cpu_device import CpuDevice, host_view
from tilert.device import Launcher
from tilert.frontend.check import ParamDecl
from tilert.op import Op, Plan, make_op

Body = Callable[..., None]


def mut(name: str, *dyn: int) -> ParamDecl:
    return ParamDecl(name, "mut", frozenset(dyn))


def ref(name: str, *dyn: int) -> ParamDecl:
    return ParamDecl(name, "ref", frozenset(dyn))


def const(name: str) -> ParamDecl:
    return ParamDecl(name, "const")


class FakeKernel:
    """`body(*arrays, maps=..., grid=...)` gets ndarrays and does the whole grid's work."""

    def __init__(self, name: str, decls: list[ParamDecl], body: Body = lambda *_, **__: None):
        self.name = name
        self.decls = decls
        self.plan = Plan(decls)
        self.body = body
        self.seen: list[tuple[Any, ...]] = []

    def captured(self) -> int:
        return 0

    def specialize(
        self,
        params: tuple[ir.Param, ...],
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> ir.Function:
        self.seen.append((params, grid, consts))
        return ir.Function(self.name, list(params), grid, ir.Block(), options={"fake": self})

    deferred = specialize

    def __call__(self, *values: Any) -> Op:
        return make_op(self, values)


class FakeLauncher:
    def __init__(self, body: Body):
        self.body = body

    def bind(
        self, arrays: Sequence[Array], index_maps: Mapping[int, Array], grid: tuple[int, ...]
    ) -> Callable[[object], None]:
        views = [host_view(a) for a in arrays]
        maps = {position: host_view(a) for position, a in index_maps.items()}
        return lambda queue: self.body(*views, maps=maps, grid=grid)


class FakeCpu(CpuDevice):
    """The cpu device with fake kernels."""

    def compile(self, function: ir.Function) -> Launcher:
        return FakeLauncher(function.options["fake"].body)


def add_one() -> FakeKernel:
    def body(y: np.ndarray, x: np.ndarray, **_: Any) -> None:
        np.add(x, 1, out=y)

    return FakeKernel("add_one", [mut("y"), ref("x")], body)

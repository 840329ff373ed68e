"""What `bench_kernels` runs of each case: inputs, calls of ours and the peer, samples to check."""

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilert
from models import kernels
from models.tile_sizes import ProductTiles, Tiling
from models.tiling import tiling
from models.winners import tuned_tiling
from scripts.kernel_cases import COMPILED, NONE, PEER, RESIDUAL, Case, Variant
from scripts.kernel_memory import DTYPES, Floats, Memory, Tensor
from tilert import Array, Device, Mut, Ref, UniqueIndex, f32
from tilert.language import exp

__all__ = ["Work", "switch", "work_of"]

Call = Callable[[], object]
EPS = 1e-6
SAMPLED_ROWS, SAMPLED_COLUMNS = 24, 512
STREAMED_ROWS = 256
"""Of what has no products. The largest error of few norms in f32 is a matter of luck."""


@tilert.kernel
def copy(y: Mut, x: Ref):  # type: ignore[no-untyped-def, type-arg]
    y.store(x.tile_like(y))


@tilert.kernel
def add(y: Mut, a: Ref, b: Ref):  # type: ignore[no-untyped-def, type-arg]
    y.store(a.tile_like(y).to(f32) + b.tile_like(y).to(f32))


@tilert.kernel
def swiglu(y: Mut, a: Ref, b: Ref):  # type: ignore[no-untyped-def, type-arg]
    gate = a.tile_like(y).to(f32)
    y.store(gate / (exp(-gate) + 1.0) * b.tile_like(y).to(f32))


class Work:
    """One case on a device: `copies` sets of inputs, and outputs of their own.

    Attributes:
        outputs: one a set.
    """

    outputs: list[Tensor]

    def __init__(self, memory: Memory, case: Case, copies: int) -> None:
        self.memory, self.case, self.copies = memory, case, copies

    def call(self, variant: Variant, i: int) -> Call:
        """A call that enqueues the variant on set `i`."""
        # An array repeats the launches that it has had, also those of another variant.
        ours = self.outputs[i].ours
        self.outputs[i].ours = ours.reshape(*ours.shape)
        if variant.name == COMPILED:
            return self._compiled(i)
        return self._theirs(i) if variant.name == PEER else self._ours(variant, i)

    def tiling(self, variant: Variant) -> Tiling:
        """The tile sizes of the engine, with the variant's schedules."""
        device = self.memory.device
        if variant.schedules == NONE:
            return tiling(device.kind)
        return tuned_tiling(device, DTYPES[self.case.dtype])

    def _ours(self, variant: Variant, i: int) -> Call:
        raise NotImplementedError

    def _theirs(self, i: int) -> Call:
        raise NotImplementedError

    def _compiled(self, i: int) -> Call:
        """What the peer's compiler makes of several of its operations."""
        raise NotImplementedError

    def settle(self, result: Any) -> None:
        """Put what a peer's call gave where the output is, if it made a tensor of its own."""

    def poison(self, variant: Variant) -> None:
        """Have set 0's output hold what no call leaves there."""
        self.memory.poison(self.outputs[0])

    def check(self, variant: Variant) -> tuple[Floats, Floats]:
        """A sample of set 0's output, and what it should be, in float64."""
        raise NotImplementedError

    def sampled(self, n: int, count: int) -> NDArray[np.int64]:
        """Indices below `n`: the first, the last and some between."""
        rng = np.random.default_rng(n)
        return np.unique([0, n - 1, *rng.integers(0, n, count)])


class Product(Work):
    """y = x @ w.T, or y += x @ w.T as a model adds it to its residual stream of f32."""

    def __init__(self, memory: Memory, case: Case, copies: int) -> None:
        super().__init__(memory, case, copies)
        m, n, k = case["m"], case["n"], case["k"]
        self._x = [memory.random((m, k), case.dtype) for _ in range(copies)]
        self._w = [memory.random((n, k), case.dtype) for _ in range(copies)]
        self.outputs = [memory.empty((m, n), case.dtype) for _ in range(copies)]
        self._streams: list[Array] = []

    def _ours(self, variant: Variant, i: int) -> Call:
        m, n, k = self.case["m"], self.case["n"], self.case["k"]
        tiles = (
            ProductTiles(*variant.tile) if variant.tile else self.tiling(variant).product(m, n, k)
        )
        y, x, w = self.outputs[i].ours, self._x[i].ours, self._w[i].ours
        if variant == RESIDUAL:
            if i == 0:
                self._streams = [tilert.zeros(y.shape, f32, y.device) for _ in range(self.copies)]
            stream = self._streams[i]
            return lambda: kernels.linear_residual(
                stream.partition(tiles.rows, tiles.columns), x, w, bk=tiles.depth
            ).run()
        if tiles.shares == 1:
            return lambda: kernels.linear(
                y.partition(tiles.rows, tiles.columns), x, w, bk=tiles.depth
            ).run()
        shares = tilert.empty((m, tiles.shares, n), f32, self.memory.device)
        steps = -(-k // tiles.depth)

        def call() -> None:
            kernels.linear_shares(
                shares.partition(tiles.rows, 1, tiles.columns), x, w, bk=tiles.depth,
                count=-(-steps // tiles.shares),
            ).run()  # fmt: skip
            kernels.add_shares(y.partition(1, min(n, 2048)), shares, residual=False).run()

        return call

    def _theirs(self, i: int) -> Call:
        matmul, out = self.memory.torch.matmul, self.outputs[i].theirs
        x, w = self._x[i].theirs, self._w[i].theirs.T
        return lambda: matmul(x, w, out=out)

    def poison(self, variant: Variant) -> None:
        """See `Work`; a residual stream begins as zeros, to which one call adds."""
        if variant != RESIDUAL:
            super().poison(variant)

    def check(self, variant: Variant) -> tuple[Floats, Floats]:
        """See `Work`."""
        y = Tensor(self._streams[0], None) if variant == RESIDUAL else self.outputs[0]
        rows = self.sampled(self.case["m"], SAMPLED_ROWS)
        columns = self.sampled(self.case["n"], SAMPLED_COLUMNS)
        depth = np.arange(self.case["k"])
        x = self.memory.sample(self._x[0], rows, depth)
        w = self.memory.sample(self._w[0], columns, depth)
        return self.memory.sample(y, rows, columns), x @ w.T


class Gated(Work):
    """y = silu(x @ w[0].T) * (x @ w[1].T); the peer's time is that of the products alone."""

    def __init__(self, memory: Memory, case: Case, copies: int) -> None:
        super().__init__(memory, case, copies)
        m, n, k = case["m"], case["n"], case["k"]
        self._x = [memory.random((m, k), case.dtype) for _ in range(copies)]
        self._w = [memory.random((2, n, k), case.dtype) for _ in range(copies)]
        self.outputs = [memory.empty((m, n), case.dtype) for _ in range(copies)]

    def _ours(self, variant: Variant, i: int) -> Call:
        m, n, k = self.case["m"], self.case["n"], self.case["k"]
        chosen = self.tiling(variant).gate_up(m, n, k)
        tiles = ProductTiles(*variant.tile) if variant.tile else chosen
        y, x, w = self.outputs[i].ours, self._x[i].ours, self._w[i].ours
        return lambda: kernels.gate_up_silu(
            y.partition(tiles.rows, tiles.columns), x, w, bk=tiles.depth
        ).run()

    def _theirs(self, i: int) -> Call:
        matmul, n, k = self.memory.torch.matmul, self.case["n"], self.case["k"]
        x, w = self._x[i].theirs, self._w[i].theirs.reshape(2 * n, k).T
        return lambda: matmul(x, w)

    def settle(self, result: Any) -> None:
        """See `Work`."""
        n = self.case["n"]
        gate = self.memory.torch.nn.functional.silu(result[:, :n].float())
        self.outputs[0].theirs.copy_(gate * result[:, n:].float())

    def check(self, variant: Variant) -> tuple[Floats, Floats]:
        """See `Work`."""
        rows = self.sampled(self.case["m"], SAMPLED_ROWS)
        columns = self.sampled(self.case["n"], SAMPLED_COLUMNS)
        depth = np.arange(self.case["k"])
        x = self.memory.sample(self._x[0], rows, depth)
        gate, up = (
            x @ self.memory.sample(self._w[0], np.array([i]), columns, depth)[0].T for i in (0, 1)
        )
        return self.memory.sample(self.outputs[0], rows, columns), gate / (1 + np.exp(-gate)) * up


class Streaming(Work):
    """Elementwise work and row norms on [rows, columns]."""

    def __init__(self, memory: Memory, case: Case, copies: int) -> None:
        super().__init__(memory, case, copies)
        shape = case["rows"], case["columns"]
        self._a = [memory.random(shape, case.dtype) for _ in range(copies)]
        second = copies if case.name in ("add", "swiglu") else 0
        self._b = [memory.random(shape, case.dtype) for _ in range(second)]
        self._gain = memory.random(shape[1:], case.dtype)
        self.outputs = [memory.empty(shape, case.dtype) for _ in range(copies)]

    def _ours(self, variant: Variant, i: int) -> Call:
        y, a, gain = self.outputs[i].ours, self._a[i].ours, self._gain.ours
        columns = self.case["columns"]
        tile = 1, min(columns, 2048)
        match self.case.name:
            case "copy":
                return lambda: copy(y.partition(*tile), a).run()
            case "rms_norm":
                return lambda: kernels.rms_norm(y.partition(1, columns), a, gain, eps=EPS).run()
        kernel, b = add if self.case.name == "add" else swiglu, self._b[i].ours
        return lambda: kernel(y.partition(*tile), a, b).run()

    def _theirs(self, i: int) -> Call:
        torch, y = self.memory.torch, self.outputs[i].theirs
        a, gain = self._a[i].theirs, self._gain.theirs
        match self.case.name:
            case "copy":
                return lambda: y.copy_(a)
            case "rms_norm":
                norm, shape = torch.nn.functional.rms_norm, gain.shape
                return lambda: norm(a, shape, gain, EPS)
        b = self._b[i].theirs
        if self.case.name == "add":
            return lambda: torch.add(a, b, out=y)
        # Two kernels, as the library has no one for it.
        return lambda: torch.mul(torch.nn.functional.silu(a), b, out=y)

    def _compiled(self, i: int) -> Call:
        """See `Work`."""
        functional, compiler = self.memory.torch.nn.functional, self.memory.torch.compile
        a, gain, shape = self._a[i].theirs, self._gain.theirs, self._gain.theirs.shape
        if self.case.name == "swiglu":
            both = compiler(lambda a, b: functional.silu(a) * b, dynamic=False)
            b = self._b[i].theirs
            return lambda: both(a, b)
        norm = compiler(lambda a, gain: functional.rms_norm(a, shape, gain, EPS), dynamic=False)
        return lambda: norm(a, gain)

    def settle(self, result: Any) -> None:
        """See `Work`."""
        self.outputs[0].theirs.copy_(result)

    def check(self, variant: Variant) -> tuple[Floats, Floats]:
        """See `Work`."""
        index = self.sampled(self.case["rows"], STREAMED_ROWS), np.arange(self.case["columns"])
        a, got = self.memory.sample(self._a[0], *index), self.memory.sample(self.outputs[0], *index)
        match self.case.name:
            case "copy":
                return got, a
            case "rms_norm":
                gain = self.memory.sample(self._gain, index[1])
                return got, a / np.sqrt((a * a).mean(1, keepdims=True) + EPS) * gain
        b = self.memory.sample(self._b[0], *index)
        return got, a + b if self.case.name == "add" else a / (1 + np.exp(-a)) * b


def attention(q: Floats, k: Floats, v: Floats, seen: int) -> Floats:
    """One query [D] over the first `seen` keys [T, D]."""
    scores = k[:seen] @ q / math.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    out: Floats = weights @ v[:seen] / weights.sum()
    return out


PAGE = 64


class Prefill(Work):
    """Causal attention of one sequence; its keys and values lie in pages in order."""

    def __init__(self, memory: Memory, case: Case, copies: int) -> None:
        super().__init__(memory, case, copies)
        tokens, dim = case["tokens"], case["dim"]
        pages = -(-tokens // PAGE), PAGE, case["kv_heads"], dim
        self._q = [memory.random((tokens, case["heads"], dim), case.dtype) for _ in range(copies)]
        self._k = [memory.random(pages, case.dtype) for _ in range(copies)]
        self._v = [memory.random(pages, case.dtype) for _ in range(copies)]
        self._table = memory.ints([np.arange(pages[0])])
        self._slots = memory.ints(np.zeros(tokens))
        self._begins, self._zero = memory.ints([0, tokens]), memory.ints([0])
        self.outputs = [
            memory.empty((tokens, case["heads"], dim), case.dtype) for _ in range(copies)
        ]

    def _ours(self, variant: Variant, i: int) -> Call:
        tokens, dim = self.case["tokens"], self.case["dim"]
        tiles = self.tiling(variant).prefill_attention(tokens, PAGE, 1, dim)
        y, q = self.outputs[i].ours, self._q[i].ours
        k, v = self._k[i].ours, self._v[i].ours
        return lambda: kernels.prefill_attention(
            y.partition(tiles.rows, 1, dim), q, k, v, self._table, self._zero, self._slots,
            self._begins, self._zero, scale=1 / math.sqrt(dim), pages=tiles.pages,
        ).run()  # fmt: skip

    def _theirs(self, i: int) -> Call:
        tokens, dim = self.case["tokens"], self.case["dim"]
        q = self._q[i].theirs.transpose(0, 1)[None]
        k, v = (t[i].theirs.reshape(-1, self.case["kv_heads"], dim)[:tokens].transpose(0, 1)[None]
                for t in (self._k, self._v))  # fmt: skip
        sdpa = self.memory.torch.nn.functional.scaled_dot_product_attention
        return lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)

    def settle(self, result: Any) -> None:
        """See `Work`."""
        self.outputs[0].theirs.copy_(result[0].transpose(0, 1))

    def check(self, variant: Variant) -> tuple[Floats, Floats]:
        """See `Work`."""
        case, group = self.case, self.case["heads"] // self.case["kv_heads"]
        rows = self.sampled(case["tokens"], SAMPLED_ROWS)
        heads, width = self.sampled(case["heads"], 2), np.arange(case["dim"])
        got = self.memory.sample(self.outputs[0], rows, heads, width)
        q = self.memory.sample(self._q[0], rows, heads, width)
        want = np.empty_like(got)
        pages = np.arange(-(-case["tokens"] // PAGE)), np.arange(PAGE)
        for h, head in enumerate(heads):
            at = np.array([head // group])
            k, v = (self.memory.sample(t[0], *pages, at, width).reshape(-1, case["dim"])
                    for t in (self._k, self._v))  # fmt: skip
            for r, row in enumerate(rows):
                want[r, h] = attention(q[r, h], k, v, int(row) + 1)
        return got, want


class Decode(Work):
    """Attention of one new token of each sequence; pages of all sequences lie mixed. Where it is in
    shares, with the kernel of the decode step: the new token's query and key, which come without a
    norm, are turned by nothing, and key and value are appended to memory of their own."""

    def __init__(self, memory: Memory, case: Case, copies: int) -> None:
        super().__init__(memory, case, copies)
        batch, dim, context = case["batch"], case["dim"], case["context"]
        count = -(-context // PAGE)
        pages = batch * count, PAGE, case["kv_heads"], dim
        self._order = np.random.default_rng(0).permutation(batch * count).reshape(batch, count)
        self._table = memory.ints(self._order)
        self._rows, self._positions = (
            memory.ints(np.arange(batch)),
            memory.ints(np.full(batch, context - 1)),
        )
        self._q = [memory.random((batch, case["heads"], dim), case.dtype) for _ in range(copies)]
        self._k = [memory.random(pages, case.dtype) for _ in range(copies)]
        self._v = [memory.random(pages, case.dtype) for _ in range(copies)]
        self.outputs = [
            memory.empty((batch, case["heads"], dim), case.dtype) for _ in range(copies)
        ]

    def _ours(self, variant: Variant, i: int) -> Call:
        case, device = self.case, self.memory.device
        batch, heads, dim = case["batch"], case["heads"], case["dim"]
        tiles = self.tiling(variant).decode_attention(batch, case["kv_heads"])
        group = heads // case["kv_heads"] * tiles.heads
        inputs = (self._q[i].ours, self._k[i].ours, self._v[i].ours, self._table, self._rows,
                  self._positions)  # fmt: skip
        consts = {"scale": 1 / math.sqrt(dim), "heads": tiles.heads, "pages": tiles.pages}
        y = self.outputs[i].ours
        if tiles.splits == 1:
            return lambda: kernels.decode_attention(
                y.partition(1, group, dim), *inputs, **consts
            ).run()
        acc = tilert.empty((batch, tiles.splits, heads, dim), f32, device)
        best, total = (tilert.empty(acc.shape[:3], f32, device) for _ in range(2))
        dtype, kv, half = DTYPES[case.dtype], case["kv_heads"], dim // 2
        keys = tilert.empty((batch, tiles.splits, kv, 2, half), dtype, device)
        key, value = self._newest(i)
        appended = [tilert.empty(key.shape, dtype, device) for _ in range(2)]
        index = UniqueIndex.checked(np.arange(batch), device)
        gain = tilert.full((2, half), 1.0, dtype, device)
        cos, sin = (tilert.full((case["context"], half), x, f32, device) for x in (1.0, 0.0))
        columns = min(dim, tiles.columns)

        def call() -> None:
            kernels.decode_attention_split(
                acc.partition(1, 1, group, dim), best.partition(1, 1, group),
                total.partition(1, 1, group),
                *(keys[:, :, :, side].partition(1, 1, tiles.heads, half) for side in range(2)),
                inputs[0].reshape(batch, heads, 2, half), key.reshape(batch, kv, 2, half), value,
                *inputs[1:], gain, gain, cos, sin, **consts, eps=EPS, norm=False,
            ).run()  # fmt: skip
            kernels.merge_splits(
                y.partition(1, heads // kv, columns),
                *(to.partition_at(index, 1, 1, columns) for to in appended),
                acc, best, total, keys.reshape(batch, tiles.splits, kv, dim), value,
            ).run()  # fmt: skip

        return call

    def _newest(self, i: int) -> tuple[Array, Array]:
        """Copies of the keys and values of the last position: [batch, KV heads, dim] each."""
        case, device = self.case, self.memory.device
        place = (case["context"] - 1) % PAGE
        found = []
        for cache in (self._k[i].ours, self._v[i].ours):
            last = tilert.empty((case["batch"], case["kv_heads"], case["dim"]), cache.dtype, device)
            for b, page in enumerate(self._order[:, -1].tolist()):
                last[b].copy_from(cache[page, place])
            found.append(last)
        return found[0], found[1]

    def _theirs(self, i: int) -> Call:
        """On keys and values that lie as the peer wants them, outside of what is timed."""
        case = self.case
        shape = case["batch"], -1, case["kv_heads"], case["dim"]
        place = self._q[i].theirs.device
        order = self.memory.torch.as_tensor(self._order.reshape(-1), device=place)
        k, v = (
            t[i].theirs.index_select(0, order).reshape(shape)[:, : case["context"]].transpose(1, 2)
            for t in (self._k, self._v)
        )
        q = self._q[i].theirs[:, :, None]
        sdpa = self.memory.torch.nn.functional.scaled_dot_product_attention
        return lambda: sdpa(q, k, v, enable_gqa=True)

    def settle(self, result: Any) -> None:
        """See `Work`."""
        self.outputs[0].theirs.copy_(result[:, :, 0])

    def check(self, variant: Variant) -> tuple[Floats, Floats]:
        """See `Work`."""
        case, group = self.case, self.case["heads"] // self.case["kv_heads"]
        rows, heads = self.sampled(case["batch"], 2), self.sampled(case["heads"], 2)
        width = np.arange(case["dim"])
        got = self.memory.sample(self.outputs[0], rows, heads, width)
        q = self.memory.sample(self._q[0], rows, heads, width)
        want = np.empty_like(got)
        for r, row in enumerate(rows):
            for h, head in enumerate(heads):
                index = self._order[row], np.arange(PAGE), np.array([head // group]), width
                k, v = (self.memory.sample(t[0], *index).reshape(-1, case["dim"])
                        for t in (self._k, self._v))  # fmt: skip
                want[r, h] = attention(q[r, h], k, v, case["context"])
        return got, want


_WORK: dict[str, type[Work]] = {
    "gated": Gated,
    "gemm": Product,
    "skinny": Product,
    "streaming": Streaming,
    "prefill": Prefill,
    "decode": Decode,
}


def work_of(memory: Memory, case: Case, copies: int) -> Work:
    """The case's inputs, drawn."""
    return _WORK[case.group](memory, case, copies)


def switch(device: Device, variant: Variant) -> None:
    """Have kernels compiled under the variant's schedules from now on."""
    if os.environ.get("TILERT_SCHEDULES", "") != variant.schedules:
        os.environ["TILERT_SCHEDULES"] = variant.schedules
        device.launchers.clear()

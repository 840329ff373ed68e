"""mma on the tensor cores: operands in shared memory, accumulators in registers.

Rows of an operand are padded by 16 bytes, so that the eight rows an ldmatrix reads lie in
different banks.
"""

from tilert.codegen.emit import Emitter, c_name, c_type
from tilert.codegen.memory import address
from tilert.codegen.plan import Operand, source_of
from tilert.dtypes import f32, i8
from tilert.ir import Op, Value

__all__ = ["copy_now", "issue_copy", "mma"]


def issue_copy(e: Emitter, o: Operand, loop: Op | None, stage: str) -> None:
    """Start the 16-byte copies of a tile; inside a loop, first what its address depends on."""
    load = o.load
    if load is None:
        raise ValueError("operand is filled through registers")
    if loop is not None:
        _address_operations(e, load, loop)
    param = load.attrs["param"]
    where = address(e, param, load.attrs["access"], load.args, load.loc)
    itemsize = param.dtype.itemsize
    vector = 16 // itemsize
    per_row = o.cols // vector
    total = o.rows * per_row
    pointer = e.fresh("src")
    e.line(f"const {c_type(param.dtype)}* {pointer} = {c_name(param)} + ({where.base});")
    guard = " && ".join(where.uniform)
    e.line("#pragma unroll")
    with e.braces(f"for (int q = threadIdx.x; q < {total}; q += {e.plan.threads})"):
        e.line(f"const int row = q / {per_row}, col = q % {per_row} * {vector};")
        conditions = [guard] if guard else []
        offset: list[str] = []
        for axis, i in zip(where.axes, ("row", "col"), strict=True):
            offset.append(f"{i} * {axis.stride}")
            if axis.extent:
                conditions.append(axis.check(f"{axis.first} + {i}"))
        ok = " && ".join(conditions) or "true"
        dst = f"smem + {o.offset} + {stage} * {o.stage} + row * {o.pitch} + col * {itemsize}"
        e.line(f"const bool ok = {ok};")
        e.line(
            f"copy_async16(shared_address({dst}), {pointer} + (ok ? {' + '.join(offset)} : 0), ok);"
        )


def _address_operations(e: Emitter, load: Op, loop: Op) -> None:
    """Emit again the scalar operations of the loop body that the load's indices come from."""
    body = loop.regions[0]
    inside = {r: op for op in body.ops for r in op.results}
    done: set[Value] = set()

    def need(v: Value) -> None:
        op = inside.get(v)
        if op is None or v in done:
            return
        done.add(v)
        for a in op.args:
            need(a)
        e.op(op)

    for a in load.args:
        need(a)


def copy_now(e: Emitter, o: Operand) -> None:
    """Copy an operand that no loop pipelines."""
    e.line("__syncthreads();")
    with e.braces():
        issue_copy(e, o, None, "0")
    e.line("copy_commit();")
    e.line("copy_wait<0>();")
    e.line("__syncthreads();")


def _fill(e: Emitter, o: Operand) -> None:
    """Write a register tile into its shared buffer, columns past the tile as zeros."""
    v = o.value
    layout = e.layout(v)
    ctype = c_type(v.dtype)
    e.line("__syncthreads();")
    if o.padded_cols > o.cols or o.padded_rows > o.rows:
        # Whole fragments are multiplied: what lies past the tile must not be NaN.
        with e.braces(
            f"for (int q = threadIdx.x; q < {o.padded_rows * o.padded_cols}; q += {e.plan.threads})"
        ):
            e.line(f"const int row = q / {o.padded_cols}, col = q % {o.padded_cols};")
            place = f"smem + {o.offset} + row * {o.pitch} + col * {v.dtype.itemsize}"
            e.line(f"if (row >= {o.rows} || col >= {o.cols}) *({ctype}*)({place}) = {ctype}{{0}};")
    with e.each(layout.registers) as r:
        guard = e.inside(layout, r)
        row, col = e.index(layout, 0, r), e.index(layout, 1, r)
        place = f"smem + {o.offset} + ({row}) * {o.pitch} + ({col}) * {v.dtype.itemsize}"
        e.line(f"{f'if ({guard}) ' if guard else ''}*({ctype}*)({place}) = {e.at(v, r)};")
    e.line("__syncthreads();")


def mma(e: Emitter, op: Op) -> None:
    """`acc + a @ b`."""
    result, acc = op.result, op.args[2]
    name = e.declare(result)
    with e.each(e.registers(result)) as r:
        e.line(f"{name}[{r}] = {e.at(acc, r)};")
    operands: list[Operand | None] = []
    for position, side in enumerate(op.args[:2]):
        value, _ = source_of(side)
        if position == 0 and op in e.plan.direct:
            operands.append(None)
            continue
        o = e.plan.operands[value]
        if o.load is None and o not in operands:
            _fill(e, o)
        operands.append(o)
    if op.args[0].dtype in (f32, i8):
        _mma_plain(e, op, name, operands)
    else:
        _mma_half(e, op, name, operands)


def _base(e: Emitter, o: Operand) -> str:
    stage = e.stage_of.get(o)
    return f"{o.offset}" + (f" + {stage} * {o.stage}" if stage else "")


def _mma_half(e: Emitter, op: Op, name: str, operands: list[Operand | None]) -> None:
    m, n = op.result.shape
    k = op.args[0].shape[1]
    wm, wn = e.plan.warps[op]
    tiles_m, tiles_n = -(-m // (16 * wm)), -(-n // (8 * wn))
    _, a_transposed = source_of(op.args[0])
    _, b_transposed = source_of(op.args[1])
    b = operands[1]
    if b is None:
        raise ValueError("the right operand is always in shared memory")
    ctype = c_type(op.args[0].dtype)
    with e.braces():
        e.line("const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;")
        e.line(
            f"const int row0 = warp % {wm} * {tiles_m * 16}, col0 = warp / {wm} * {tiles_n * 8};"
        )
        e.line("(void)row0; (void)col0;")
        e.line(f"const u32 b_at = shared_address(smem + {_base(e, b)});")
        a = operands[0]
        if a is not None:
            e.line(f"const u32 a_at = shared_address(smem + {_base(e, a)});")
        e.line("#pragma unroll")
        with e.braces(f"for (int k = 0; k < {-(-k // 16) * 16}; k += 16)"):
            e.line(f"u32 fa[{tiles_m}][4];")
            e.line("#pragma unroll")
            with e.braces(f"for (int i = 0; i < {tiles_m}; ++i)"):
                if a is None:
                    _direct_fragment(e, op)
                else:
                    _left_fragment(e, a, a_transposed)
            e.line("#pragma unroll")
            with e.braces(f"for (int j = 0; j < {tiles_n}; j += 2)"):
                _right_fragments(e, b, b_transposed)
                e.line("#pragma unroll")
                with e.braces(f"for (int i = 0; i < {tiles_m}; ++i)"):
                    at = f"&{name}[(i * {tiles_n} + j) * 4]"
                    e.line(f"mma_step({at}, fa[i], fb[0], fb[1], {ctype}{{}});")
                    if tiles_n > 1:
                        at = f"&{name}[(i * {tiles_n} + j + 1) * 4]"
                        guard = f"if (j + 1 < {tiles_n}) " if tiles_n % 2 else ""
                        e.line(f"{guard}mma_step({at}, fa[i], fb[2], fb[3], {ctype}{{}});")


def _left_fragment(e: Emitter, a: Operand, transposed: bool) -> None:
    limit = a.padded_cols if transposed else a.padded_rows
    clamp = f"min(row0 + i * 16, {max(limit - 16, 0)})"
    if transposed:
        # Stored [k, m]: four 8x8 blocks (m, k), read transposed.
        e.line(f"const int mr = {clamp} + (lane / 8 % 2) * 8, kr = k + lane / 16 * 8 + lane % 8;")
        e.line(f"ldmatrix4_t(fa[i], a_at + kr * {a.pitch} + mr * 2);")
    else:
        e.line(f"const int mr = {clamp} + lane % 16, kc = k + lane / 16 * 8;")
        e.line(f"ldmatrix4(fa[i], a_at + mr * {a.pitch} + kc * 2);")


def _right_fragments(e: Emitter, b: Operand, transposed: bool) -> None:
    """Fragments of columns j*8 and (j+1)*8: registers 0, 1 and 2, 3."""
    e.line("u32 fb[4];")
    limit = b.padded_rows if transposed else b.padded_cols
    first = f"min(col0 + j * 8, {max(limit - 16, 0)})"
    e.line(f"const int n0 = {first}, shift = col0 + j * 8 - n0;")
    if transposed:
        # Stored [n, k]: rows are columns of b, k runs along the row.
        e.line("const int nr = n0 + lane / 16 * 8 + lane % 8, kc = k + lane / 8 % 2 * 8;")
        e.line(f"ldmatrix4(fb, b_at + nr * {b.pitch} + kc * 2);")
    else:
        e.line("const int kr = k + lane % 16, nc = n0 + lane / 16 * 8;")
        e.line(f"ldmatrix4_t(fb, b_at + kr * {b.pitch} + nc * 2);")
    # The last odd column of fragments is the second half of a pair.
    e.line("if (shift == 8) { fb[0] = fb[2]; fb[1] = fb[3]; }")


def _direct_fragment(e: Emitter, op: Op) -> None:
    """An accumulator-shaped left operand already lies as mma wants it: only pack pairs."""
    a = op.args[0]
    tiles_k = a.shape[1] // 8
    name = e.names[a]
    for half, (column, pair) in enumerate(((0, 0), (0, 2), (1, 0), (1, 2))):
        at = f"(i * {tiles_k} + k / 8 + {column}) * 4 + {pair}"
        e.line(f"fa[i][{half}] = pack({name}[{at}], {name}[{at} + 1]);")


def _mma_plain(e: Emitter, op: Op, name: str, operands: list[Operand | None]) -> None:
    """Plain multiply-adds, f32 in full precision: the tensor cores would round to tf32."""
    a, b = operands
    if a is None or b is None:
        raise ValueError("these operands are always in shared memory")
    layout = e.layout(op.result)
    k = op.args[0].shape[1]
    _, a_transposed = source_of(op.args[0])
    _, b_transposed = source_of(op.args[1])
    with e.braces(f"for (int k = 0; k < {k}; ++k)"), e.each(layout.registers) as r:
        row = f"min({e.index(layout, 0, r)}, {layout.shape[0] - 1})"
        col = f"min({e.index(layout, 1, r)}, {layout.shape[1] - 1})"
        left = _element(e, a, ("k", row) if a_transposed else (row, "k"))
        right = _element(e, b, (col, "k") if b_transposed else ("k", col))
        e.line(f"{name}[{r}] += {left} * {right};")


def _element(e: Emitter, o: Operand, at: tuple[str, str]) -> str:
    size = o.value.dtype.itemsize
    place = f"smem + {_base(e, o)} + ({at[0]}) * {o.pitch} + ({at[1]}) * {size}"
    return f"*(const {c_type(o.value.dtype)}*)({place})"

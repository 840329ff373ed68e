"""Kernels that are wrong in ownership, types, shapes or indexing, and the exact message each gives.

`§` stands before what the caret points at. Parameters have fixed types by their names, see `ARRAYS`
in test_wrong_kernels.py.
"""

__all__ = ["TYPES_AND_SHAPES"]

TYPES_AND_SHAPES: dict[str, tuple[str, str]] = {
    # Ownership, behind a helper or another name
    "O1: store through a helper": (
        """
@tilert.inline
def helper(a):
    §a.store(1.0)

def k(y: Mut, x: Ref):
    y.store(1.0)
    helper(x)
""",
        "O1 exclusive write: 'x' is a Ref and cannot be stored to; make it a Mut",
    ),
    "O1: a subscript store in a helper": (
        """
@tilert.inline
def helper(a):
    §a[0] = 1.0

def k(y: Mut, x: Ref):
    y.store(1.0)
    helper(x)
""",
        "O1 exclusive write: kernels write memory only through y.store(tile) of a Mut",
    ),
    "O2: reading another piece under another name": (
        """
def k(y: Mut, x: Ref):
    out = y
    out.store(§out[0] + 1.0)
""",
        "O2 disjoint pieces: a program reaches only its own piece of the Mut 'y'; use .load() and"
        " .store()",
    ),
    # Types
    "int and float": (
        """
def k(y: Mut, x: Ref, n: Ref):
    y.store(§x[y.index[0]] + n[0])
""",
        "f32 and i32 do not mix; cast one with .to(...)",
    ),
    "signed and unsigned": (
        """
def k(y: Mut, n: Ref, u: Ref):
    v = §n[0] * u[0]
    y.store(v.to(f32))
""",
        "i32 and u32 do not mix; cast one with .to(...)",
    ),
    "a fraction with an integer tile": (
        """
def k(y: Mut, n: Ref):
    y.store((§n[0] * 0.5).to(f32))
""",
        "0.5 is no i32; cast the tile to f32 first",
    ),
    "a negative literal with an unsigned tile": (
        """
def k(y: Mut, u: Ref):
    y.store((§u[0] + -1).to(f32))
""",
        "-1 does not fit u32",
    ),
    "true division of integers": (
        """
def k(y: Mut, n: Ref):
    y.store((§n[0] / n[1]).to(f32))
""",
        "needs a float tile, got i32; cast with .to(f32)",
    ),
    "exp of integers": (
        """
def k(y: Mut, n: Ref):
    y.store(§exp(n[0]))
""",
        "needs a float tile, got i32; cast with .to(f32)",
    ),
    "floor division of floats": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[0] // x[1])
""",
        "needs integer tiles, got f32",
    ),
    "bits of floats": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[0] & x[1])
""",
        "needs integer or bool tiles, got f32",
    ),
    "arithmetic on bools": (
        """
def k(y: Mut, x: Ref):
    v = x[y.index[0]]
    y.store((§(v > 0) + (v < 1)).to(f32))
""",
        "arithmetic on bool tiles; cast with .to(i32) or use & | ^",
    ),
    "the matrix operator": (
        """
def k(y: Mut, h: Ref):
    y.store(§h[:, :] @ h[:, :].T)
""",
        "write mma(a, b, acc) for a matrix product",
    ),
    "bitcast to another size": (
        """
def k(y: Mut, x: Ref):
    y.store(§bitcast(x[0], bf16).to(f32))
""",
        "cannot reinterpret f32 as bf16",
    ),
    "a cast to a Python type": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[0].to(float))
""",
        "expected a dtype such as f32, got 'float'",
    ),
    "a condition that is no bool": (
        """
def k(y: Mut, x: Ref, n: Ref):
    y.store(§where(n[0], x[0], 0.0))
""",
        "the condition must be bool, got i32",
    ),
    "mean of integers": (
        """
def k(y: Mut, n: Ref):
    y.store(§mean(n[:]).to(f32))
""",
        "mean needs a float tile, got i32; cast with .to(f32)",
    ),
    "a stored tile of another dtype": (
        """
def k(y: Mut, n: Ref):
    §y.store(n[y.index[0]])
""",
        "'y' holds f32, the stored tile has i32; cast with .to(...)",
    ),
    "a fill that does not fit": (
        """
def k(y: Mut, n: Ref):
    v = §n.load(y.index[0], fill=float("-inf"))
    y.store(v.to(f32))
""",
        "fill must be a compile-time i32, got float -inf",
    ),
    # Shapes
    "ranks that differ": (
        """
def k(y: Mut, x: Ref, xx: Ref):
    v = §xx[:, :] * x[:]
    y.store(sum(v))
""",
        "tiles of shapes [8, 16] and [8] differ in rank; insert axes with x[:, None] or x[None, :]",
    ),
    "shapes that do not broadcast": (
        """
def k(y: Mut, x: Ref, xx: Ref):
    v = §xx[:, :] * x[:][None, :]
    y.store(sum(v))
""",
        "tiles of shapes [8, 16] and [1, 8] do not broadcast",
    ),
    "a stored tile of another shape": (
        """
def k(y: Mut, x: Ref):
    §y.store(x[:])
""",
        "'y' holds pieces of shape [4], the stored tile has [8]",
    ),
    "mma of other shapes": (
        """
def k(yy: Mut, h: Ref):
    yy.store(§mma(h[:, :], h[:, :], zeros((8, 8), f32)))
""",
        "mma shapes do not agree: [8, 16] @ [8, 16] into [8, 8]",
    ),
    "mma of one axis": (
        """
def k(y: Mut, x: Ref):
    y.store(§mma(x[:], x[:], zeros((8, 8), f32)))
""",
        "mma takes 2-D tiles",
    ),
    "a transpose of one axis": (
        """
def k(y: Mut, x: Ref):
    y.store(sum(§x[:].T))
""",
        ".T needs a 2-D tile, got shape [8]",
    ),
    "a reshape to another size": (
        """
def k(y: Mut, xx: Ref):
    y.store(sum(§xx[:, :].reshape(3, -1)))
""",
        "cannot reshape [8, 16] to [3, -1]",
    ),
    "a run-time shape": (
        """
def k(y: Mut, n: Ref):
    y.store(sum(§zeros((n[0], 4), f32)))
""",
        "a shape is a tuple of positive compile-time ints, got a tuple of 2",
    ),
    "an empty shape extent": (
        """
def k(y: Mut, x: Ref):
    y.store(sum(§zeros((4, 0), f32)))
""",
        "a shape is a tuple of positive compile-time ints, got [4, 0]",
    ),
    "an axis that is not there": (
        """
def k(y: Mut, x: Ref):
    y.store(§sum(x[:], axis=1))
""",
        "no axis 1 in a tile of shape [8]",
    ),
    "a negative axis that is not there": (
        """
def k(y: Mut, x: Ref):
    y.store(§max(x[:], axis=-2))
""",
        "no axis -2 in a tile of shape [8]",
    ),
    "a reduction of a scalar": (
        """
def k(y: Mut, x: Ref):
    y.store(§max(x[0], 0))
""",
        "cannot reduce a scalar; maximum(a, b) takes two values",
    ),
    "a run-time axis": (
        """
def k(y: Mut, x: Ref, n: Ref):
    y.store(§argmax(x[:], n[0]).to(f32))
""",
        "the axis must be a compile-time int, got an i32 scalar",
    ),
    # Indexing
    "too few indices": (
        """
def k(y: Mut, xx: Ref):
    y.store(§xx[0])
""",
        "'xx' has 2 axes, 1 indices are given",
    ),
    "a static index outside": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[8])
""",
        "index 8 is outside axis 0 of 'x' (8)",
    ),
    "a negative index": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[-1])
""",
        "index -1 is outside axis 0 of 'x' (8)",
    ),
    "a part of an axis": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[2:6])
""",
        "only the whole-axis slice `:` indexes an array; use span()",
    ),
    "a whole run-time axis": (
        """
def k(y: Mut, x: Ref[Dyn]):
    y.store(sum(§x[:]))
""",
        "axis 0 of 'x' is run time; read it in tiles instead of `:`",
    ),
    "two gathers": (
        """
def k(y: Mut, xx: Ref, n: Ref):
    v = §xx[n[:], n[:]]
    y.store(sum(v))
""",
        "at most one index of an access may be a tile",
    ),
    "a float index": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[x[0]])
""",
        "a f32 scalar cannot index axis 0 of 'x'",
    ),
    "a string index": (
        """
def k(y: Mut, x: Ref):
    y.store(§x["first"])
""",
        "str 'first' cannot index axis 0 of 'x'",
    ),
    "an index tuple that is too short": (
        """
def k(y: Mut, x: Ref):
    y.store(x[§y.index[1]])
""",
        "cannot index a tuple of 1: tuple index out of range",
    ),
    "a span at a float": (
        """
def k(y: Mut, x: Ref):
    y.store(x[§span(x[0], 4)])
""",
        "a span starts at an integer scalar, got a f32 scalar",
    ),
    "a run-time span size": (
        """
def k(y: Mut, x: Ref, n: Ref):
    y.store(sum(x[§span(0, n[0])]))
""",
        "the size must be a compile-time int, got an i32 scalar",
    ),
    "an axis that an array lacks": (
        """
def k(y: Mut, x: Ref):
    for k in §tiles(x, axis=1, size=4):
        y.store(1.0)
""",
        "'x' has 1 axes, no axis 1",
    ),
    # Sizes
    "a tile of one huge axis": (
        """
def k(y: Mut, x: Ref):
    v = §iota(10**11)
    y.store(1.0)
""",
        "a tile of shape [100000000000] is too large: it has at most 67108864 elements",
    ),
    "a tile of two large axes": (
        """
def k(y: Mut, x: Ref):
    v = §zeros((2**14, 2**14), f32)
    y.store(1.0)
""",
        "a tile of shape [16384, 16384] is too large: it has at most 67108864 elements",
    ),
    "operands that broadcast to a huge tile": (
        """
def k(y: Mut, x: Ref):
    v = §iota(2**14)[:, None] + iota(2**14)[None, :]
    y.store(1.0)
""",
        "a tile of shape [16384, 16384] is too large: it has at most 67108864 elements",
    ),
    "a huge window": (
        """
def k(y: Mut, x: Ref):
    v = §x[span(0, 2**40)]
    y.store(1.0)
""",
        "a tile of shape [1099511627776] is too large: it has at most 67108864 elements",
    ),
    "a tile of too many axes": (
        """
def k(y: Mut, x: Ref):
    v = §x[:].reshape((1,) * 32 + (8,))
    y.store(1.0)
""",
        "a tile has at most 32 axes, got 33",
    ),
    # Division by zero
    "floor division by a literal 0": (
        """
def k(y: Mut, n: Ref):
    v = §n[:] // 0
    y.store(1.0)
""",
        "division by zero",
    ),
    "a remainder by a literal 0": (
        """
def k(y: Mut, u: Ref):
    v = §u[0] % 0
    y.store(1.0)
""",
        "division by zero",
    ),
    "floor division by a tile of zeros": (
        """
def k(y: Mut, n: Ref):
    v = §n[:] // zeros((8,), i32)
    y.store(1.0)
""",
        "division by zero",
    ),
    "an update by a remainder of 0": (
        """
def k(y: Mut, n: Ref):
    v = n[:]
    §v %= 0
    y.store(1.0)
""",
        "division by zero",
    ),
    "cdiv of a tile by 0": (
        """
def k(y: Mut, n: Ref):
    v = §cdiv(n[0], 0)
    y.store(1.0)
""",
        "division by zero",
    ),
    "cdiv of ints by 0": (
        """
def k(y: Mut, n: Ref):
    v = §cdiv(8, 0)
    y.store(1.0)
""",
        "division by zero",
    ),
    # Numbers beyond every type
    "an int too large for a float tile": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[y.index[0]] * 10**400)
""",
        "an int of 1329 bits does not fit f32",
    ),
    "a fill too large for a float": (
        """
def k(y: Mut, x: Ref):
    y.store(§x.load(y.index[0], fill=10**400))
""",
        "an int of 1329 bits does not fit f32",
    ),
    "an int too large for an integer tile": (
        """
def k(y: Mut, n: Ref):
    v = §n[:] + 10**400
    y.store(1.0)
""",
        "an int of 1329 bits does not fit i32",
    ),
    "a fill that is no bool": (
        """
def k(y: Mut, b: Ref):
    v = §b.load(y.index[0], fill=5)
    y.store(1.0)
""",
        "fill must be a compile-time bool, got int 5",
    ),
    "a power without end": (
        """
def k(y: Mut, x: Ref):
    v = §10 ** 10**9
    y.store(1.0)
""",
        "a compile-time value of more than 4096 bits or items",
    ),
    "a shift without end": (
        """
def k(y: Mut, x: Ref):
    v = §1 << 10**12
    y.store(1.0)
""",
        "a compile-time value of more than 4096 bits or items",
    ),
    "a tuple without end": (
        """
def k(y: Mut, x: Ref):
    v = §(1, 2) * 10**12
    y.store(1.0)
""",
        "a compile-time value of more than 4096 bits or items",
    ),
    "an int that grows in an unrolled loop": (
        """
def k(y: Mut, x: Ref):
    v = 3
    for i in static_range(100):
        §v *= v
    y.store(1.0)
""",
        "a compile-time int of more than 4096 bits",
    ),
}

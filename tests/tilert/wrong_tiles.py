"""Kernels that are wrong in moving, reducing, ordering or drawing tiles, and the exact messages.

`§` stands before what the caret points at. Parameters have fixed types by their names, see `ARRAYS`
in test_wrong_kernels.py.
"""

__all__ = ["WHOLE_TILES"]

NO_TILE = (
    "expected a tile or a number, got the array 'x'; x[...] reads a tile of it, x.tile_like(y) the"
    " one at the piece of a Mut y"
)


def one(expression: str, parameters: str = "x: Ref") -> str:
    """A kernel that stores one expression."""
    return f"\ndef k(y: Mut, {parameters}):\n    v = {expression}\n    y.store(1.0)\n"


WHOLE_TILES: dict[str, tuple[str, str]] = {
    # Reductions and running totals
    "a sum of bools": (
        one("§sum(x[:] > 0)"),
        "cannot reduce a bool tile; cast with .to(i32), or use any() or all()",
    ),
    "any of floats": (one("§any(x[:])"), "any needs a bool tile, got f32; compare first"),
    "all of integers": (
        one("§all(n[:], axis=0)", "n: Ref"),
        "all needs a bool tile, got i32; compare first",
    ),
    "prod of a scalar": (one("§prod(x[0])"), "cannot reduce a scalar"),
    "argmin without an axis": (
        one("§argmin(x[:])"),
        "wrong arguments; expected argmin(x, axis, keepdims=False)",
    ),
    "argmax along no axis": (
        one("§argmax(x[:], None)"),
        "the axis must be a compile-time int, got None",
    ),
    "keepdims that is no bool": (
        one("§prod(x[:], 0, keepdims=1)"),
        "keepdims is a compile-time bool, got int 1",
    ),
    "a running sum without an axis": (
        one("§cumsum(x[:])"),
        "wrong arguments; expected cumsum(x, axis)",
    ),
    "a running sum of bools": (
        one("§cumsum(x[:] > 0, 0)"),
        "cannot accumulate a bool tile; cast with .to(i32)",
    ),
    "a running sum of a scalar": (one("§cumsum(x[0], 0)"), "cannot accumulate a scalar"),
    "a running product along an axis that is not there": (
        one("§cumprod(x[:], 1)"),
        "no axis 1 in a tile of shape [8]",
    ),
    "a running maximum along a run-time axis": (
        one("§cummax(x[:], n[0])", "x: Ref, n: Ref"),
        "the axis must be a compile-time int, got an i32 scalar",
    ),
    "a running minimum of an array": (
        one("§cummin(x, 0)"),
        NO_TILE,
    ),
    # Order
    "a sort of bools": (
        one("§sort(b[:])", "b: Ref"),
        "cannot sort a bool tile; cast with .to(i32)",
    ),
    "a sort of a scalar": (one("§sort(x[0])"), "cannot sort a scalar"),
    "a sort along an axis that is not there": (
        one("§argsort(xx[:, :], axis=2)", "xx: Ref"),
        "no axis 2 in a tile of shape [8, 16]",
    ),
    "a run-time direction": (
        one("§sort(x[:], descending=b[0])", "x: Ref, b: Ref"),
        "descending is a compile-time bool, got a bool scalar",
    ),
    "more of the largest than there are": (
        one("§topk(x[:], 9)"),
        "topk takes 1 to 8 elements of the axis, got 9",
    ),
    "none of the largest": (
        one("§topk(x[:], 0)"),
        "topk takes 1 to 8 elements of the axis, got 0",
    ),
    "a run-time number of the largest": (
        one("§topk(x[:], n[0])", "x: Ref, n: Ref"),
        "k must be a compile-time int, got an i32 scalar",
    ),
    # Slices of tiles
    "an element of a tile that is not there": (
        one("§x[:][8]"),
        "index 8 is outside axis 0 of a tile (8)",
    ),
    "a run-time element of a tile": (
        one("§x[:][n[0]]", "x: Ref, n: Ref"),
        "a tile is indexed by compile-time ints, slices and None, got an i32 scalar; use take(x,"
        " index, axis)",
    ),
    "a run-time slice of a tile": (
        one("§x[:][n[0]:]", "x: Ref, n: Ref"),
        "a slice of a tile has compile-time bounds, got an i32 scalar; use take(x, index, axis)",
    ),
    "an empty slice of a tile": (
        one("§x[:][5:5]"),
        "the slice of axis 0 is empty: the tile has 8 there",
    ),
    "a slice of step 0": (one("§x[:][::0]"), "a slice's step must not be 0"),
    "too many indices of a tile": (
        one("§x[:][0, 0]"),
        "a tile of shape [8] has no 2 axes to index",
    ),
    "two ellipses": (one("§xx[:, :][..., ...]", "xx: Ref"), "an index has at most one `...`"),
    "an index of a scalar": (one("§x[0][0]"), "a tile of shape [] has no 1 axes to index"),
    # Movement
    "an axis left out of permute": (
        one("§xx[:, :].permute(1)", "xx: Ref"),
        "permute takes every axis of shape [8, 16] once, got [1]",
    ),
    "an axis twice in permute": (
        one("§xx[:, :].permute(0, -2)", "xx: Ref"),
        "permute takes every axis of shape [8, 16] once, got [0, -2]",
    ),
    "a run-time axis in permute": (
        one("§xx[:, :].permute(n[0], 0)", "xx: Ref, n: Ref"),
        "an axis must be a compile-time int, got an i32 scalar",
    ),
    "a broadcast to another shape": (
        one("§broadcast_to(x[:], (3,))"),
        "cannot broadcast [8] to [3]",
    ),
    "a broadcast to a run-time shape": (
        one("§broadcast_to(x[0], n[0])", "x: Ref, n: Ref"),
        "a shape is a tuple of positive compile-time ints, got an i32 scalar",
    ),
    "concatenate without a tuple": (
        one("§concatenate(x[:], x[:])"),
        "concatenate takes a tuple of tiles, got a tile f32[8]",
    ),
    "concatenate of nothing": (
        one("§concatenate(())"),
        "concatenate takes a tuple of tiles, got a tuple of 0",
    ),
    "concatenate of scalars": (
        one("§concatenate((x[0], x[1]))"),
        "cannot concatenate a scalar",
    ),
    "concatenate of several dtypes": (
        one("§concatenate((x[:], n[:]))", "x: Ref, n: Ref"),
        "operands must have one dtype, got f32 and i32; cast with .to(...)",
    ),
    "concatenate of tiles that do not fit": (
        one("§concatenate((xx[:, :], xx[:, :][:, 1:]), axis=0)", "xx: Ref"),
        "tiles of shapes [8, 16] and [8, 15] cannot be joined along axis 0",
    ),
    "take with two axes of indices": (
        one("§take(x[:], n[:][:, None], 0)", "x: Ref, n: Ref"),
        "take needs an integer scalar or a 1-D integer tile, got a tile i32[8, 1]; use"
        " take_along(x, index, axis)",
    ),
    "take at floats": (
        one("§take(x[:], x[:], 0)"),
        "take needs an integer scalar or a 1-D integer tile, got a tile f32[8]; use take_along(x,"
        " index, axis)",
    ),
    "take from a scalar": (one("§take(x[0], 0, 0)"), "cannot take from a scalar"),
    "take_along with an index of another rank": (
        one("§take_along(xx[:, :], n[:], 1)", "xx: Ref, n: Ref"),
        "an index of shape [8] does not fit a tile of shape [8, 16] along axis 1",
    ),
    "take_along with an index of another shape": (
        one("§take_along(xx[:, :], n[:][None, :][:, :4].reshape(2, 2), 1)", "xx: Ref, n: Ref"),
        "an index of shape [2, 2] does not fit a tile of shape [8, 16] along axis 1",
    ),
    "take_along at floats": (
        one("§take_along(x[:], x[:], 0)"),
        "an index must be an integer tile, got f32[8]",
    ),
    # Numbers
    "a power of integers by a tile": (
        one("§n[:] ** n[:]", "n: Ref"),
        "needs a float tile, got i32; cast with .to(f32)",
    ),
    "a power of integers by a fraction": (
        one("§pow(n[:], 0.5)", "n: Ref"),
        "0.5 is no i32; cast the tile to f32 first",
    ),
    "isnan of integers": (
        one("§isnan(n[:])", "n: Ref"),
        "needs a float tile, got i32; cast with .to(f32)",
    ),
    "erf of an array": (one("§erf(x)"), NO_TILE),
    "fma of integers": (
        one("§fma(n[:], n[:], n[:])", "n: Ref"),
        "needs a float tile, got i32; cast with .to(f32)",
    ),
    "fma of two values": (one("§fma(x[:], x[:])"), "wrong arguments; expected fma(a, b, c)"),
    "a clamp between other types": (
        one("§clamp(n[:], 0, 1.5)", "n: Ref"),
        "1.5 is no i32; cast the tile to f32 first",
    ),
    "atan2 of integers": (
        one("§atan2(n[0], n[1])", "n: Ref"),
        "needs a float tile, got i32; cast with .to(f32)",
    ),
    # Random numbers
    "a float as a seed": (
        one("§random_bits(1.5, n[:])", "n: Ref"),
        "a seed is an integer, got float 1.5",
    ),
    "a tile as a seed": (
        one("§random_uniform(n[:], n[:])", "n: Ref"),
        "a seed is an integer scalar, got a tile i32[8]",
    ),
    "a seed that is too large": (
        one("§random_normal(2**64, n[:])", "n: Ref"),
        "a seed must fit in 64 bits",
    ),
    "a float as a counter": (
        one("§philox(1, x[:])"),
        "a counter is an integer, got a tile f32[8]",
    ),
    "a tile index as a counter": (
        one("§random_bits(1, y.index[0])"),
        "a counter is an integer, got a tile index of size 4",
    ),
    # Accumulating
    "a store to an accumulating Mut": (
        """
def k(y: Mut[Accumulate.Add], x: Ref):
    §y.store(x[y.index[0]])
""",
        "O2 disjoint pieces: 'y' is a Mut[Accumulate.Add], whose pieces may overlap; only"
        " y.add(tile) is allowed",
    ),
    "a load of an accumulating Mut": (
        """
def k(y: Mut[Accumulate.Min], x: Ref):
    y.min(§y.load())
""",
        "O2 disjoint pieces: 'y' is a Mut[Accumulate.Min], whose pieces may overlap; only"
        " y.min(tile) is allowed",
    ),
    "another update than declared": (
        """
def k(y: Mut[Accumulate.Add], x: Ref):
    §y.max(x[y.index[0]])
""",
        "O2 disjoint pieces: 'y' is a Mut[Accumulate.Add], whose pieces may overlap; only"
        " y.add(tile) is allowed",
    ),
    "an update of a plain Mut": (
        """
def k(y: Mut, x: Ref):
    §y.add(x[y.index[0]])
""",
        "'y' is a plain Mut; declare it Mut[Accumulate.Add] to call y.add(tile)",
    ),
    "a maximum of floats": (
        """
def k(y: Mut[Accumulate.Max], x: Ref):
    §y.max(x[y.index[0]])
""",
        "'y' holds f32; .max(tile) updates i32, u32 or i64",
    ),
    "an update of another shape": (
        """
def k(y: Mut[Accumulate.Add], x: Ref):
    §y.add(x[:])
""",
        "'y' holds pieces of shape [4], the stored tile has [8]",
    ),
    "an update at an index": (
        """
def k(y: Mut[Accumulate.Add], x: Ref, n: Ref):
    §y.add(x[y.index[0]], n[0])
""",
        "wrong arguments; expected .add(tile)",
    ),
    # Debugging
    "a print without a text": (
        one("§device_print(x[:])"),
        "device_print begins with a text, got a tile f32[8]",
    ),
    "NumPy's name of a cast": (
        one("§x[0].astype(bf16)"),
        "a f32 scalar has no attribute 'astype'; use .to(dtype)",
    ),
    "NumPy's method for a word": (
        one("§x[:].mean()"),
        "a tile f32[8] has no attribute 'mean'; use mean(x, axis=None, keepdims=False) of"
        " tilert.language",
    ),
    "an attribute that nothing has": (
        one("§x[:].nbytes"),
        "a tile f32[8] has no attribute 'nbytes'",
    ),
    "a print of an array": (
        one("§device_print('x', x)"),
        NO_TILE,
    ),
    "a run-time check without a message": (
        one("§debug_assert(x[:] > 0)"),
        "wrong arguments; expected debug_assert(condition, message)",
    ),
    "a run-time check of floats": (
        one("§debug_assert(x[:], 'positive')"),
        "debug_assert needs a bool scalar or tile, got f32",
    ),
    "a run-time check whose message is no text": (
        one("§debug_assert(x[0] > 0, 5)"),
        "debug_assert ends with a text, got int 5",
    ),
    "a run-time condition of assert": (
        """
def k(y: Mut, x: Ref):
    assert §x[0] > 0, "positive"
    y.store(1.0)
""",
        "assert takes a compile-time condition; debug_assert(condition, message) a run-time one",
    ),
    # 8-bit types
    "mma of mixed dtypes": (
        """
def k(yy: Mut, h: Ref, xx: Ref):
    yy.store(§mma(h[:, :], xx[:, :].T, zeros((8, 8), f32)))
""",
        "mma takes two f32, bf16, f16 or i8 tiles, or two of f8e4m3 and f8e5m2, got bf16, f32",
    ),
    "mma into bf16": (
        """
def k(yy: Mut, h: Ref):
    yy.store(§mma(h[:, :], h[:, :].T, zeros((8, 8), bf16)))
""",
        "mma of bf16 accumulates in f32, got bf16",
    ),
    "mma of i8 into f32": (
        """
def k(yy: Mut, xx: Ref):
    v = xx[:, :].to(i8)
    yy.store(§mma(v, v.T, zeros((8, 8), f32)))
""",
        "mma of i8 accumulates in i32, got f32",
    ),
    "f8 with integers": (
        one("§x[:].to(f8e4m3) + n[:]", "x: Ref, n: Ref"),
        "f8e4m3 and i32 do not mix; cast one with .to(...)",
    ),
    "bitcast of f8 to 16 bits": (
        one("§bitcast(x[:].to(f8e5m2), f16)"),
        "cannot reinterpret f8e5m2 as f16",
    ),
}

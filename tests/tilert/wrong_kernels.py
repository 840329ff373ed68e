"""Wrong kernels and the exact message each gives. `§` stands before what the caret points at.

Parameters have fixed types by their names, see `ARRAYS` in test_wrong_kernels.py.
"""

__all__ = ["AT_DECORATION", "AT_SPECIALISATION"]

AT_DECORATION: dict[str, tuple[str, str]] = {
    "O1: a subscript store to a Ref": (
        """
def k(y: Mut, x: Ref):
    §x[0] = 1.0
    y.store(x[y.index[0]])
""",
        "O1 exclusive write: 'x' is a Ref and cannot be written; make it a Mut and call"
        " x.store(tile)",
    ),
    "O1: an update of a Ref": (
        """
def k(y: Mut, x: Ref):
    §x[0] += 1.0
    y.store(x[y.index[0]])
""",
        "O1 exclusive write: 'x' is a Ref and cannot be written; make it a Mut and call"
        " x.store(tile)",
    ),
    "O1: store on a Ref": (
        """
def k(y: Mut, x: Ref):
    y.store(1.0)
    §x.store(2.0)
""",
        "O1 exclusive write: 'x' is a Ref and cannot be stored to; make it a Mut",
    ),
    "O1: a Mut that is never written": (
        """
§def k(y: Mut, z: Mut, x: Ref):
    y.store(x[y.index[0]] + z.load())
""",
        "O1 exclusive write: Mut 'z' is never stored to; make it a Ref or call z.store(tile)",
    ),
    "O1: assignment to an attribute's item": (
        """
def k(y: Mut, x: Ref):
    §y.shape[0] = 4
    y.store(1.0)
""",
        "O1 exclusive write: kernels write memory only through y.store(tile) of a Mut",
    ),
    "O2: a store at an index": (
        """
def k(y: Mut, x: Ref):
    §y[y.index[0]] = x[0]
""",
        "O2 disjoint pieces: a store takes no index; program i writes piece i: call y.store(tile)",
    ),
    "O2: store with an index argument": (
        """
def k(y: Mut, x: Ref):
    §y.store(3, x[0])
""",
        "O2 disjoint pieces: y.store(tile) takes the tile and no index; program i writes piece i",
    ),
    "O2: store with a keyword": (
        """
def k(y: Mut, x: Ref):
    §y.store(x[0], at=3)
""",
        "O2 disjoint pieces: y.store(tile) takes the tile and no index; program i writes piece i",
    ),
    "O2: reading another program's piece": (
        """
def k(y: Mut, x: Ref):
    y.store(§y[0] + 1.0)
""",
        "O2 disjoint pieces: a program reaches only its own piece of the Mut 'y'; use y.load() and"
        " y.store()",
    ),
    "no Mut": (
        """
§def k(x: Ref):
    v = x[0]
""",
        "a kernel needs at least one Mut parameter: its partition gives the grid",
    ),
    "no annotation": (
        """
def k(y: Mut, §x):
    y.store(1.0)
""",
        "parameter 'x' must be annotated Mut, Ref, Const[int], Const[float] or Const[bool]",
    ),
    "an annotation of another kind": (
        """
def k(y: Mut, §x: int):
    y.store(1.0)
""",
        "parameter 'x' must be annotated Mut, Ref, Const[int], Const[float] or Const[bool]",
    ),
    "a Const of another kind": (
        """
def k(y: Mut, §x: Const[str]):
    y.store(1.0)
""",
        "parameter 'x' must be annotated Mut, Ref, Const[int], Const[float] or Const[bool]",
    ),
    "a Const without a type": (
        """
def k(y: Mut, §x: Const):
    y.store(1.0)
""",
        "parameter 'x' must be annotated Mut, Ref, Const[int], Const[float] or Const[bool]",
    ),
    "an extent in an annotation": (
        """
def k(y: Mut, §x: Ref[16]):
    y.store(1.0)
""",
        "Ref[...] takes only Dyn",
    ),
    "a quoted annotation that names nothing": (
        """
§def k(y: Mut, x: "Reff"):
    y.store(1.0)
""",
        "an annotation cannot be read: name 'Reff' is not defined",
    ),
    "a default of an array": (
        """
def k(y: Mut, §x: Ref = None):
    y.store(1.0)
""",
        "array parameter 'x' takes no default",
    ),
    "a default of another type": (
        """
def k(y: Mut, §c: Const[int] = 1.5):
    y.store(1.0)
""",
        "the default of 'c' must be of type int, got 1.5",
    ),
    "star parameters": (
        """
§def k(y: Mut, *xs: Ref):
    y.store(1.0)
""",
        "kernels take plain parameters: no *, ** or /",
    ),
    "an unknown name": (
        """
def k(y: Mut, x: Ref):
    y.store(x[0] + §offset)
""",
        "'offset' is not defined",
    ),
    "an unknown function": (
        """
def k(y: Mut, x: Ref):
    y.store(§softmax(x[0]))
""",
        "'softmax' is not defined",
    ),
    "while": (
        """
def k(y: Mut, x: Ref):
    §while True:
        y.store(1.0)
""",
        "while is not available in kernels; use `for i in range(...)`",
    ),
    "break": (
        """
def k(y: Mut, x: Ref):
    for i in range(3):
        y.store(1.0)
        §break
""",
        "break is not available in kernels; bound the loop instead",
    ),
    "continue": (
        """
def k(y: Mut, x: Ref):
    for i in range(3):
        §continue
    y.store(1.0)
""",
        "continue is not available in kernels; use where() or an if",
    ),
    "return of a value": (
        """
def k(y: Mut, x: Ref):
    y.store(1.0)
    §return x[0]
""",
        "a kernel returns nothing; store results in a Mut",
    ),
    "an early return": (
        """
def k(y: Mut, x: Ref):
    y.store(1.0)
    §return
""",
        "return is not available in kernels; use an if",
    ),
    "lambda": (
        """
def k(y: Mut, x: Ref):
    f = §lambda v: v + 1
    y.store(f(x[0]))
""",
        "lambda is not available in kernels; use a @tilert.inline function",
    ),
    "a list comprehension": (
        """
def k(y: Mut, x: Ref):
    vs = §[x[i] for i in range(3)]
    y.store(vs[0])
""",
        "a comprehension is not available in kernels",
    ),
    "try": (
        """
def k(y: Mut, x: Ref):
    §try:
        y.store(1.0)
    finally:
        pass
""",
        "try is not available in kernels",
    ),
    "a nested function": (
        """
def k(y: Mut, x: Ref):
    §def helper(v):
        return v
    y.store(helper(x[0]))
""",
        "a nested function is not available in kernels; use @tilert.inline",
    ),
    "an import": (
        """
def k(y: Mut, x: Ref):
    §import math
    y.store(math.pi)
""",
        "import is not available in kernels; import at the top of the module",
    ),
    "the walrus": (
        """
def k(y: Mut, x: Ref):
    y.store((§v := x[0]) + v)
""",
        "`:=` is not available in kernels",
    ),
}

AT_SPECIALISATION: dict[str, tuple[str, str]] = {
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
    "a power": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[0] ** 2)
""",
        "** is not available on tiles; multiply or use exp/log",
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
    "mma of mixed dtypes": (
        """
def k(yy: Mut, h: Ref, xx: Ref):
    yy.store(§mma(h[:, :], xx[:, :].T, zeros((8, 8), f32)))
""",
        "mma takes two f32, bf16 or f16 tiles, got bf16, f32",
    ),
    "mma into bf16": (
        """
def k(yy: Mut, h: Ref):
    yy.store(§mma(h[:, :], h[:, :].T, zeros((8, 8), bf16)))
""",
        "mma accumulates in f32, got bf16",
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
    "a sum of bools": (
        """
def k(y: Mut, x: Ref):
    y.store(§sum(x[:] > 0).to(f32))
""",
        "cannot reduce a bool tile; cast with .to(i32)",
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
    "an element of a tile": (
        """
def k(y: Mut, x: Ref):
    v = x[:]
    y.store(§v[0])
""",
        "a tile is indexed only to insert axes, as in x[:, None]; slices of tiles are read from"
        " the array",
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
    # Control flow
    "a carried variable that changes type": (
        """
def k(y: Mut, x: Ref, n: Ref):
    acc = 0
    §for i in range(n[0]):
        acc = x[i]
    y.store(acc)
""",
        "'acc' changes from an i32 scalar to a f32 scalar in the loop",
    ),
    "a carried variable that changes shape": (
        """
def k(y: Mut, x: Ref, n: Ref):
    acc = zeros((1,), f32)
    §for i in range(n[0]):
        acc = acc + x[:]
    y.store(sum(acc))
""",
        "'acc' changes from a tile f32[1] to a tile f32[8] in the loop",
    ),
    "a variable of a loop after it": (
        """
def k(y: Mut, x: Ref, n: Ref):
    for i in range(n[0]):
        last = x[i]
    y.store(§last)
""",
        "'last' is set only inside a loop",
    ),
    "the counter of a loop after it": (
        """
def k(y: Mut, x: Ref, n: Ref):
    i = 0
    for i in range(n[0]):
        y.store(x[i])
    y.store(x[§i])
""",
        "'i' is set only inside a loop",
    ),
    "a tile index in a carried variable": (
        """
def k(y: Mut, x: Ref, n: Ref):
    i = y.index[0]
    §for j in range(n[0]):
        i = j
    y.store(x[i])
""",
        "'i' is a tile index of size 4 and cannot be changed in a loop",
    ),
    "a variable of one branch": (
        """
def k(y: Mut, x: Ref, n: Ref):
    if n[0] > 0:
        v = x[0]
    y.store(§v)
""",
        "'v' is set in only one branch of an if",
    ),
    "branches of different types": (
        """
def k(y: Mut, x: Ref, n: Ref):
    §if n[0] > 0:
        v = x[0]
    else:
        v = x[:]
    y.store(sum(v))
""",
        "'v' is a f32 scalar in one branch and a tile f32[8] in the other",
    ),
    "an if on a tile": (
        """
def k(y: Mut, x: Ref):
    if §x[:] > 0:
        y.store(1.0)
""",
        "an if needs a bool scalar, got a tile bool[8]",
    ),
    "an if on an integer": (
        """
def k(y: Mut, n: Ref):
    if §n[0]:
        y.store(1.0)
""",
        "an if needs a bool scalar, got an i32 scalar",
    ),
    "an if on a tile index": (
        """
def k(y: Mut, x: Ref):
    if §y.index[0] == 0:
        y.store(1.0)
""",
        "a tile index is no number; use its .number, .start or .offsets",
    ),
    "and on tiles": (
        """
def k(y: Mut, x: Ref, n: Ref):
    if §n[0] > 0 and n[1] > 0:
        y.store(1.0)
""",
        "use & and | on bool tiles",
    ),
    "not on a tile": (
        """
def k(y: Mut, x: Ref, n: Ref):
    if §not n[0] > 0:
        y.store(1.0)
""",
        "`not` needs a compile-time value; use ~ on bool tiles",
    ),
    "a chained comparison": (
        """
def k(y: Mut, x: Ref):
    y.store(where(§0 < x[:] < 1, 1.0, 0.0))
""",
        "chained comparisons: write (a < b) & (b < c)",
    ),
    "a conditional expression on a tile": (
        """
def k(y: Mut, x: Ref):
    y.store(§1.0 if x[0] > 0 else 0.0)
""",
        "use where(condition, a, b) on tiles",
    ),
    "a loop over a tuple": (
        """
def k(y: Mut, x: Ref):
    for i in §(0, 1, 2):
        y.store(x[i])
""",
        "a loop runs over range(), tiles() or static_range()",
    ),
    "float bounds": (
        """
def k(y: Mut, x: Ref):
    for i in §range(x[0]):
        y.store(1.0)
""",
        "loop bounds must be ints or i32 scalars, got a f32 scalar",
    ),
    "a run-time loop downwards": (
        """
def k(y: Mut, n: Ref):
    for i in §range(n[0], 0, -1):
        y.store(1.0)
""",
        "a run-time loop's step must be a positive int",
    ),
    "a static loop of run-time length": (
        """
def k(y: Mut, n: Ref):
    for i in §static_range(n[0]):
        y.store(1.0)
""",
        "static_range takes a compile-time int, got an i32 scalar; use range()",
    ),
    "for-else": (
        """
def k(y: Mut, x: Ref):
    §for i in range(4):
        y.store(1.0)
    else:
        pass
""",
        "for-else is not available in kernels",
    ),
    "return inside a run-time loop": (
        """
@tilert.inline
def first(x, n):
    for i in range(n):
        §return x[i]

def k(y: Mut, x: Ref, n: Ref):
    y.store(first(x, n[0]))
""",
        "return is not available inside a run-time loop or if; assign a variable and return it at"
        " the end",
    ),
    "recursion": (
        """
@tilert.inline
def endless(x):
    return §endless(x + 1)

def k(y: Mut, x: Ref):
    y.store(endless(x[0]))
""",
        "endless() is inlined 64 deep; inlined functions cannot recurse",
    ),
    "a failed assertion": (
        """
def k(y: Mut, x: Ref):
    §assert y.shape[0] == 16, "pieces of 16 are needed"
    y.store(1.0)
""",
        "pieces of 16 are needed",
    ),
    # Words and calls
    "a name that is bound later": (
        """
def k(y: Mut, x: Ref):
    y.store(§v)
    v = x[0]
""",
        "'v' is not defined",
    ),
    "a Python function": (
        """
def k(y: Mut, x: Ref):
    §print(x[0])
    y.store(1.0)
""",
        "'print' cannot be called in a kernel; decorate helpers with @tilert.inline",
    ),
    "a helper without a decorator": (
        """
def helper(v):
    return v

def k(y: Mut, x: Ref):
    y.store(§helper(x[0]))
""",
        "'helper' cannot be called in a kernel; decorate helpers with @tilert.inline",
    ),
    "wrong arguments of a word": (
        """
def k(y: Mut, x: Ref):
    y.store(§where(x[0] > 0, x[0]))
""",
        "wrong arguments; expected where(condition, a, b)",
    ),
    "an unknown keyword of a word": (
        """
def k(y: Mut, x: Ref):
    y.store(§sum(x[:], dim=0))
""",
        "wrong arguments; expected sum(x, axis=None, keepdims=False)",
    ),
    "wrong arguments of a method": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[:].to())
""",
        "wrong arguments; expected .to(dtype)",
    ),
    "wrong arguments of a helper": (
        """
@tilert.inline
def twice(v):
    return v + v

def k(y: Mut, x: Ref):
    y.store(§twice(x[0], 2))
""",
        "twice(): too many positional arguments",
    ),
    "wrong arguments of tiles": (
        """
def k(y: Mut, x: Ref):
    for i in §tiles(x, 0):
        y.store(1.0)
""",
        "expected tiles(array, axis, size, start=0, stop=None)",
    ),
    "tiles of a tile": (
        """
def k(y: Mut, x: Ref):
    for i in §tiles(x[:], axis=0, size=4):
        y.store(1.0)
""",
        "tiles() walks an array parameter, got a tile f32[8]",
    ),
    "tiles outside a for": (
        """
def k(y: Mut, x: Ref):
    ks = §tiles(x, axis=0, size=4)
    y.store(1.0)
""",
        "tiles() stands only in a for statement",
    ),
    "an unknown attribute of an array": (
        """
def k(y: Mut, x: Ref):
    y.store(§x.size)
""",
        "the array 'x' has no attribute 'size'",
    ),
    "an unknown attribute of a tile": (
        """
def k(y: Mut, x: Ref):
    y.store(§x[0].mean())
""",
        "a f32 scalar has no attribute 'mean'",
    ),
    "an unknown attribute of a Mut": (
        """
def k(y: Mut, x: Ref):
    y.store(§y.grid)
""",
        "the Mut 'y' has no attribute 'grid'",
    ),
    "arithmetic on a tile index": (
        """
def k(y: Mut, x: Ref):
    y.store(x[§y.index[0] + 1])
""",
        "a tile index is no number; use its .number, .start or .offsets",
    ),
    "arithmetic on an array": (
        """
def k(y: Mut, x: Ref):
    y.store(§x + 1.0)
""",
        "the array 'x' is no tile or number",
    ),
    "a minus in front of an array": (
        """
def k(y: Mut, x: Ref):
    y.store(-§x)
""",
        "the array 'x' is no tile or number",
    ),
    "an array where a tile is due": (
        """
def k(y: Mut, x: Ref):
    y.store(§exp(x))
""",
        "expected a tile or a number, got the array 'x'",
    ),
    "a store of an array": (
        """
def k(y: Mut, x: Ref):
    §y.store(x)
""",
        "expected a tile or a number, got the array 'x'",
    ),
    "tile_like of a Ref": (
        """
def k(y: Mut, x: Ref):
    y.store(§x.tile_like(x))
""",
        "tile_like takes a Mut, got the array 'x'",
    ),
    "a wrong unpacking": (
        """
def k(y: Mut, x: Ref):
    §i, j = y.index
    y.store(1.0)
""",
        "cannot unpack a tuple of 1 into 2 names",
    ),
    "an f-string": (
        """
def k(y: Mut, x: Ref):
    name = §f"{y}"
    y.store(1.0)
""",
        "an f-string is not available in kernels",
    ),
    "a list": (
        """
def k(y: Mut, x: Ref):
    vs = §[x[0], x[1]]
    y.store(vs[0])
""",
        "a list is not available in kernels",
    ),
    "a static division by zero": (
        """
def k(y: Mut, x: Ref):
    y.store(x[§4 // (y.shape[0] - 4)])
""",
        "integer division or modulo by zero",
    ),
    "after letters that take several bytes": (
        """
def k(y: Mut, x: Ref):
    größe = "äöü"; y.store(§x[8])
""",
        "index 8 is outside axis 0 of 'x' (8)",
    ),
    "in a line of its own": (
        """
def k(y: Mut, x: Ref):
    y.store(
        x[0]
        + exp(
            §x[9]
        )
    )
""",
        "index 9 is outside axis 0 of 'x' (8)",
    ),
}

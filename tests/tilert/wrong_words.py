"""Kernels that are wrong in control flow, names or calls, and the exact message each gives.

`§` stands before what the caret points at. Parameters have fixed types by their names, see `ARRAYS`
in test_wrong_kernels.py.
"""

__all__ = ["CONTROL_AND_WORDS"]

CONTROL_AND_WORDS: dict[str, tuple[str, str]] = {
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
        "an if needs a bool scalar, got a tile bool[8]; where(condition, a, b) chooses for each"
        " element",
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
        "'print' cannot be called in a kernel; use device_print(text, *values) of tilert.language",
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
        "expected a tile or a number, got the array 'x'; x[...] reads a tile of it, x.tile_like(y)"
        " the one at the piece of a Mut y",
    ),
    "a store of an array": (
        """
def k(y: Mut, x: Ref):
    §y.store(x)
""",
        "expected a tile or a number, got the array 'x'; x[...] reads a tile of it, x.tile_like(y)"
        " the one at the piece of a Mut y",
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
    # Bounds on loops
    "static_range without end": (
        """
def k(y: Mut, x: Ref):
    for i in §static_range(10**9):
        y.store(x[i])
""",
        "static_range unrolls at most 4096 iterations, got int 1000000000; use range()",
    ),
    "unrolled loops inside each other without end": (
        """
def k(y: Mut, x: Ref):
    for i in static_range(1000):
        for j in static_range(1000):
            §pass
    y.store(1.0)
""",
        "a kernel has at most 65536 statements once its loops are unrolled and its helpers inlined;"
        " use range()",
    ),
    "helpers that double without end": (
        """
@tilert.inline
def twice(v, n):
    if n > 0:
        twice(v, n - 1)
        §twice(v, n - 1)

def k(y: Mut, x: Ref):
    twice(0, 40)
    y.store(1.0)
""",
        "a kernel has at most 65536 statements once its loops are unrolled and its helpers inlined;"
        " use range()",
    ),
    "a loop bound beyond every integer type": (
        """
def k(y: Mut, x: Ref):
    §for i in range(10**20):
        y.store(1.0)
""",
        "100000000000000000000 does not fit i32",
    ),
    # Unpacking
    "a starred target": (
        """
def k(y: Mut, x: Ref):
    a, §*b = (1, 2, 3)
    y.store(1.0)
""",
        "a starred target is not available in kernels; name every item",
    ),
    # What changes cannot be a constant
    "an item of a list of the module": (
        """
TABLE = [1.0, 2.0]

def k(y: Mut, x: Ref):
    y.store(§TABLE[0])
""",
        "a list cannot be indexed in a kernel; use a tuple",
    ),
    "a list of the module as an operand": (
        """
TABLE = [1.0, 2.0]

def k(y: Mut, x: Ref):
    v = §TABLE + TABLE
    y.store(1.0)
""",
        "a list is no compile-time constant; use numbers, dtypes and tuples",
    ),
    "the length of a dict of the module": (
        """
TABLE = {}

def k(y: Mut, x: Ref):
    v = §len(TABLE)
    y.store(1.0)
""",
        "a dict is no compile-time constant; use numbers, dtypes and tuples",
    ),
    "an attribute that cannot be read": (
        """
class Config:
    @property
    def size(self):
        raise KeyError("no file")

CONFIG = Config()

def k(y: Mut, x: Ref):
    v = §CONFIG.size
    y.store(1.0)
""",
        "'size' cannot be read: 'no file'",
    ),
}

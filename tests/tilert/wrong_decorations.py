"""Kernels that are wrong whatever the arguments, and the exact message each gives.

`§` stands before what the caret points at. Parameters have fixed types by their names, see `ARRAYS`
in test_wrong_kernels.py.
"""

__all__ = ["AT_DECORATION"]

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
    "O1: a Mut whose name is assigned to": (
        """
def k(y: Mut, x: Ref):
    §y = x.tile_like(y)
""",
        "O1 exclusive write: Mut 'y' is never stored to: an assignment only gives the name to"
        " something else; call y.store(tile)",
    ),
    "O1: a Mut whose name is updated": (
        """
def k(y: Mut[Accumulate.Add], x: Ref):
    §y += x.tile_like(y)
""",
        "O1 exclusive write: Mut 'y' is never updated: an assignment only gives the name to"
        " something else; call y.add(tile)",
    ),
    "O1: a Mut that only gives its shape": (
        """
§def k(y: Mut, x: Ref):
    v = exp(x.tile_like(y)) + y.load()
    n = y.shape[0]
""",
        "O1 exclusive write: Mut 'y' is never stored to; make it a Ref or call y.store(tile)",
    ),
    "O1: a store that is not called": (
        """
§def k(y: Mut, x: Ref):
    y.store
""",
        "O1 exclusive write: Mut 'y' is never stored to; make it a Ref or call y.store(tile)",
    ),
    "O1: a Mut that a helper only reads": (
        """
@tilert.inline
def total(y, v):
    return y.load() + v

§def k(y: Mut, x: Ref):
    total(v=x.tile_like(y), y=y)
""",
        "O1 exclusive write: Mut 'y' is never stored to; make it a Ref or call y.store(tile)",
    ),
    "O1: a Mut that a helper calls itself with": (
        """
@tilert.inline
def again(y, n):
    if n > 0:
        again(y, n - 1)

§def k(y: Mut, x: Ref):
    again(y, 3)
""",
        "O1 exclusive write: Mut 'y' is never stored to; make it a Ref or call y.store(tile)",
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
    "two modes of one Mut": (
        """
def k(§y: Mut[Accumulate.Add, Accumulate.Max], x: Ref):
    y.add(1.0)
""",
        "Mut[...] takes only Dyn and one of Accumulate.Add, .Max and .Min",
    ),
    "a mode of a Ref": (
        """
def k(y: Mut, §x: Ref[Accumulate.Add]):
    y.store(1.0)
""",
        "Ref[...] takes only Dyn",
    ),
    "an accumulating Mut that is never updated": (
        """
§def k(y: Mut, z: Mut[Accumulate.Min], x: Ref):
    y.store(1.0)
""",
        "O1 exclusive write: Mut 'z' is never updated; make it a Ref or call z.min(tile)",
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
    "a quoted annotation that raises": (
        """
§def k(y: Mut, x: "1 / 0"):
    y.store(1.0)
""",
        "an annotation cannot be read: division by zero",
    ),
    "a quoted annotation that raises without a message": (
        """
class Odd:
    def __getattr__(self, name):
        raise KeyError

odd = Odd()

§def k(y: Mut, x: "odd.kind"):
    y.store(1.0)
""",
        "an annotation cannot be read: KeyError",
    ),
    "an annotation that compares oddly": (
        """
import numpy as np

def k(y: Mut, §x: np.zeros(3)):
    y.store(1.0)
""",
        "parameter 'x' must be annotated Mut, Ref, Const[int], Const[float] or Const[bool]",
    ),
    "a default of more than 64 bits": (
        """
def k(y: Mut, §c: Const[int] = 2**64):
    y.store(1.0)
""",
        "the default of 'c' must fit in 64 bits",
    ),
    "a default too large for a float": (
        """
def k(y: Mut, §c: Const[float] = 10**400):
    y.store(1.0)
""",
        "the default of 'c' is an int too large for a float",
    ),
}

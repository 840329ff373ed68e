"""What a kernel's parameters are annotated with."""

from typing import Any, Generic, TypeVar, TypeVarTuple

from tilert.dtypes import DType

__all__ = ["Accumulate", "Const", "Dyn", "Mut", "Ref"]

Dims = TypeVarTuple("Dims")
T = TypeVar("T")


class Dyn:
    """Marks an axis of `Mut[...]` or `Ref[...]` whose extent is known only at launch.

    `Ref[Dyn]` makes axis 0 run time, `Ref[Dyn, Dyn]` axes 0 and 1; all other extents are
    compile-time constants of the specialisation.
    """


class Accumulate:
    """Marks a `Mut` whose pieces may overlap, since programs only update them (rules O2 and O7).

    `Mut[Accumulate.Add]` is added to with `y.add(tile)`, and likewise `Max` and `Min`; it is
    neither loaded nor stored to. Updates of one element happen one after the other, in any order.
    """

    class Add:
        """`y.add(tile)`: f32, i32, u32 or i64."""

    class Max:
        """`y.max(tile)`: i32, u32 or i64."""

    class Min:
        """`y.min(tile)`: i32, u32 or i64."""


class Mut(Generic[*Dims]):
    """A parameter that a program writes: it owns one piece of it, alone (rules O1 and O2).

    Attributes:
        index: one tile index an axis: where this program's piece is.
        shape: shape of the piece, plain ints.
        array_shape: extents of the whole array.
        dtype: element type.
    """

    index: tuple[Any, ...]
    shape: tuple[int, ...]
    array_shape: tuple[Any, ...]
    dtype: DType

    def load(self) -> Any:
        """The piece's present content; elements outside the array are 0."""
        raise NotImplementedError("Mut.load works only inside a kernel")

    def pieces(self) -> Any:
        """`for piece in y.pieces():` walks every piece that this program owns, in any order.

        There are as many pieces as ever, and any number of programs. Inside the loop `piece` and
        all other `Mut`s are the present piece; outside it the program holds none.
        """
        raise NotImplementedError("Mut.pieces works only inside a kernel")

    def store(self, tile: Any) -> None:
        """Write the piece. Float tiles round to the array's dtype."""
        raise NotImplementedError("Mut.store works only inside a kernel")

    def add(self, tile: Any) -> None:
        """Add to the piece, of a `Mut[Accumulate.Add]`; `max` and `min` likewise."""
        raise NotImplementedError("Mut.add works only inside a kernel")


class Ref(Generic[*Dims]):
    """A parameter that every program may read and none may write (rule O1).

    Attributes:
        shape: extents: ints, or i32 scalars on `Dyn` axes.
        dtype: element type.
    """

    shape: tuple[Any, ...]
    dtype: DType

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("Ref[...] works only inside a kernel")

    def load(self, *index: Any, fill: float = 0) -> Any:
        """The tile at `index`; elements outside the array are `fill`."""
        raise NotImplementedError("Ref.load works only inside a kernel")

    def tile_like(self, other: "Mut[Any]", axis: int | None = None) -> Any:
        """The tile where `other`'s piece is: at its whole index, or at that of one axis."""
        raise NotImplementedError("Ref.tile_like works only inside a kernel")


class Const(Generic[T]):
    """A compile-time parameter: `Const[int]`, `Const[float]` or `Const[bool]`."""

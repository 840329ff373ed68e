"""Which tiles a tuning tries for a product, the most promising first."""

from dataclasses import dataclass

from models.hopper_tiling import HopperTiling, TileCost, time_of
from models.tile_sizes import ProductTiles, Tiling

__all__ = ["KINDS", "Problem", "declared"]

KINDS = ("product", "gate_up")
SHARES = (1, 2, 4, 8)
LEAST_STEPS = 4
"""Of K for each share."""

PORTABLE = {
    "product": ((128, 128, 64), (128, 64, 64), (64, 128, 64), (64, 64, 64), (32, 64, 64),
                (16, 64, 64)),
    "gate_up": ((128, 64, 64), (64, 64, 64), (32, 64, 64), (32, 64, 128), (16, 64, 128)),
}  # fmt: skip
"""Rows, columns and depth of tiles for the schedule of every target."""


@dataclass(frozen=True)
class Problem:
    """A product of `tokens` rows, whose tile is asked for.

    Attributes:
        kind: the question of `Tiling` that it is: "product" or "gate_up".
    """

    kind: str
    tokens: int
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.tokens} x {self.outputs} x {self.inputs}"


def usual(base: Tiling, problem: Problem) -> ProductTiles:
    """The tile that a tiling chooses."""
    ask = base.product if problem.kind == "product" else base.gate_up
    return ask(problem.tokens, problem.outputs, problem.inputs)


def declared(base: Tiling, problem: Problem) -> list[ProductTiles]:
    """Tiles to try: what the tiling chooses, then the others by the time that its costs expect.

    Where it has no costs, they come as they are declared.
    """
    costs = _costs(base, problem)
    found: dict[ProductTiles, float] = {}
    for cost in costs:
        # Rows past the last token are work for nothing.
        if cost.rows >= problem.tokens + 64:
            continue
        for shares in SHARES if problem.kind == "product" else (1,):
            if shares > 1 and not _may_share(base, problem, cost, shares):
                continue
            tiles = ProductTiles(cost.rows, cost.columns, cost.depth, shares)
            sizes = problem.tokens, problem.outputs, problem.inputs
            found[tiles] = sum(time_of(cost, shares, *sizes))
    first = usual(base, problem)
    return [first, *(tiles for tiles in sorted(found, key=found.__getitem__) if tiles != first)]


def _costs(base: Tiling, problem: Problem) -> tuple[TileCost, ...]:
    if isinstance(base, HopperTiling):
        return base.product_costs if problem.kind == "product" else base.gate_up_costs
    return tuple(TileCost(*sizes, 0.0, 0.0) for sizes in PORTABLE[problem.kind])


def _may_share(base: Tiling, problem: Problem, cost: TileCost, shares: int) -> bool:
    sums = shares * problem.tokens * problem.outputs
    return sums <= base.share_elements and problem.inputs >= LEAST_STEPS * shares * cost.depth

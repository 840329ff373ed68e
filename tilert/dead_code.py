"""Removal of operations whose results nothing uses."""

from tilert.ir import Block, Op, Value
from tilert.ops import OPS

__all__ = ["remove_dead"]


def remove_dead(body: Block) -> None:
    """Drop pure operations that no store, loop or branch depends on, in place."""
    live: set[Value] = set()

    def needed(op: Op) -> bool:
        return not OPS[op.name].pure or any(r in live for r in op.results)

    def sweep(block: Block) -> None:
        kept: list[Op] = []
        for op in reversed(block.ops):
            if not needed(op):
                continue
            for region in reversed(op.regions):
                sweep(region)
            live.update(op.args)
            kept.append(op)
        block.ops = kept[::-1]

    sweep(body)

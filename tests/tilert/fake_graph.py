"""Graphs of the driver that is not there: nodes that start, and are complete later."""

import random
from collections.abc import Callable

__all__ = ["Node", "Replay"]


class Node:
    """A node of a graph: work, after other nodes.

    Attributes:
        early: of those that it comes after, the ones that need not be complete when it starts.
        waits: whether it waits for earlier ones itself. tells: whether it lets later ones start.
        begin: what it does when it starts, perhaps before earlier ones are complete.
    """

    def __init__(
        self,
        kind: str,
        work: Callable[[], None],
        after: set[int],
        early: bool = False,
        waits: bool = False,
        tells: bool = False,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.begin = begin
        self.kind = kind
        self.work = work
        self.after = after
        self.early = set(after) if early else set[int]()
        self.waits = waits
        self.tells = tells

    @property
    def shape(self) -> object:
        """What an update cannot change."""
        return self.kind, self.after, self.early


class Replay:
    """One execution of nodes, each of which starts and is complete later."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.started: set[int] = set()
        self.done: set[int] = set()

    def may_start(self, at: int) -> bool:
        node = self.nodes[at]
        # A kernel that does not say so lets later ones start when it is complete.
        told = {i for i in node.early if self.nodes[i].tells and i in self.started}
        return at not in self.started and node.after <= self.done | told

    def may_end(self, at: int) -> bool:
        node = self.nodes[at]
        return at not in self.done and (not node.waits or node.after <= self.done)

    def step(self, chance: random.Random) -> bool:
        """Start or complete a node; whether there was one."""
        starts = [i for i in range(len(self.nodes)) if self.may_start(i)]
        ends = [i for i in self.started if self.may_end(i)]
        if starts and (not ends or chance.random() < 0.6):
            at = chance.choice(starts)
            self.nodes[at].begin()
            self.started.add(at)
        elif ends:
            at = chance.choice(ends)
            self.nodes[at].work()
            self.done.add(at)
        return bool(starts or ends)

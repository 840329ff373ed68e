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
        apart: whether it works before they are, and waits then.
        behind_one: whether it lets later ones start only when they are.
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
        apart: bool = False,
        behind_one: bool = False,
    ) -> None:
        self.begin = begin
        self.kind = kind
        self.work = work
        self.after = after
        self.early = set(after) if early else set[int]()
        self.waits = waits
        self.tells = tells
        self.apart = apart
        self.behind_one = behind_one

    @property
    def shape(self) -> object:
        """What an update cannot change."""
        return self.kind, self.after, self.early


class Replay:
    """One execution of nodes, each of which starts, works and is complete, each later."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.started: set[int] = set()
        self.worked: set[int] = set()
        self.done: set[int] = set()

    def may_start(self, at: int) -> bool:
        node = self.nodes[at]
        # A kernel that does not say so lets later ones start when it is complete.
        told = {i for i in node.early if self.tells(i)}
        return at not in self.started and node.after <= self.done | told

    def tells(self, at: int) -> bool:
        node = self.nodes[at]
        behind_one = not node.behind_one or node.after <= self.done
        return node.tells and at in self.started and behind_one

    def may_work(self, at: int) -> bool:
        node = self.nodes[at]
        ready = node.apart or not node.waits or node.after <= self.done
        return at not in self.worked and ready

    def may_end(self, at: int) -> bool:
        node = self.nodes[at]
        return at not in self.done and (not node.waits or node.after <= self.done)

    def step(self, chance: random.Random) -> bool:
        """Start a node, have it work, or complete it; whether there was one."""
        starts = [i for i in range(len(self.nodes)) if self.may_start(i)]
        works = [i for i in self.started if self.may_work(i)]
        ends = [i for i in self.worked if self.may_end(i)]
        if starts and (not (works or ends) or chance.random() < 0.6):
            at = chance.choice(starts)
            self.nodes[at].begin()
            self.started.add(at)
        elif works and (not ends or chance.random() < 0.6):
            at = chance.choice(works)
            self.nodes[at].work()
            self.worked.add(at)
        elif ends:
            self.done.add(chance.choice(ends))
        return bool(starts or works or ends)

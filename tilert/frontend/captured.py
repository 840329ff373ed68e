"""What kernels read outside their bodies, so that a changed value is seen to have changed."""

import threading
from typing import Any, TypeAlias

from tilert.constant import constant_key

__all__ = ["MISSING", "Captured", "Outside", "Reads", "State"]

MISSING: Any = object()
"""Stands for a name or an attribute that is not there."""

_MAX_STATES = 64
Name: TypeAlias = tuple[dict[str, Any], str, Any]
Attribute: TypeAlias = tuple[object, str, Any]


class Reads:
    """Names and attributes that a trace has read, each with the value it had.

    Attributes:
        names: entries of namespaces.
        attributes: attributes of objects, cells of closures included.
    """

    def __init__(self) -> None:
        self.names: list[Name] = []
        self.attributes: list[Attribute] = []
        self._seen: dict[tuple[int, str], Any] = {}

    def name(self, namespace: dict[str, Any], name: str) -> Any:
        """The value of a name, or MISSING."""
        key = (id(namespace), name)
        if key not in self._seen:
            self._seen[key] = value = namespace.get(name, MISSING)
            self.names.append((namespace, name, value))
        return self._seen[key]

    def attribute(self, owner: object, name: str) -> Any:
        """The value of an attribute, or MISSING."""
        key = (id(owner), name)
        if key not in self._seen:
            self._seen[key] = value = _attribute(owner, name)
            self.attributes.append((owner, name, value))
        return self._seen[key]

    def add(self, other: "Reads") -> None:
        """What another trace has read at the same time, besides what is here."""
        for namespace, name, value in other.names:
            if (id(namespace), name) not in self._seen:
                self._seen[id(namespace), name] = value
                self.names.append((namespace, name, value))
        for owner, name, value in other.attributes:
            if (id(owner), name) not in self._seen:
                self._seen[id(owner), name] = value
                self.attributes.append((owner, name, value))


def _attribute(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):
        # ValueError: a cell whose variable has no value yet.
        return MISSING


class Outside:
    """The names that one function sees outside its body: closure, module, built-ins."""

    def __init__(self, fn: Any, reads: Reads) -> None:
        self.reads = reads
        self._cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        self._module: dict[str, Any] = fn.__globals__
        self._builtins: dict[str, Any] = fn.__builtins__

    def get(self, name: str) -> Any:
        """The present value of a name, or MISSING; the read is remembered."""
        if name in self._cells:
            return self.reads.attribute(self._cells[name], "cell_contents")
        value = self.reads.name(self._module, name)
        return self.reads.name(self._builtins, name) if value is MISSING else value


class State:
    """Values of outside names under which specialisations were made.

    Attributes:
        number: differs between states of one kernel.
        reads: what these specialisations have read.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.reads = Reads()

    def holds(self) -> bool:
        """Whether every name still leads to the very same object."""
        for namespace, name, seen in self.reads.names:
            if namespace.get(name, MISSING) is not seen:
                return False
        attributes = self.reads.attributes
        return all(_attribute(owner, name) is seen for owner, name, seen in attributes)

    def equals_present(self) -> bool:
        """Whether every name has the same value again; then its objects are taken over."""
        now = Reads()
        for namespace, name, seen in self.reads.names:
            if constant_key(now.name(namespace, name)) != constant_key(seen):
                return False
        for owner, name, seen in self.reads.attributes:
            if constant_key(now.attribute(owner, name)) != constant_key(seen):
                return False
        self.reads = now
        return True


class Captured:
    """The states of one kernel. `state()` gives the present one, new where a value is new."""

    def __init__(self) -> None:
        self._current = State(0)
        self._states = [self._current]
        self._lock = threading.Lock()

    def number(self) -> int:
        """Number of the present state."""
        # Every launch asks: `holds` of the present state, written out.
        current = self._current
        for namespace, name, seen in current.reads.names:
            if namespace.get(name, MISSING) is not seen:
                return self.state().number
        if current.reads.attributes and not current.holds():
            return self.state().number
        return current.number

    def state(self) -> State:
        """The state that the present values make. Cheap where nothing has changed."""
        current = self._current
        if current.holds():
            return current
        with self._lock:
            for state in self._states:
                if state.equals_present():
                    break
            else:
                state = State(self._states[-1].number + 1)
                # A value that is new at every launch must not fill the memory.
                self._states = [*self._states[1 - _MAX_STATES :], state]
            self._current = state
            return state

"""JSON patches of objects that are not ours: operations in the order in which they are applied (RFC 6902).

Lists of KubeVirt's are atomic to server-side apply, and have fields that we don't know. So entries are added and taken
out one by one, and all others stay as they stand.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from gpuvirt.plain import Plain


class Op(StrEnum):
    """What is done."""

    TEST = "test"
    ADD = "add"
    """Also sets a key that is there."""
    REMOVE = "remove"


class Operation(msgspec.Struct, frozen=True):
    """One operation."""

    op: Op
    path: str
    value: Plain | msgspec.UnsetType = msgspec.UNSET

    @property
    def text(self) -> str:
        """The operation on one line: `add /spec/x {"a":1}`."""
        value = "" if self.value is msgspec.UNSET else f" {msgspec.json.encode(self.value).decode()}"
        return f"{self.op} {self.path}{value}"


def at(*keys: str) -> str:
    """Return the pointer to what the keys lead to (RFC 6901)."""
    return "".join(f"/{key.replace('~', '~0').replace('/', '~1')}" for key in keys)


class Draft:
    """A patch being written: makes containers that are not there, and remembers which."""

    def __init__(self, there: Iterable[str]) -> None:
        """`there` are the containers that the object has."""
        self._there = set(there)
        self._operations: list[Operation] = []
        self.made: list[str] = []

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What was written."""
        return tuple(self._operations)

    def has(self, pointer: str) -> bool:
        """Return whether a container is there after what was written."""
        return pointer in self._there

    def need(self, pointer: str, empty: Plain) -> None:
        """Have a container be there, with those around it."""
        around = pointer.rpartition("/")[0]
        if around:
            self.need(around, {})
        if pointer not in self._there:
            self.set(pointer, empty)
            self._there.add(pointer)
            self.made.append(pointer)

    def set(self, pointer: str, value: Plain) -> None:
        """Set a key of a container that is there."""
        self._operations.append(Operation(Op.ADD, pointer, value))

    def append(self, pointer: str, value: Plain) -> None:
        """Add to a list."""
        self.need(pointer, [])
        self.set(f"{pointer}/-", value)

    def remove(self, pointer: str) -> None:
        """Take out a key."""
        self._operations.append(Operation(Op.REMOVE, pointer))
        self._there = {one for one in self._there if one != pointer and not one.startswith(f"{pointer}/")}

    def take_out(self, pointer: str, indices: Iterable[int]) -> None:
        """Take entries out of a list, by the places that they have in the object."""
        for index in sorted(indices, reverse=True):
            self._operations.append(Operation(Op.REMOVE, f"{pointer}/{index}"))


def conditional(version: str, operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return a patch that does nothing to an object of another version."""
    return (Operation(Op.TEST, at("metadata", "resourceVersion"), version), *operations) if operations else ()


def annotate(draft: Draft, annotations: Mapping[str, str], key: str, value: str | None) -> None:
    """Have an object's annotation say something; None: it is to go."""
    if value is not None and annotations.get(key) != value:
        draft.need(at("metadata", "annotations"), {})
        draft.set(at("metadata", "annotations", key), value)
    elif value is None and key in annotations:
        draft.remove(at("metadata", "annotations", key))

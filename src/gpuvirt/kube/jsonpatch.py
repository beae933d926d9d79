"""JSON patches of objects that others own: operations in the order in which they are applied (RFC 6902).

Server-side apply treats KubeVirt's lists as atomic, and entries of lists may have fields that gpuvirt does not know. So
gpuvirt adds and removes single entries, and all others stay unchanged.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from gpuvirt.plain import Plain


class Op(StrEnum):
    """The kind of an operation."""

    TEST = "test"
    ADD = "add"
    """Adds a key, or replaces the value of an existing one."""
    REMOVE = "remove"


class Operation(msgspec.Struct, frozen=True):
    """One operation of a JSON patch."""

    op: Op
    path: str
    value: Plain | msgspec.UnsetType = msgspec.UNSET

    @property
    def text(self) -> str:
        """The operation on one line: `add /spec/x {"a":1}`."""
        value = "" if self.value is msgspec.UNSET else f" {msgspec.json.encode(self.value).decode()}"
        return f"{self.op} {self.path}{value}"


def at(*keys: str) -> str:
    """Return the JSON pointer for a path of keys (RFC 6901)."""
    return "".join(f"/{key.replace('~', '~0').replace('/', '~1')}" for key in keys)


class Draft:
    """A patch in the making. It creates missing containers (objects and lists), and records which."""

    def __init__(self, containers: Iterable[str]) -> None:
        """Begin a patch; `containers` are the JSON pointers of the object's containers."""
        self._containers = set(containers)
        self._operations: list[Operation] = []
        self.made: list[str] = []

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations so far."""
        return tuple(self._operations)

    def has(self, pointer: str) -> bool:
        """Return whether the object has a container after the operations so far."""
        return pointer in self._containers

    def ensure(self, pointer: str, empty: Plain) -> None:
        """Create a container if it is missing, with the containers around it."""
        around = pointer.rpartition("/")[0]
        if around:
            self.ensure(around, {})
        if pointer not in self._containers:
            self.set(pointer, empty)
            self._containers.add(pointer)
            self.made.append(pointer)

    def set(self, pointer: str, value: Plain) -> None:
        """Set a key of an existing container."""
        self._operations.append(Operation(Op.ADD, pointer, value))

    def append(self, pointer: str, value: Plain) -> None:
        """Append to a list, which is created if it is missing."""
        self.ensure(pointer, [])
        self.set(f"{pointer}/-", value)

    def remove(self, pointer: str) -> None:
        """Remove a key."""
        self._operations.append(Operation(Op.REMOVE, pointer))
        self._containers = {
            other for other in self._containers if other != pointer and not other.startswith(f"{pointer}/")
        }

    def remove_entries(self, pointer: str, indices: Iterable[int]) -> None:
        """Remove entries of a list by their indices in the unpatched object."""
        for index in sorted(indices, reverse=True):
            self._operations.append(Operation(Op.REMOVE, f"{pointer}/{index}"))


def conditional(version: str, operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return a patch that the API server refuses if the object has another version."""
    return (Operation(Op.TEST, at("metadata", "resourceVersion"), version), *operations) if operations else ()


def annotate(draft: Draft, annotations: Mapping[str, str], key: str, value: str | None) -> None:
    """Set an object's annotation, or remove it for None."""
    if value is not None and annotations.get(key) != value:
        draft.ensure(at("metadata", "annotations"), {})
        draft.set(at("metadata", "annotations", key), value)
    elif value is None and key in annotations:
        draft.remove(at("metadata", "annotations", key))

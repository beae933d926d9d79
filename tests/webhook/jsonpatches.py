"""Applies JSON patches (RFC 6902) to documents: those of the controller, and those of a command line."""

from collections.abc import Iterable
from copy import deepcopy

import msgspec

from gpuvirt.kube.jsonpatch import Op, Operation
from gpuvirt.plain import Plain


class PatchError(Exception):
    """A patch can't be applied, so nothing is changed."""


def patched(document: Plain, operations: Iterable[Operation]) -> Plain:
    """Return a document with a patch applied; raise PatchError."""
    document = deepcopy(document)
    for operation in operations:
        document = _applied(document, operation)
    return document


def operations(text: str) -> tuple[Operation, ...]:
    """Return the patch of a command line."""

    class Written(msgspec.Struct):
        op: Op
        path: str
        value: str | None = None

    entries = msgspec.json.decode(text, type=list[Written])
    return tuple(Operation(entry.op, entry.path, entry.value) for entry in entries)


def _applied(document: Plain, operation: Operation) -> Plain:
    keys = [key.replace("~1", "/").replace("~0", "~") for key in operation.path.split("/")[1:]]
    if not keys:
        raise PatchError("the whole document")
    within = document
    for key in keys[:-1]:
        within = _inner(within, key)
    value = operation.value
    match operation.op:
        case Op.TEST:
            if _inner(within, keys[-1]) != value:
                raise PatchError(f"{operation.path} is not {value}")
        case Op.ADD:
            if value is msgspec.UNSET:
                raise PatchError("nothing to add")
            assert not isinstance(value, msgspec.UnsetType)
            _add(within, keys[-1], deepcopy(value))
        case Op.REMOVE:
            _inner(within, keys[-1])
            if isinstance(within, list):
                del within[int(keys[-1])]
            elif isinstance(within, dict):
                del within[keys[-1]]
    return document


def _inner(within: Plain, key: str) -> Plain:
    if isinstance(within, dict) and key in within:
        return within[key]
    if isinstance(within, list) and key.isdigit() and int(key) < len(within):
        return within[int(key)]
    raise PatchError(f"no {key}")


def _add(within: Plain, key: str, value: Plain) -> None:
    if isinstance(within, dict):
        within[key] = value
    elif isinstance(within, list) and key == "-":
        within.append(value)
    elif isinstance(within, list) and key.isdigit() and int(key) <= len(within):
        within.insert(int(key), value)
    else:
        raise PatchError(f"nowhere to put {key}")

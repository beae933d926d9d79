"""The message of a failed `==` of msgspec Structs: the fields that differ, at any depth."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import zip_longest

from msgspec import Struct
from typing_extensions import override

WIDTH = 120
Show = Callable[[object], str]


class Missing:
    """The value that one of the two sides lacks."""

    @override
    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


@dataclass(frozen=True)
class Difference:
    """A value that differs, with its place in both sides; `in_struct` is whether a Struct has it at any depth."""

    place: str
    left: object
    right: object
    in_struct: bool


def differences(left: object, right: object, place: str = "", *, in_struct: bool = False) -> Iterator[Difference]:
    """Yield the smallest values that make two values unequal."""
    in_struct = in_struct or isinstance(left, Struct) or isinstance(right, Struct)
    if left is right or left == right:
        return
    parts = list(_parts(left, right)) if _are_alike(left, right) else []
    inner = [
        difference
        for name, left_part, right_part in parts
        for difference in differences(left_part, right_part, f"{place}{name}", in_struct=in_struct)
    ]
    # Two values can be unequal though all their parts are equal: a list and a tuple, or a class without equality.
    yield from inner or [Difference(place, left, right, in_struct)]


def explain(left: object, right: object, verbosity: int = 0) -> list[str] | None:
    """Return pytest's lines for a failed `left == right`; None if no Struct differs, so that pytest explains it itself.

    With a verbosity of 2 (`-vv`) or more no value is shortened.
    """
    found = list(differences(left, right))
    if not any(difference.in_struct for difference in found):
        return None
    show = repr if verbosity > 1 else _short
    return [f"{show(left)} == {show(right)}", *(_line(difference, show) for difference in found)]


def _are_alike(left: object, right: object) -> bool:
    if isinstance(left, str | bytes):
        return False
    return type(left) is type(right) or all(isinstance(side, Mapping) for side in (left, right))


def _parts(left: object, right: object) -> Iterator[tuple[str, object, object]]:
    """Yield the parts of two values of one shape: how each is written behind its value, and both its values."""
    for name in _fields(left):
        yield f".{name}", getattr(left, name, MISSING), getattr(right, name, MISSING)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            yield f"[{key!r}]", left.get(key, MISSING), right.get(key, MISSING)
    elif isinstance(left, AbstractSet) and isinstance(right, AbstractSet):
        yield from ((" has", item, MISSING) for item in left - right)
        yield from ((" has", MISSING, item) for item in right - left)
    elif isinstance(left, Sequence) and isinstance(right, Sequence):
        for at, (left_item, right_item) in enumerate(zip_longest(left, right, fillvalue=MISSING)):
            yield f"[{at}]", left_item, right_item


def _fields(value: object) -> list[str]:
    """Return the names of the fields that a Struct or a dataclass compares; none for another value."""
    if isinstance(value, Struct):
        return list(value.__struct_fields__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value) if field.compare]
    return []


def _line(difference: Difference, show: Show) -> str:
    return f"{difference.place.strip() or 'value'}: {show(difference.left)} != {show(difference.right)}"


def _short(value: object) -> str:
    """Return the `repr` of a value, without its middle if it is long."""
    shown = repr(value)
    return shown if len(shown) <= WIDTH else f"{shown[: WIDTH // 2]} ... {shown[-WIDTH // 2 :]}"

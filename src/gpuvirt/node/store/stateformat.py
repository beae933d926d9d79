"""The format of a state on disk: its versions, each upgraded to the next, and the fields that newer versions add.

An older gpuvirt can be installed again at any time. So it takes from a file of a newer version what it knows, and keeps
the rest as it is. The newer version, installed once more, finds a file of the older one's version with its own fields
in it. So an upgrade takes the fields of its version as the truth, and keeps what else there is where it agrees.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec

from gpuvirt.errors import DamagedError
from gpuvirt.node.store.checksummed import Fields, Layout
from gpuvirt.plain import Plain

T = TypeVar("T")

Upgrade = Callable[[Fields], Fields]
"""Returns the fields of the next version; what is no such file is left to be refused by the type."""


class NewerVersionError(DamagedError):
    """A file of a newer version has a field that this version knows and can't read. The file is not damaged."""

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message)
        self.version = version


@dataclass(frozen=True, slots=True)
class Unknown:
    """The fields of a state that this version does not know, by where they stand."""

    fields: Mapping[str, Plain] = field(default_factory=dict)
    values: Mapping[str, "Unknown"] = field(default_factory=dict)
    """Those inside the fields and entries that this version knows; they go with their entry."""
    items: Mapping[bytes, "Unknown"] = field(default_factory=dict)
    """Those inside the items of a list, by what this version knows of the item; they go when the item changes."""


class Stored(NamedTuple, Generic[T]):
    """What a file says."""

    value: T
    unknown: Unknown = Unknown()


@dataclass(frozen=True, slots=True)
class Format(Generic[T]):
    """How values of a type, which encodes all of its fields, are kept."""

    shape: type[T]
    layout: Layout
    upgrades: tuple[Upgrade, ...] = ()
    """From version 1 to 2, from 2 to 3, and so on."""

    @property
    def version(self) -> int:
        """The version that is written."""
        return len(self.upgrades) + 1

    def encode(self, value: T, unknown: Unknown = Unknown()) -> bytes:
        """Return the content of a file."""
        return self.layout.join(_with_unknown_fields(_known(value), unknown), self.version)

    def decode(self, content: bytes) -> Stored[T]:
        """Return what a file of any version says; raise DamagedError."""
        fields, version = self.layout.split(content)
        if version < 1:
            raise DamagedError(f"it is of version {version}; expected 1 to {self.version}")
        for upgrade in self.upgrades[version - 1 :]:
            fields = upgrade(fields)
        try:
            value = msgspec.convert(fields, self.shape)
        except msgspec.ValidationError as error:
            if version > self.version:
                raise NewerVersionError(
                    f"it is of version {version}, and this gpuvirt knows versions up to {self.version}: {error}",
                    version,
                ) from error
            raise DamagedError(f"can't be understood: {error}") from error
        return Stored(value, _unknown_in(fields, _known(value)))


def _known(value: object) -> Fields:
    """Return the fields of a value as a file has them."""
    fields: Fields = msgspec.json.decode(msgspec.json.encode(value))
    return fields


def _unknown_in(found: Plain, known: Plain) -> Unknown:
    """Return what was found beyond what is known."""
    if isinstance(found, dict) and isinstance(known, dict):
        values = {name: _unknown_in(value, known[name]) for name, value in found.items() if name in known}
        return Unknown(
            {name: value for name, value in found.items() if name not in known},
            {name: unknown for name, unknown in values.items() if unknown != Unknown()},
        )
    if isinstance(found, list) and isinstance(known, list):
        items = {_key(item): _unknown_in(value, item) for value, item in zip(found, known, strict=False)}
        return Unknown(items={key: unknown for key, unknown in items.items() if unknown != Unknown()})
    return Unknown()


def _with_unknown(known: Plain, unknown: Unknown | None) -> Plain:
    if unknown is not None and isinstance(known, dict):
        return _with_unknown_fields(known, unknown)
    if unknown is not None and unknown.items and isinstance(known, list):
        return [_with_unknown(item, unknown.items.get(_key(item))) for item in known]
    return known


def _with_unknown_fields(known: Fields, unknown: Unknown) -> Fields:
    inner = {name: _with_unknown(value, unknown.values.get(name)) for name, value in known.items()}
    return {**unknown.fields, **inner}


def _key(item: Plain) -> bytes:
    return msgspec.json.encode(item)

"""The format of a state on disk: its versions, the upgrades between them, and the unknown fields of newer versions.

An older gpuvirt can be installed again at any time. It reads the fields that it knows from a file of a newer version,
and keeps the others. If the newer version is installed once more, it finds a file of the older version with its own
fields in it. So an upgrade derives its result from the fields of the older version, and keeps other fields that agree
with them.
"""

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec

from gpuvirt.agent.store.checksummed import Fields, FileLayout
from gpuvirt.errors import DamagedError
from gpuvirt.plain import Plain

T = TypeVar("T")

Upgrade = Callable[[Fields], Fields]
"""Returns the fields of the next version. It returns invalid fields unchanged, and the type refuses them."""


class NewerVersionError(DamagedError):
    """A file of a newer version has a known field with an unreadable value. The file is not damaged."""

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message)
        self.version = version


class UnknownFields(msgspec.Struct, frozen=True):
    """The fields of a state that this version does not know, by their places."""

    fields: Mapping[str, Plain] = msgspec.field(default_factory=dict)
    values: Mapping[str, "UnknownFields"] = msgspec.field(default_factory=dict)
    """Unknown fields inside known fields and entries; they are dropped with the entry."""
    items: Mapping[bytes, "UnknownFields"] = msgspec.field(default_factory=dict)
    """Unknown fields inside the items of a list, by the item's known fields; they are dropped when the item changes."""


NOTHING_UNKNOWN = UnknownFields()


class Stored(NamedTuple, Generic[T]):
    """The state in a file."""

    value: T
    unknown: UnknownFields = NOTHING_UNKNOWN


class Format(msgspec.Struct, Generic[T], frozen=True):
    """The format of files with values of one type, which encodes all of its fields."""

    shape: type[T]
    layout: FileLayout
    upgrades: tuple[Upgrade, ...] = ()
    """The upgrades from version 1 to 2, from 2 to 3, and so on."""

    @property
    def version(self) -> int:
        """The version of written files."""
        return len(self.upgrades) + 1

    def encode(self, value: T, unknown: UnknownFields = NOTHING_UNKNOWN) -> bytes:
        """Return the content of a file."""
        return self.layout.join(_with_unknown_fields(_known(value), unknown), self.version)

    def decode(self, content: bytes) -> Stored[T]:
        """Return the state in a file of any version; raise DamagedError."""
        fields, version = self.layout.split(content)
        if version < 1:
            raise DamagedError(f"its version is {version}; expected 1 to {self.version}")
        for upgrade in self.upgrades[version - 1 :]:
            fields = upgrade(fields)
        try:
            value = msgspec.convert(fields, self.shape)
        except msgspec.ValidationError as error:
            if version > self.version:
                raise NewerVersionError(
                    f"its version is {version}, but this gpuvirt only knows versions up to {self.version}: {error}",
                    version,
                ) from error
            raise DamagedError(f"its content is invalid: {error}") from error
        return Stored(value, _unknown_in(fields, _known(value)))


def _known(value: object) -> Fields:
    """Return the fields of a value in the form of a file."""
    fields: Fields = msgspec.json.decode(msgspec.json.encode(value))
    return fields


def _unknown_in(found: Plain, known: Plain) -> UnknownFields:
    """Return the found fields that are not known."""
    if isinstance(found, dict) and isinstance(known, dict):
        values = {name: _unknown_in(value, known[name]) for name, value in found.items() if name in known}
        return UnknownFields(
            {name: value for name, value in found.items() if name not in known},
            {name: unknown for name, unknown in values.items() if unknown != UnknownFields()},
        )
    if isinstance(found, list) and isinstance(known, list):
        items = {_key(item): _unknown_in(value, item) for value, item in zip(found, known, strict=False)}
        return UnknownFields(items={key: unknown for key, unknown in items.items() if unknown != UnknownFields()})
    return UnknownFields()


def _with_unknown(known: Plain, unknown: UnknownFields | None) -> Plain:
    if unknown is not None and isinstance(known, dict):
        return _with_unknown_fields(known, unknown)
    if unknown is not None and unknown.items and isinstance(known, list):
        return [_with_unknown(item, unknown.items.get(_key(item))) for item in known]
    return known


def _with_unknown_fields(known: Fields, unknown: UnknownFields) -> Fields:
    inner = {name: _with_unknown(value, unknown.values.get(name)) for name, value in known.items()}
    return {**unknown.fields, **inner}


def _key(item: Plain) -> bytes:
    return msgspec.json.encode(item)

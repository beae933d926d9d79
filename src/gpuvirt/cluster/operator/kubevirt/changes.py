"""The record of gpuvirt's changes to a KubeVirt or HyperConverged, kept in an annotation of that object.

One patch writes both the changes and the record, so that they cannot differ. If the record is lost or cannot be read,
no entry counts as gpuvirt's: the controller removes nothing, and all devices stay permitted.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError

ANNOTATION = "gpuvirt.io/permitted-devices"
"""The annotation with the record."""
MANAGE_ANNOTATION = "gpuvirt.io/manage"
"""The annotation by which an admin forbids changes of the object: `false`."""


class Part(StrEnum):
    """The lists of permitted devices; KubeVirt and HCO have the same names for the lists that gpuvirt writes."""

    PCI = "pciHostDevices"
    MDEV = "mediatedDevices"
    USB = "usb"


class OurEntry(msgspec.Struct, frozen=True):
    """An entry that gpuvirt has added to a list."""

    part: Part
    selector: str
    resource: str


class Switch(msgspec.Struct, frozen=True, omit_defaults=True):
    """A field that gpuvirt has set."""

    pointer: str
    value: bool
    was: bool | None = None
    """The previous value; None if the field was not set."""


class Changes(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of gpuvirt's changes to one object."""

    entries: tuple[OurEntry, ...] = ()
    gates: tuple[str, ...] = ()
    switch: Switch | None = None
    made: tuple[str, ...] = ()
    """Objects and lists that gpuvirt has created, by their JSON pointers."""


def changes_of(annotations: Mapping[str, str]) -> Changes:
    """Return the record from an object's annotations; empty if it is missing or cannot be read."""
    try:
        return from_json(annotations.get(ANNOTATION, "{}").encode(), Changes)
    except DamagedError:
        return Changes()


def text_of(changes: Changes) -> str | None:
    """Return the annotation's value; None if there are no changes to record."""
    return msgspec.json.encode(changes).decode() if changes != Changes() else None

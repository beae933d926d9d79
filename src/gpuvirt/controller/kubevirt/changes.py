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


class DeviceList(StrEnum):
    """The lists of permitted devices; KubeVirt and HCO have the same names for the lists that gpuvirt writes."""

    PCI = "pciHostDevices"
    MDEV = "mediatedDevices"
    USB = "usb"


class OurEntry(msgspec.Struct, frozen=True):
    """An entry that gpuvirt has added to a list."""

    part: DeviceList
    selector: str
    resource: str


class OurSwitch(msgspec.Struct, frozen=True, omit_defaults=True):
    """A field that gpuvirt has set."""

    pointer: str
    value: bool
    was: bool | None = None
    """The previous value; None if the field was not set."""


class OurChanges(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of gpuvirt's changes to one object."""

    entries: tuple[OurEntry, ...] = ()
    gates: tuple[str, ...] = ()
    switch: OurSwitch | None = None
    made: tuple[str, ...] = ()
    """Objects and lists that gpuvirt has created, by their JSON pointers."""


def changes_of(annotations: Mapping[str, str]) -> OurChanges:
    """Return the record from an object's annotations; empty if it is missing or cannot be read."""
    try:
        return from_json(annotations.get(ANNOTATION, "{}").encode(), OurChanges)
    except DamagedError:
        return OurChanges()


def text_of(changes: OurChanges) -> str | None:
    """Return the annotation's value; None if there are no changes to record."""
    return msgspec.json.encode(changes).decode() if changes != OurChanges() else None

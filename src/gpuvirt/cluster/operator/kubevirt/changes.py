"""What we have changed in somebody else's object, as an annotation of that object says it.

It is written in the same patch as the changes, so the two can't differ. Where it is lost, or can't be read, nothing is
ours: nothing is taken out again, and all stays permitted.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError

ANNOTATION = "gpuvirt.io/permitted-devices"
"""Says what we have added."""
MANAGE_ANNOTATION = "gpuvirt.io/manage"
"""`false` has us leave the object alone."""


class Part(StrEnum):
    """The lists of permitted devices, as both KubeVirt and HCO call those that we write."""

    PCI = "pciHostDevices"
    MDEV = "mediatedDevices"
    USB = "usb"


class OurEntry(msgspec.Struct, frozen=True):
    """An entry of a list that we have added."""

    part: Part
    selector: str
    resource: str


class Switch(msgspec.Struct, frozen=True, omit_defaults=True):
    """A field that we have set."""

    pointer: str
    value: bool
    was: bool | None = None
    """None: it was not there."""


class Changes(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of it."""

    entries: tuple[OurEntry, ...] = ()
    gates: tuple[str, ...] = ()
    switch: Switch | None = None
    made: tuple[str, ...] = ()
    """Containers that were not there, by their pointers."""


def changes_of(annotations: Mapping[str, str]) -> Changes:
    """Return what the annotations say."""
    try:
        return from_json(annotations.get(ANNOTATION, "{}").encode(), Changes)
    except DamagedError:
        return Changes()


def text_of(changes: Changes) -> str | None:
    """Return what the annotation is to say, None for no annotation."""
    return msgspec.json.encode(changes).decode() if changes != Changes() else None

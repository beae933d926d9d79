"""The record of gpuvirt's changes to a KubeVirt or HyperConverged, and the history of other writers that revert them.

The record is an annotation of the object. One patch writes both the changes and the record, so that they cannot differ.
If the record is lost or cannot be read, no entry counts as gpuvirt's: the controller removes nothing, and all devices
stay permitted.

The history is in a ConfigMap, not in the patched object, since the other writer, such as a GitOps tool, may remove its
annotations. After three reverts within a day the controller stops patching until another writer has written the desired
configuration, also across restarts.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.kube.resources import Metadata

MOST_REVERTS = 3
WINDOW = timedelta(days=1)
"""Older reverts do not count: the cause may have been mended."""


class Achieved(msgspec.Struct, frozen=True):
    """A generation of the object that had all desired items."""

    generation: int
    items: tuple[str, ...]
    """The desired items at that time."""


class PatchHistory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The controller's patches of one object, and their reverts."""

    uid: str = ""
    """The object's uid: a newer object of the same name has no history."""
    achieved: Achieved | None = None
    reverts: tuple[datetime, ...] = ()
    stopped: bool = False

    def is_of_later(self, metadata: Metadata) -> bool:
        """Return whether the history is of a later generation than an object from the watch."""
        known = self.achieved
        return known is not None and self.uid == metadata.uid and metadata.generation < known.generation


def step(
    history: PatchHistory, metadata: Metadata, desired: Collection[str], lacking: Collection[str], at: datetime
) -> PatchHistory:
    """Return the history after observing an object; `lacking` are the desired items that it lacks."""
    if history.uid != metadata.uid:
        history = PatchHistory(metadata.uid)
    known = history.achieved
    reverts = tuple(reverted_at for reverted_at in history.reverts if at - reverted_at < WINDOW)
    if not lacking:
        kept = () if history.stopped else reverts
        return PatchHistory(metadata.uid, _achieved(metadata, desired), kept)
    undone = known is not None and metadata.generation > known.generation and not set(lacking).isdisjoint(known.items)
    reverts = (*reverts, at) if undone else reverts
    stopped = history.stopped or len(reverts) >= MOST_REVERTS
    return PatchHistory(metadata.uid, None if undone else known, reverts, stopped)


def landed(history: PatchHistory, metadata: Metadata, desired: Collection[str]) -> PatchHistory:
    """Return the history after a patch; `metadata` is that of the patched object."""
    return msgspec.structs.replace(history, uid=metadata.uid, achieved=_achieved(metadata, desired))


def _achieved(metadata: Metadata, desired: Collection[str]) -> Achieved:
    return Achieved(metadata.generation, tuple(sorted(desired)))


def encode(history: PatchHistory) -> str:
    """Return a history as JSON."""
    return msgspec.json.encode(history).decode()


def decode(text: str) -> PatchHistory:
    """Return the history from JSON; an empty one if it cannot be read."""
    try:
        return from_json(text.encode(), PatchHistory)
    except DamagedError:
        return PatchHistory()


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
    spared: tuple[str, ...] = ()
    """The resources of mediated devices that changes have spared after an uninstallation, which deletes the GpuNodes
    that have these names."""


def changes_of(annotations: Mapping[str, str]) -> OurChanges:
    """Return the record from an object's annotations; empty if it is missing or cannot be read."""
    try:
        return from_json(annotations.get(ANNOTATION, "{}").encode(), OurChanges)
    except DamagedError:
        return OurChanges()


def text_of(changes: OurChanges) -> str | None:
    """Return the annotation's value; None if there are no changes to record."""
    return msgspec.json.encode(changes).decode() if changes != OurChanges() else None

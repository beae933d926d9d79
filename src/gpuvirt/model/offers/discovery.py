"""The labels for a node's GPUs and operating system, for clusters without Node Feature Discovery."""

import re
from collections.abc import Mapping

from gpuvirt.facts.snapshot import Discovery
from gpuvirt.model.inventory import osrelease

PRESENT_LABEL = "gpuvirt.io/pci-10de.present"
"""`true` where a PCI function is an NVIDIA GPU; absent where none is."""
OS_ID_LABEL = "gpuvirt.io/os-release.id"
OS_VERSION_LABEL = "gpuvirt.io/os-release.version-id"

PRESENT = "true"
MOST_VALUE = 63
"""The most characters of a label's value (Kubernetes: Labels and Selectors, Syntax and character set)."""

Labels = Mapping[str, str | None]
"""Labels by name; None removes a label. Labels without an entry stay unchanged."""

_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_.-]")
_NO_END = "_.-"


def labels_of(now: Discovery, before: Discovery | None) -> Labels:
    """Return the labels of a node; a label whose value is unknown has no entry.

    The GPU label is removed after two observations without a GPU: a GPU that leaves the bus for a moment, as for a
    reset, keeps the label.
    """
    return {**_present(now, before), **_system(now)}


def label_value(text: str) -> str | None:
    """Return `text` as a label's value, with `_` for invalid characters; None where nothing is left."""
    return _NOT_ALLOWED.sub("_", text).lstrip(_NO_END)[:MOST_VALUE].rstrip(_NO_END) or None


def _present(now: Discovery, before: Discovery | None) -> Labels:
    if now.gpu:
        return {PRESENT_LABEL: PRESENT}
    gone = now.gpu is False and before is not None and before.gpu is False
    return {PRESENT_LABEL: None} if gone else {}


def _system(now: Discovery) -> Labels:
    if now.os_release.text is None:
        return {}
    system = osrelease.parse(now.os_release.text)
    version = label_value(system.version_id) if system.version_id is not None else None
    return {OS_ID_LABEL: label_value(system.id), OS_VERSION_LABEL: version}

"""Which KubeVirt has what, by the version that it says itself, and which of its gates our devices need.

Source: KubeVirt's releases. A version that is no number (`devel`, a digest) is unknown: None.
"""

import re

from gpuvirt.cluster.operator.kubevirt.names import Names
from gpuvirt.cluster.operator.kubevirt.offered import Offered
from gpuvirt.cluster.operator.kubevirt.subject import Subject

Version = tuple[int, int, int, bool]
"""Major, minor, patch, and whether it is released: what a release brings need not be in those before it."""

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(-.*)?")

GPU, HOST_DEVICES = "GPU", "HostDevices"

MDEV_FIELD: Version = (1, 8, 0, True)
"""`mediatedDevicesConfiguration.enabled`; the gate goes on to be heard for a while."""
GPU_WITHOUT_GATE: Version = (1, 4, 0, True)
"""Machines may have GPUs without the gate GPU."""
_MDEV_GATE: Version = (0, 59, 1, True)
_MDEV_GATE_BEFORE: Version = (0, 58, 2, True)


def version_of(text: str | None) -> Version | None:
    """Return what `v1.8.0`, `0.58.2` or `v1.9.0-rc.2` says."""
    found = _VERSION.fullmatch(text or "")
    return (int(found[1]), int(found[2]), int(found[3]), found[4] is None) if found is not None else None


def has_mdev_field(version: Version | None) -> bool:
    """Return whether a field says who handles mediated devices; where it is not known, a field would be dropped."""
    return version is not None and version >= MDEV_FIELD


def has_mdev_gate(version: Version | None) -> bool:
    """Return whether the gate DisableMDEVConfiguration is heard."""
    return version is None or version >= _MDEV_GATE or _MDEV_GATE_BEFORE <= version < (0, 59, 0, False)


def needs_gpu_gate(version: Version | None) -> bool:
    """Return whether machines may have GPUs only with the gate GPU."""
    return version is not None and version < GPU_WITHOUT_GATE


def gates_needed(subject: Subject, version: Version | None, offered: Offered, names: Names) -> tuple[str, ...]:
    """Return them; HCO has both switched on always."""
    if subject.is_hco:
        return ()
    gpu = (GPU,) if offered and needs_gpu_gate(version) else ()
    host_devices = (HOST_DEVICES,) if names.host_devices & offered.keys() else ()
    return (*gpu, *host_devices)

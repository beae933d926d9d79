"""Grace GPUs: their PCI ids, and the feature gates without which KubeVirt refuses VMs with them.

Source: KubeVirt 1.9, `pkg/util/hardware/grace.go` and its webhook for VMs, which decides by `permittedHostDevices`: an
entry with such an id makes it refuse VMs that request the entry's resource. Without an entry, and in older versions,
such a GPU is a GPU like any other.
"""

from collections.abc import Container

from gpuvirt.model.kubevirt.version import Version

GRACE_IDS = frozenset({"10de:2342", "10de:2348", "10de:2941"})
IOMMUFD_GATE = "IOMMUFD"
GRACE_GATES = ("GraceIOVirtualization", "PCINUMAAwareTopology", IOMMUFD_GATE)
SINCE: Version = (1, 9, 0, False)
"""The first version with the gates; its pre-releases have them, too."""


def is_grace(selector: str) -> bool:
    """Return whether the id of PCI functions is that of a Grace GPU."""
    return selector.lower() in GRACE_IDS


def missing_gates(version: Version | None, gates: Container[str]) -> tuple[str, ...]:
    """Return the gates that KubeVirt lacks for Grace GPUs; an unknown version counts as a new one."""
    if version is not None and version < SINCE:
        return ()
    return tuple(gate for gate in GRACE_GATES if gate not in gates)

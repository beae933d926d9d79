"""The nodes of a cluster on which KubeVirt runs VMs, and which of them have no `/dev/iommu`."""

import re
from collections.abc import Iterable

import msgspec

IOMMUFD_RESOURCE = "devices.kubevirt.io/iommufd"
"""The resource that each virt-launcher pod requests with KubeVirt's gate IOMMUFD."""
IOMMUFD_KERNEL = (6, 2)
"""The first kernel with `/dev/iommu`; distributions may add it to older ones."""

_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})")


class ClusterNode(msgspec.Struct, frozen=True):
    """A node on which KubeVirt runs VMs."""

    name: str
    kernel: str
    """`5.15.0-91-generic`; empty if the node does not report it."""
    iommufd: bool | None = None
    """Whether the node offers IOMMUFD_RESOURCE, which it does with `/dev/iommu`; None while the gate IOMMUFD is off."""


def without_iommufd(nodes: Iterable[ClusterNode]) -> tuple[ClusterNode, ...]:
    """Return the nodes that KubeVirt has found to lack `/dev/iommu`."""
    return tuple(node for node in nodes if node.iommufd is False)


def probably_without_iommufd(nodes: Iterable[ClusterNode]) -> tuple[ClusterNode, ...]:
    """Return the nodes that lack `/dev/iommu`, or whose kernel is too old to have it."""
    return tuple(node for node in nodes if node.iommufd is False or (node.iommufd is None and _is_old(node.kernel)))


def _is_old(kernel: str) -> bool:
    release = _RELEASE.match(kernel)
    return release is not None and (int(release[1]), int(release[2])) < IOMMUFD_KERNEL

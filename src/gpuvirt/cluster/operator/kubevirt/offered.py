"""What the nodes of a cluster offer, with what KubeVirt is to select it by."""

from collections.abc import Iterable, Mapping

from gpuvirt.cluster.kinds.gpunode import GpuNode, Spec, Status
from gpuvirt.model.selectors import ResourceKind, Selectors
from gpuvirt.model.wanted import WantedMode

Offered = Mapping[str, Selectors]
"""By resource; each has selectors."""


def offered_of(nodes: Iterable[GpuNode]) -> Offered:
    """Return what all nodes together offer; a resource that no node has devices of now is not in it."""
    return united(
        {one.name: Selectors(one.kind or ResourceKind.WHOLE, one.pci_vendor_selectors, one.mdev_name_selectors)}
        for node in nodes
        for one in (node.status or Status()).resources
    )


def united(offers: Iterable[Offered]) -> Offered:
    """Return several offers as one; one may be of what is wanted and not there yet."""
    found: dict[str, Selectors] = {}
    for offered in offers:
        for name, one in offered.items():
            before = found.get(name, Selectors(one.kind))
            pci, mdev = {*before.pci, *one.pci}, {*before.mdev, *one.mdev}
            if pci or mdev:
                found[name] = Selectors(before.kind, tuple(sorted(pci)), tuple(sorted(mdev)))
    return dict(sorted(found.items()))


def wants_mdevs(nodes: Iterable[GpuNode]) -> bool:
    """Return whether a node has mediated devices, or is to be carved and may have some."""
    return any(_wants_mdevs(node) for node in nodes)


def _wants_mdevs(node: GpuNode) -> bool:
    spec, status = node.spec or Spec(), node.status or Status()
    modes = {spec.mode, *(gpu.mode for gpu in spec.gpus)}
    has = any(one.mdev_name_selectors for one in status.resources)
    return has or WantedMode.VGPU in modes or any(gpu.vgpu_config is not None for gpu in status.gpus)

"""What the nodes of a cluster offer, with what KubeVirt is to select it by, and what of it KubeVirt offers itself.

An entry without `externalResourceProvider: true` has KubeVirt's own plugin offer whatever its selector finds, under
its own name. The same devices under two names would be given away twice, and of one name the kubelet hears whoever has
registered last. So it is not the name alone that counts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpuvirt.cluster.kinds.gpunode import GpuNode, Spec, Status, Withheld
from gpuvirt.cluster.operator.kubevirt.changes import Part
from gpuvirt.cluster.operator.kubevirt.subject import Entry
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.devices.selectors import ResourceKind, Selectors, normal
from gpuvirt.model.reasons import Reason, kubevirtproblems

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
    """Return whether a node has mediated devices, or is to get vGPUs."""
    return any(_wants_mdevs(node) for node in nodes)


def _wants_mdevs(node: GpuNode) -> bool:
    spec, status = node.spec or Spec(), node.status or Status()
    modes = {spec.mode, *(gpu.mode for gpu in spec.gpus)}
    has = any(one.mdev_name_selectors for one in status.resources)
    return has or DesiredMode.VGPU in modes or any(gpu.vgpu_config is not None for gpu in status.gpus)


@dataclass(frozen=True, slots=True)
class ByKubeVirt:
    """A resource of ours that KubeVirt offers."""

    reason: Reason
    name: str
    """What it offers it as."""

    @property
    def withheld(self) -> Withheld:
        """What the agents are told."""
        parts = (self.reason.message, f"seen: {self.reason.seen}", f"fix: {self.reason.fix}")
        offered_as = self.name if self.name != self.reason.subject else None
        code = str(self.reason.code)
        return Withheld(resource=self.reason.subject, code=code, message="; ".join(parts), offered_as=offered_as)


def offered_by_kubevirt(
    entries: Iterable[Entry], offered: Offered, where: Callable[[Entry], str]
) -> Mapping[str, ByKubeVirt]:
    """Return the resources of ours that KubeVirt offers, by name; `where` says where an entry stands."""
    own = [one for one in entries if not one.external and not one.disabled]
    found: dict[str, ByKubeVirt] = {}
    for name, selectors in offered.items():
        same = (one for one in own if one.resource == name)
        entry = next(same, None) or next((one for one in own if selects(one, selectors)), None)
        if entry is not None:
            reason = kubevirtproblems.foreign_provider(name, entry.resource, where(entry))
            found[name] = ByKubeVirt(reason, entry.resource)
    return found


def selects(entry: Entry, selectors: Selectors) -> bool:
    """Return whether an entry's selector finds devices of a resource."""
    its = {Part.PCI: selectors.pci, Part.MDEV: selectors.mdev, Part.USB: ()}[entry.part]
    return normal(entry.selector) in {normal(one) for one in its}

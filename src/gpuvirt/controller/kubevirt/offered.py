"""The resources that nodes offer, with their selectors for KubeVirt, those that KubeVirt offers, and those VMs request.

With an entry without `externalResourceProvider: true`, KubeVirt's own device plugin offers all devices that the
selector matches, under the entry's name. Under two names the same device could be allocated twice; for one name the
kubelet uses the plugin that registered last. So gpuvirt compares selectors as well as names.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import msgspec

from gpuvirt.controller.kubevirt.changes import DeviceList
from gpuvirt.controller.kubevirt.subject import PermittedEntry
from gpuvirt.kube.kinds.gpunode import ReadGpuNode, ReadStatus, Spec, Withheld
from gpuvirt.kube.kinds.kubevirt import DEVICE_KINDS, Device, RequestsDevices, VirtualMachineInstance
from gpuvirt.model.desired.gpumodes import FOR_VGPUS
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.devices.candidates import ResourceKind, Selectors, normal
from gpuvirt.model.reasons import Reason, clusterproblems

Requesting = Mapping[str, Observed[tuple[RequestsDevices, ...]]]
"""The objects that name devices, by kind. A kind that is not observed is missing; one that is not installed is
`Observed(None)`."""


KUBEVIRT_DEVICES = "devices.kubevirt.io"
"""The domain of what KubeVirt gives every VM (`kvm`, `tun`, `vhost-net`); no VM can have it as a device."""


class Names(msgspec.Struct, frozen=True):
    """The resource names that are in use."""

    gpus: frozenset[str] = frozenset()
    host_devices: frozenset[str] = frozenset()
    by_others: frozenset[str] = frozenset()
    """Names that pods other than those of KubeVirt's VMs request; these need no feature gate."""
    unknown: tuple[str, ...] = ()
    """Kinds that are not observed; their objects may use more names."""
    on_nodes: frozenset[str] = frozenset()
    """Names of devices in the capacity of a node. Only the kubelet writes it; any tenant can request any name."""
    scheduled: frozenset[str] = frozenset()
    """Names that VMs on nodes use."""

    @property
    def used(self) -> frozenset[str]:
        """All names in use."""
        return self.gpus | self.host_devices | self.by_others

    def usable(self, offered: Container[str]) -> frozenset[str]:
        """Return the names in use that a VM can get or has; `offered` are those of gpuvirt's nodes."""
        has = self.on_nodes | self.scheduled
        return frozenset(name for name in self.used if name in has or name in offered)


def names_of(requesting: Requesting, on_nodes: frozenset[str] = frozenset()) -> Names:
    """Return the names in use, and the kinds that are not observed; `on_nodes` are the names that nodes have."""
    found = [found for observed in requesting.values() for found in observed.value or ()]
    devices = [requests.devices for requests in found]
    on_a_node = [vmi.devices for vmi in found if isinstance(vmi, VirtualMachineInstance) and vmi.is_on_a_node]
    return Names(
        gpus=frozenset(_names(requested.gpus for requested in devices)),
        host_devices=frozenset(_names(requested.host_devices for requested in devices)),
        unknown=tuple(kind.name for kind in DEVICE_KINDS if kind.name not in requesting),
        on_nodes=on_nodes,
        scheduled=frozenset(_names(names for vm in on_a_node for names in (vm.gpus, vm.host_devices))),
    )


def on_nodes(capacities: Iterable[Iterable[str]]) -> frozenset[str]:
    """Return the names in nodes' capacities that may be devices of VMs: no CPUs, no hugepages, not KubeVirt's own."""
    return frozenset(
        name for names in capacities for name in names if "/" in name and not name.startswith(f"{KUBEVIRT_DEVICES}/")
    )


def _names(lists: Iterable[tuple[Device, ...] | None]) -> Iterator[str]:
    for devices in lists:
        yield from (device.device_name for device in devices or () if device.device_name)


Offered = Mapping[str, Selectors]
"""The selectors by resource; no resource is without."""


def offered_of(nodes: Iterable[ReadGpuNode]) -> Offered:
    """Return the resources of all nodes; a resource without devices on any node is left out."""
    return united(
        {found.name: Selectors(found.kind or ResourceKind.WHOLE, found.pci_vendor_selectors, found.mdev_name_selectors)}
        for node in nodes
        for found in (node.status or ReadStatus()).resources
    )


def united(offers: Iterable[Offered]) -> Offered:
    """Return the union of several offers, which may include desired resources that no node has yet."""
    found: dict[str, Selectors] = {}
    for offered in offers:
        for name, selectors in offered.items():
            before = found.get(name, Selectors(selectors.kind))
            pci, mdev = {*before.pci, *selectors.pci}, {*before.mdev, *selectors.mdev}
            if pci or mdev:
                found[name] = Selectors(before.kind, tuple(sorted(pci)), tuple(sorted(mdev)))
    return dict(sorted(found.items()))


def needs_mdevs(nodes: Iterable[ReadGpuNode]) -> bool:
    """Return whether a node has mediated devices or vGPUs, or its spec asks for vGPUs or offers them on demand."""
    return any(may_have_mdevs(node) for node in nodes)


def may_have_mdevs(node: ReadGpuNode) -> bool:
    """Return whether one node does so."""
    spec, status = node.spec or Spec(), node.status or ReadStatus()
    modes = {spec.mode, *(gpu.mode for gpu in spec.gpus)}
    has = any(resource.mdev_name_selectors for resource in status.resources)
    return has or not modes.isdisjoint(FOR_VGPUS) or any(gpu.vgpu_config is not None for gpu in status.gpus)


class ByKubeVirt(msgspec.Struct, frozen=True):
    """A resource of gpuvirt's that KubeVirt's own device plugin offers."""

    reason: Reason
    name: str
    """The name under which KubeVirt offers it."""

    @property
    def withheld(self) -> Withheld:
        """The entry for the GpuNodes' specs, by which agents do not offer the resource."""
        parts = (self.reason.message, f"seen: {self.reason.seen}", f"fix: {self.reason.fix}")
        offered_as = self.name if self.name != self.reason.subject else None
        code = str(self.reason.code)
        return Withheld(resource=self.reason.subject, code=code, message="; ".join(parts), offered_as=offered_as)


def offered_by_kubevirt(
    entries: Iterable[PermittedEntry], offered: Offered, where: Callable[[PermittedEntry], str]
) -> Mapping[str, ByKubeVirt]:
    """Return the resources of gpuvirt's that KubeVirt offers, by name; `where` returns the place of an entry."""
    own = [entry for entry in entries if not entry.external and not entry.disabled]
    found: dict[str, ByKubeVirt] = {}
    for name, selectors in offered.items():
        same = (entry for entry in own if entry.resource == name)
        match = next(same, None) or next((entry for entry in own if selects(entry, selectors)), None)
        if match is not None:
            reason = clusterproblems.foreign_provider(name, match.resource, where(match))
            found[name] = ByKubeVirt(reason, match.resource)
    return found


def selects(entry: PermittedEntry, selectors: Selectors) -> bool:
    """Return whether an entry's selector matches devices of a resource."""
    of_part = {DeviceList.PCI: selectors.pci, DeviceList.MDEV: selectors.mdev, DeviceList.USB: ()}[entry.part]
    return normal(entry.selector) in {normal(selector) for selector in of_part}

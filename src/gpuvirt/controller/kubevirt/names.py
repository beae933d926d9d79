"""The resource names that VMs request, from all kinds of objects that name devices."""

from collections.abc import Container, Iterable, Iterator, Mapping

import msgspec

from gpuvirt.kube.kinds.kubevirt import DEVICE_KINDS, Device, RequestsDevices, VirtualMachineInstance
from gpuvirt.model.desired.observed import Observed

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

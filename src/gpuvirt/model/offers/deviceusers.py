"""The pods, KubeVirt VMs and processes that use the devices of a node, for its NodeView."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import DeviceId, IommuGroup, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.ondemandids import is_on_demand_id


@dataclass(frozen=True, slots=True)
class DeviceUsers:
    """The allocations and the open IOMMU groups of a node."""

    entries: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    """The allocations of each device. A node may have thousands, so that each device finds its own."""
    processes: Mapping[IommuGroup, tuple[User, ...]] = field(default_factory=dict)
    """The processes that have a group open."""

    def of(self, device: str, group: IommuGroup | Unread | None) -> tuple[str, ...]:
        """Return the pods to which a device is allocated; without such a pod, the processes with its group open."""
        pods = [entry.allocated_to for entry in self.entries.get(device, ())]
        if pods or not isinstance(group, int):
            return tuple(dict.fromkeys(pods))
        return tuple(f"{process.command} (pid {process.pid})" for process in self.processes.get(group, ()))

    def vms(self, device: str) -> tuple[str, ...]:
        """Return KubeVirt's VMs among the pods to which a device is allocated."""
        consumers = (entry.consumer for entry in self.entries.get(device, ()))
        return tuple(
            dict.fromkeys(consumer.vm for consumer in consumers if consumer is not None and consumer.vm is not None)
        )

    def allocations(self, resource: ResourceName) -> Mapping[DeviceId, str]:
        """Return the pods to which the devices of a resource are allocated, by device."""
        entries = (entry for of_device in self.entries.values() for entry in of_device)
        return {entry.device: entry.allocated_to for entry in entries if entry.resource == resource}


def device_users(entries: Iterable[Entry], processes: Mapping[IommuGroup, tuple[User, ...]]) -> DeviceUsers:
    """Return the users of a node's devices, by its allocations and its open groups."""
    by_device: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_device[entry.device].append(entry)
        if is_on_demand_id(entry.device) and entry.target.vgpu is not None:
            by_device[entry.target.vgpu].append(entry)
    return DeviceUsers({device: tuple(found) for device, found in by_device.items()}, processes)

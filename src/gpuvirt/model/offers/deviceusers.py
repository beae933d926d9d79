"""The pods, KubeVirt VMs and processes that use the devices of a node, for its NodeView."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import DeviceId, IommuGroup, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.model.allocation.ledger import Entry


@dataclass(frozen=True, slots=True)
class DeviceUsers:
    """The allocations and the open IOMMU groups of a node."""

    entries: tuple[Entry, ...] = ()
    processes: Mapping[IommuGroup, tuple[User, ...]] = field(default_factory=dict)
    """The processes that have a group open."""

    def of(self, device: str, group: IommuGroup | Unread | None) -> tuple[str, ...]:
        """Return the pods to which a device is allocated; without such a pod, the processes with its group open."""
        pods = [entry.allocated_to for entry in self.entries if entry.device == device]
        if pods or not isinstance(group, int):
            return tuple(dict.fromkeys(pods))
        return tuple(f"{process.command} (pid {process.pid})" for process in self.processes.get(group, ()))

    def vms(self, device: str) -> tuple[str, ...]:
        """Return KubeVirt's VMs among the pods to which a device is allocated."""
        consumers = (entry.consumer for entry in self.entries if entry.device == device)
        return tuple(
            dict.fromkeys(consumer.vm for consumer in consumers if consumer is not None and consumer.vm is not None)
        )

    def allocations(self, resource: ResourceName) -> Mapping[DeviceId, str]:
        """Return the pods to which the devices of a resource are allocated, by device."""
        return {entry.device: entry.allocated_to for entry in self.entries if entry.resource == resource}

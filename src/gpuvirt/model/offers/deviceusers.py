"""The pods, KubeVirt VMs and processes that use the devices of a node, for its NodeView."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from gpuvirt.facts.ids import DeviceId, IommuGroup, ResourceName, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.model.allocation.ledger import Consumer, Entry
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.sharing import addresses_of
from gpuvirt.model.shares.node.records import ShareRecords

NO_TIME = datetime.min.replace(tzinfo=UTC)
"""Stands for the time of an allocation; the records of shares have none."""


def entries_of(records: ShareRecords, inventory: Inventory | None, resource: ResourceName) -> tuple[Entry, ...]:
    """Return the GPUs of shares as allocations of the units' resource, for changes of GPUs.

    A GPU whose UUID the driver does not show is left out. The kubelet's account has its units, which can't be mapped
    then.
    """
    if not records.pods or inventory is None:
        return ()
    addresses = addresses_of(inventory)
    return tuple(
        Entry(resource, DeviceId(gpu), Target(addresses[gpu]), None, f"share:{uid}", NO_TIME, consumer)
        for uid, pod in records.pods.items()
        for consumer in (Consumer(pod_uid=uid, namespace=pod.namespace, pod=pod.name),)
        for gpu in pod.placement.used
        if gpu in addresses
    )


NO_ALLOCATIONS: Mapping[DeviceId, str] = {}


class DeviceUsers(msgspec.Struct, frozen=True):
    """The allocations and the open IOMMU groups of a node, by device: a node may have thousands."""

    pods: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The pods to which each device is allocated."""
    virtual_machines: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """KubeVirt's VMs among them."""
    by_resource: Mapping[ResourceName, Mapping[DeviceId, str]] = msgspec.field(default_factory=dict)
    """The pods to which the devices of each resource are allocated."""
    processes: Mapping[IommuGroup, tuple[OpenDeviceUser, ...]] = msgspec.field(default_factory=dict)
    """The processes that have a group open."""
    given: Mapping[VgpuId, ResourceName] = msgspec.field(default_factory=dict)
    """The vGPUs of on-demand allocations, with the resources under which pods have them."""

    def of(self, device: str, group: IommuGroup | Unread | None) -> tuple[str, ...]:
        """Return the pods to which a device is allocated; without such a pod, the processes with its group open."""
        pods = self.pods.get(device)
        if pods is not None or not self.processes or not isinstance(group, int):
            return pods or ()
        return tuple(f"{process.command} (pid {process.pid})" for process in self.processes.get(group, ()))

    def vms(self, device: str) -> tuple[str, ...]:
        """Return KubeVirt's VMs among the pods to which a device is allocated."""
        return self.virtual_machines.get(device, ())

    def allocations(self, resource: ResourceName) -> Mapping[DeviceId, str]:
        """Return the pods to which the devices of a resource are allocated, by device."""
        return self.by_resource.get(resource, NO_ALLOCATIONS)


def device_users(entries: Iterable[Entry], processes: Mapping[IommuGroup, tuple[OpenDeviceUser, ...]]) -> DeviceUsers:
    """Return the users of a node's devices, by its allocations and its open groups."""
    pods, vms = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    by_resource: defaultdict[ResourceName, dict[DeviceId, str]] = defaultdict(dict)
    given = dict[VgpuId, ResourceName]()
    for entry in entries:
        pod, device = entry.allocated_to, entry.device
        by_resource[entry.resource][device] = pod
        names: tuple[str, ...] = (device,)
        if is_on_demand_id(device) and (vgpu := entry.target.vgpu) is not None:
            names, given[vgpu] = (device, vgpu), entry.resource
        for name in names:
            pods[name] = _with(pods.get(name), pod)
            if entry.consumer is not None and (vm := entry.consumer.vm) is not None:
                vms[name] = _with(vms.get(name), vm)
    return DeviceUsers(pods, vms, by_resource, processes, given)


def _with(names: tuple[str, ...] | None, name: str) -> tuple[str, ...]:
    if names is None:
        return (name,)
    return names if name in names else (*names, name)

"""The pods, KubeVirt VMs and processes that use the devices of a node, for its NodeView."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, IommuGroup, PodUid, ResourceName, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.model.allocation.ledger import Consumer, Entry
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.sharing import SharedOffer, addresses_of
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons.sharing import RUNTIME
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.records import KeptShare, ShareRecords
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import SharedGpu

NO_TIME = datetime.min.replace(tzinfo=UTC)
"""Stands for the time of an allocation; the records of shares have none."""


class GivenShares(msgspec.Struct, frozen=True):
    """The shares that pods have, and the GPUs that containers can get."""

    records: ShareRecords = msgspec.field(default_factory=ShareRecords)
    """The shares of all pods, with those that are being given."""
    kept: Mapping[PodUid, KeptShare] = msgspec.field(default_factory=dict)
    """The pods that the API server lacks or calls ended, and that keep their shares, with the reason."""
    capacity: Mapping[GpuId, Units] = msgspec.field(default_factory=dict)
    """The units of the GPUs that containers can get."""
    withheld: tuple[Reason, ...] = ()
    """The reasons against other GPUs that are to be shared."""

    def pods_by_gpu(self) -> Mapping[GpuId, tuple[str, ...]]:
        """Return the pods that have shares of each GPU, as texts in order: `pod default/a`."""
        found: dict[GpuId, tuple[str, ...]] = {}
        for pod in self.records.pods.values():
            for gpu in pod.placement.used:
                found[gpu] = (*found.get(gpu, ()), f"pod {pod.namespace}/{pod.name}")
        return {gpu: tuple(sorted(pods)) for gpu, pods in found.items()}

    def kept_by_gpu(self) -> Mapping[GpuId, Units]:
        """Return the units that pods keep that the API server lacks or calls ended, of each GPU.

        A pod that only the kubelet's record still has does not count: the kubelet writes its record again soon, and
        the scheduler need not know.
        """
        pods, found = self.records.pods, dict[GpuId, Units]()
        for uid in (uid for uid, why in self.kept.items() if uid in pods and why is not KeptShare.RECORDED):
            for gpu, units in pods[uid].placement.used.items():
                found[gpu] = Units(found.get(gpu, 0) + units)
        return found

    def why_withheld(self, gpu: GpuId) -> Reason | None:
        """Return why containers can't get a GPU that is to be shared, None if they can."""
        if gpu in self.capacity:
            return None
        return next((reason for reason in self.withheld if reason.subject in {gpu, RUNTIME}), None)


def with_given(offer: SharedOffer, given: GivenShares | None) -> SharedOffer:
    """Return the shared GPUs as shown: without GPUs that the container runtime can't assign, with the pods' shares.

    `given` is None for an agent that can't share GPUs: it withholds none by itself.
    """
    if given is None:
        return offer
    kept = given.kept_by_gpu()
    shown = tuple(_shown(gpu, given, kept) for gpu in offer.gpus.gpus)
    return replace(offer, gpus=replace(offer.gpus, gpus=shown, recorded=tuple(sorted(given.pods_by_gpu()))))


def _shown(gpu: SharedGpu, given: GivenShares, kept: Mapping[GpuId, Units]) -> SharedGpu:
    if gpu.id is None:
        return gpu
    withheld = gpu.withheld if gpu.withheld is not None else given.why_withheld(gpu.id)
    return replace(gpu, withheld=withheld, kept=kept.get(gpu.id, Units(0)))


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

"""The inputs of the view of a node, and the differences between two such inputs.

Objects of the inventory and of the offers are compared by identity, since observations and offers keep the objects that
have not changed; small values are compared by value.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

import msgspec

from gpuvirt.facts.ids import IommuGroup, PciAddress, ResourceName, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.settings import VfioNodes
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Gpu, Inventory, Vgpu
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.offers.deviceusers import DeviceUsers
from gpuvirt.model.offers.offers import Offer, Offers
from gpuvirt.model.offers.ondemand.offer import OnDemandOffer
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.offers.validation import ValidatorCondition
from gpuvirt.model.offers.view import AgentView, Registration
from gpuvirt.model.offers.withholding import Withholding
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.placement import GpuId

K = TypeVar("K")
V = TypeVar("V")


class ViewInputs(msgspec.Struct, frozen=True):
    """The inputs of a NodeView."""

    inventory: Inventory
    offers: Offers
    users: DeviceUsers
    """The pods, VMs and processes that use its devices."""
    naming: Naming
    registrations: Mapping[ResourceName, Registration] = msgspec.field(default_factory=dict)
    problems: tuple[Reason, ...] = ()
    agent: AgentView | None = None
    desired_by_gpu: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The desired modes of the GPUs that the agent manages."""
    vgpu_configs: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The desired vGPU configs."""
    schedulers: Mapping[PciAddress, Scheduler | Unread] = msgspec.field(default_factory=dict)
    """The schedulers of the GPUs for which they were read."""
    workload: Workload = Workload.PASSTHROUGH
    conditions: tuple[ValidatorCondition, ...] = ()
    withholdings: Mapping[ResourceName, Withholding] = msgspec.field(default_factory=dict)
    """The withheld resources."""
    invalid: tuple[InvalidDesired, ...] = ()
    sharing: SharedOffer = msgspec.field(default_factory=SharedOffer)
    pods_with_shares: Mapping[GpuId, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The pods with shares of each GPU, as texts: `pod default/a`."""
    on_demand: OnDemandOffer = msgspec.field(default_factory=OnDemandOffer)
    given: Mapping[VgpuId, ResourceName] = msgspec.field(default_factory=dict)
    """The resources under which on-demand vGPUs were given to pods."""
    vfio_nodes: VfioNodes = VfioNodes.BOTH
    """The setting, which an agent reads only when it starts."""


class ChangedNodes(msgspec.Struct, frozen=True):
    """The devices and groups whose nodes in `/dev/vfio`, by which VMs open devices, may have changed."""

    devices: AbstractSet[str] = frozenset()
    """Functions and vGPUs."""
    groups: AbstractSet[IommuGroup] = frozenset()

    def concern(self, candidate: Candidate) -> bool:
        """Return whether the nodes of a device may be others."""
        devices = (candidate.carrier, candidate.target.vgpu)
        return candidate.group in self.groups or not self.devices.isdisjoint(devices)


def changed_nodes(now: Inventory, last: Inventory) -> ChangedNodes | None:
    """Return what has changed of the nodes by which VMs open devices; None: all of them may be others."""
    if now is last:
        return ChangedNodes()
    facts, before = now.facts, last.facts
    if facts.platform.iommufd is not before.platform.iommufd:
        return None
    cdevs = facts.cdev_nodes ^ before.cdev_nodes
    functions = _others(facts.functions, before.functions) | {
        address for address, function in facts.functions.items() if cdevs and not cdevs.isdisjoint(function.cdevs)
    }
    devices = {*functions, *(now.vgpus.keys() ^ last.vgpus.keys())}
    return ChangedNodes(devices, facts.group_nodes ^ before.group_nodes)


def changed_gpus(now: ViewInputs, last: ViewInputs) -> AbstractSet[PciAddress]:
    """Return the GPUs whose part of the view may differ, with their vGPUs."""
    gpus, vgpus = now.inventory.gpus, now.inventory.vgpus
    # which GPU a pod has a share of is read from what the driver shows, which is compared nowhere
    if now.naming.ids is not last.naming.ids or now.pods_with_shares or last.pods_with_shares:
        return gpus.keys()
    changed = set(_gpus_of_inventory(now.inventory, last.inventory))
    for device in _changed_devices(now, last):
        vgpu = vgpus.get(VgpuId(device))
        changed.add(vgpu.gpu if vgpu is not None else PciAddress(device))
    changed.update(_gpus_of_groups(now.inventory, _differing(now.users.processes, last.users.processes)))
    changed |= _differing(now.desired_by_gpu, last.desired_by_gpu)
    changed |= _differing(now.vgpu_configs, last.vgpu_configs)
    changed |= _differing(now.schedulers, last.schedulers)
    changed |= _differing(now.on_demand.gpus, last.on_demand.gpus)
    return changed | _differing(now.sharing.gpus.by_address, last.sharing.gpus.by_address)


def _gpus_of_inventory(now: Inventory, last: Inventory) -> Iterator[PciAddress]:
    """Yield the GPUs that are not as before, and those of vGPUs that are not."""
    if now is last:
        return
    for address, gpu in now.gpus.items():
        before = last.gpus.get(address)
        if before is None or not _is_same_gpu(gpu, before):
            yield address
    for id_ in now.vgpus.keys() | last.vgpus.keys():
        found = [inventory.vgpus[id_] for inventory in (now, last) if id_ in inventory.vgpus]
        if len(found) == 1 or not _is_same_vgpu(*found):
            yield from (vgpu.gpu for vgpu in found)


def _is_same_gpu(gpu: Gpu, other: Gpu) -> bool:
    is_same = gpu.function is other.function and gpu.vgpu_host is other.vgpu_host
    return is_same and gpu.siblings == other.siblings


def _is_same_vgpu(vgpu: Vgpu, other: Vgpu) -> bool:
    return vgpu.live is other.live and vgpu.gpu == other.gpu


def _changed_devices(now: ViewInputs, last: ViewInputs) -> Iterator[str]:
    """Yield the ids of the devices that are offered, withheld or used otherwise than before."""
    for name in now.offers.by_resource.keys() | last.offers.by_resource.keys():
        offers = (inputs.offers.by_resource.get(name, Offer(name)) for inputs in (now, last))
        yield from _others(*(offer.devices for offer in offers))
    yield from _differing(now.offers.withheld, last.offers.withheld)
    yield from _differing(now.users.pods, last.users.pods)
    yield from _differing(now.users.virtual_machines, last.users.virtual_machines)
    yield from _differing(now.given, last.given)


def _gpus_of_groups(inventory: Inventory, groups: AbstractSet[IommuGroup]) -> Iterator[PciAddress]:
    """Yield the GPUs that are in groups, or have a vGPU in them."""
    if groups:
        yield from (address for address, gpu in inventory.gpus.items() if gpu.function.iommu_group in groups)
        yield from (vgpu.gpu for vgpu in inventory.vgpus.values() if vgpu.live.group in groups)


def _others(now: Mapping[K, V], last: Mapping[K, V]) -> set[K]:
    """Return the keys whose values are other objects, or that only one of two mappings has."""
    if now is last:
        return set()
    return {key for key, value in now.items() if last.get(key) is not value} | (last.keys() - now.keys())


def _differing(now: Mapping[K, V], last: Mapping[K, V]) -> set[K]:
    """Return the keys whose values are not equal, or that only one of two mappings has."""
    if now is last:
        return set()
    return {key for key, value in now.items() if key not in last or last[key] != value} | (last.keys() - now.keys())

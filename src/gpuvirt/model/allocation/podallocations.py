"""Maps what the kubelet says that pods have to the devices of this host, whichever device plugin gave it to them.

Ids of device plugins: an address (gpuvirt, NVIDIA's for KubeVirt, AMD's), the number of an IOMMU group (KubeVirt), the
UUID of an mdev, `GPU-<uuid>` and `MIG-<uuid>` (NVIDIA), `card1-0` (Intel); a replica of a shared GPU ends with `::0`.
An id of a GPU vendor's resource that is none of these is unmapped: any GPU of that vendor may be the one that it means.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.deviceids import DeviceIds
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId, is_mdev_uuid
from gpuvirt.facts.pci import AMD, INTEL, NVIDIA, FunctionKind, PciFunction
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, refusals

UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
REPLICA = re.compile(r"::[0-9]+\Z")
_NVIDIAS = re.compile(rf"(GPU|MIG(?:-GPU)?)-({UUID})(?![0-9a-z])", re.IGNORECASE)
"""Other plugins that share GPUs add a number of their own to the UUID: `-3`, `-_-0`. Drivers before 470 called a MIG
device `MIG-GPU-<uuid of the GPU>/1/0`."""
_DRM_NODE = re.compile(r"(card[0-9]+|renderD[0-9]+)(?:-[0-9]+)?")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.IGNORECASE)
_DASHED_ADDRESS = re.compile(r"([0-9a-f]{4})-([0-9a-f]{2})-([01][0-9a-f])-([0-7])-0x[0-9a-f]{4}")
"""Intel's DRA driver: `0000-03-00-0-0x56a0`."""
_VENDORS = ((NVIDIA, re.compile(r"(?:gpu\.)?nvidia\.com")), (AMD, re.compile(r"(?:gpu\.)?amd\.com")))
_VENDORS_OF_DOMAINS = (*_VENDORS, (INTEL, re.compile(r"gpu\.intel\.com")))
"""Domains of resources, and names of DRA drivers, under which only devices of this vendor are offered as GPUs."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One device that the kubelet gave to a pod."""

    resource: ResourceName
    """The resource, or the DRA driver."""
    device: DeviceId
    pod: str
    """The pod in words."""


@dataclass(frozen=True, slots=True)
class PodAllocations:
    """What pods have of a host."""

    functions: Mapping[PciAddress, tuple[str, ...]] = field(default_factory=dict)
    """The pods that have a function whole, or a part of a GPU that is no vGPU: a replica, a MIG device."""
    vgpus: Mapping[VgpuId, tuple[str, ...]] = field(default_factory=dict)
    unmapped: tuple[Allocation, ...] = ()
    """GPUs that pods have, and that could not be found on this host."""
    unknown: Reason | None = None
    """Why it is not known what else pods have; None where it is."""

    def by_gpu(self, inventory: Inventory) -> Mapping[PciAddress, tuple[str, ...]]:
        """Return the pods that have a function, or a vGPU on it."""
        found = {address: list(pods) for address, pods in self.functions.items()}
        for vgpu, pods in self.vgpus.items():
            found.setdefault(inventory.vgpus[vgpu].gpu, []).extend(pods)
        return {address: tuple(dict.fromkeys(pods)) for address, pods in found.items()}


def map_allocations(
    inventory: Inventory, allocations: Iterable[Allocation], unknown: Reason | None = None
) -> PodAllocations:
    """Return which devices of a host pods have."""
    functions: defaultdict[PciAddress, list[str]] = defaultdict(list)
    vgpus: defaultdict[VgpuId, list[str]] = defaultdict(list)
    unmapped: list[Allocation] = []
    for allocation in allocations:
        device = DeviceId(REPLICA.sub("", allocation.device))
        for vgpu in _vgpus_of(inventory, device):
            vgpus[vgpu].append(allocation.pod)
        addresses = _functions_of(inventory, device)
        for address in addresses or ():
            functions[address].append(allocation.pod)
        if addresses is None and vendor_of(allocation) is not None:
            unmapped.append(allocation)
    return PodAllocations(
        {address: tuple(dict.fromkeys(pods)) for address, pods in functions.items()},
        {vgpu: tuple(dict.fromkeys(pods)) for vgpu, pods in vgpus.items()},
        tuple(unmapped),
        unknown,
    )


def _vgpus_of(inventory: Inventory, device: DeviceId) -> Iterator[VgpuId]:
    """Yield the vGPUs that an id means: by their own ids, or by the numbers of their groups."""
    if (vgpu := VgpuId(device.lower())) in inventory.vgpus:
        yield vgpu
    elif device.isascii() and device.isdigit():
        group = int(device)
        yield from (one for one, vgpu in inventory.vgpus.items() if vgpu.live.group == group)


def _functions_of(inventory: Inventory, device: DeviceId) -> frozenset[PciAddress] | None:
    """Return the functions that an id means, none of an id of something that this host lacks; None: it is not known.

    The kernel lists all addresses and mdevs, so one that it does not list is not there.
    """
    facts, lower = inventory.facts, device.lower()
    if _ADDRESS.fullmatch(device) or is_mdev_uuid(device):
        return frozenset({PciAddress(lower)} & facts.functions.keys())
    if dashed := _DASHED_ADDRESS.fullmatch(lower):
        return frozenset({PciAddress("{}:{}:{}.{}".format(*dashed.groups()))} & facts.functions.keys()) or None
    if device.isascii() and device.isdigit():
        members = inventory.groups.get(IommuGroup(int(device)), ())
        return frozenset(one for one in members if facts.functions[one].kind is not FunctionKind.BRIDGE) or None
    return _by_drivers_id(facts.device_ids, device)


def _by_drivers_id(ids: DeviceIds, device: DeviceId) -> frozenset[PciAddress] | None:
    """Return the GPUs that a driver's own id means; a MIG device may be on any GPU that has GPU instances."""
    found: PciAddress | None = None
    if nvidias := _NVIDIAS.match(device):
        if nvidias[1].upper() == "MIG":
            return ids.mig_gpus or None
        found = ids.gpu_uuids.get(nvidias[2].lower())
    elif drm := _DRM_NODE.fullmatch(device):
        found = ids.drm_nodes.get(drm[1])
    return None if found is None else frozenset({found})


def vendor_of(allocation: Allocation) -> int | None:
    """Return whose GPU an allocation is by the id and the resource; None where neither says that it is a GPU."""
    if _NVIDIAS.match(allocation.device):
        return NVIDIA
    domain = allocation.resource.partition("/")[0]
    return next((vendor for vendor, pattern in _VENDORS_OF_DOMAINS if pattern.fullmatch(domain)), None)


def unmapped_reasons(function: PciFunction, unmapped: Iterable[Allocation]) -> Iterator[Reason]:
    """Yield why a GPU stays with its native driver: a pod has a GPU of its vendor, and it may be this one."""
    if function.kind is not FunctionKind.GPU or not isinstance(function.driver, str) or function.on_vfio:
        return
    for allocation in unmapped:
        if vendor_of(allocation) == function.id.vendor:
            yield refusals.allocation_unmapped(
                function.address, allocation.pod, f"{allocation.resource}: {allocation.device}"
            )

"""Maps the allocations that the kubelet reports, of any device plugin, to the devices of this host.

Ids of device plugins: an address (gpuvirt, NVIDIA's for KubeVirt, AMD's), the number of an IOMMU group (KubeVirt), the
UUID of an mdev, `GPU-<uuid>` and `MIG-<uuid>` (NVIDIA), `card1-0` (Intel); a replica of a shared GPU ends with `::0`.
Other ids of a GPU vendor's resource are unmapped: any GPU of that vendor may be the allocated one.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId, is_mdev_uuid, is_pci_address
from gpuvirt.facts.pci import AMD, INTEL, NVIDIA, FunctionKind, PciFunction
from gpuvirt.facts.snapshot import DeviceIds
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, refusals

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_REPLICA = re.compile(r"::[0-9]+\Z")
_NVIDIAS = re.compile(rf"(GPU|MIG(?:-GPU)?)-({_UUID})(?![0-9a-z])", re.IGNORECASE)
"""Other plugins that share GPUs append a number to the UUID: `-3`, `-_-0`. In drivers before 470 the id of a MIG device
is `MIG-GPU-<uuid of the GPU>/1/0`."""
_DRM_NODE = re.compile(r"(card[0-9]+|renderD[0-9]+)(?:-[0-9]+)?")
_DASHED_ADDRESS = re.compile(r"([0-9a-f]{4})-([0-9a-f]{2})-([01][0-9a-f])-([0-7])-0x[0-9a-f]{4}")
"""Intel's DRA driver: `0000-03-00-0-0x56a0`."""
_VENDORS_OF_DOMAINS = (
    (NVIDIA, re.compile(r"(?:gpu\.)?nvidia\.com")),
    (AMD, re.compile(r"(?:gpu\.)?amd\.com")),
    (INTEL, re.compile(r"gpu\.intel\.com")),
)
"""Domains of resources, and names of DRA drivers, under which only devices of this vendor are offered as GPUs."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One device that the kubelet allocated to a pod."""

    resource: ResourceName
    """The resource, or the DRA driver."""
    device: DeviceId
    pod: str
    """The pod as text."""


@dataclass(frozen=True, slots=True)
class PodAllocations:
    """The allocated devices of a host."""

    functions: Mapping[PciAddress, tuple[str, ...]] = field(default_factory=dict)
    """The pods that have a function whole, or a part of a GPU that is not a vGPU: a replica, a MIG device."""
    vgpus: Mapping[VgpuId, tuple[str, ...]] = field(default_factory=dict)
    unmapped: tuple[Allocation, ...] = ()
    """Allocations of GPUs whose ids can't be mapped to a GPU of this host."""
    unknown: Reason | None = None
    """Why there may be more allocations; None if all are known."""

    def by_gpu(self, inventory: Inventory) -> Mapping[PciAddress, tuple[str, ...]]:
        """Return the pods that have each function, or a vGPU on it."""
        found = {address: list(pods) for address, pods in self.functions.items()}
        for vgpu, pods in self.vgpus.items():
            found.setdefault(inventory.vgpus[vgpu].gpu, []).extend(pods)
        return {address: tuple(dict.fromkeys(pods)) for address, pods in found.items()}


def map_allocations(
    inventory: Inventory, allocations: Iterable[Allocation], unknown: Reason | None = None
) -> PodAllocations:
    """Return the allocated devices of a host."""
    functions: defaultdict[PciAddress, list[str]] = defaultdict(list)
    vgpus: defaultdict[VgpuId, list[str]] = defaultdict(list)
    unmapped: list[Allocation] = []
    for allocation in allocations:
        device = DeviceId(_REPLICA.sub("", allocation.device))
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
    """Yield the vGPUs of an id: the one that has it, or those in the group of this number."""
    if (vgpu := VgpuId(device.lower())) in inventory.vgpus:
        yield vgpu
    elif device.isascii() and device.isdigit():
        group = int(device)
        yield from (vgpu_id for vgpu_id, vgpu in inventory.vgpus.items() if vgpu.live.group == group)


def _functions_of(inventory: Inventory, device: DeviceId) -> frozenset[PciAddress] | None:
    """Return the functions of an id: none for an address or mdev that this host lacks, None if they are unknown.

    The kernel lists all addresses and mdevs, so one that is not listed does not exist.
    """
    facts, lower = inventory.facts, device.lower()
    if is_pci_address(device) or is_mdev_uuid(device):
        return frozenset({PciAddress(lower)} & facts.functions.keys())
    if dashed := _DASHED_ADDRESS.fullmatch(lower):
        return frozenset({PciAddress("{}:{}:{}.{}".format(*dashed.groups()))} & facts.functions.keys()) or None
    if device.isascii() and device.isdigit():
        members = inventory.groups.get(IommuGroup(int(device)), ())
        return (
            frozenset(member for member in members if facts.functions[member].kind is not FunctionKind.BRIDGE) or None
        )
    return _by_drivers_id(facts.device_ids, device)


def _by_drivers_id(ids: DeviceIds, device: DeviceId) -> frozenset[PciAddress] | None:
    """Return the GPUs of an id of the GPU's driver; a MIG device may be on any GPU that has GPU instances."""
    found: PciAddress | None = None
    if nvidias := _NVIDIAS.match(device):
        if nvidias[1].upper() == "MIG":
            return ids.mig_gpus or None
        found = ids.gpu_uuids.get(nvidias[2].lower())
    elif drm := _DRM_NODE.fullmatch(device):
        found = ids.drm_nodes.get(drm[1])
    return None if found is None else frozenset({found})


def vendor_of(allocation: Allocation) -> int | None:
    """Return the vendor of an allocated GPU, by its id or resource; None if neither shows that it is a GPU."""
    if _NVIDIAS.match(allocation.device):
        return NVIDIA
    domain = allocation.resource.partition("/")[0]
    return next((vendor for vendor, pattern in _VENDORS_OF_DOMAINS if pattern.fullmatch(domain)), None)


def unmapped_reasons(function: PciFunction, unmapped: Iterable[Allocation]) -> Iterator[Reason]:
    """Yield why a GPU keeps its native driver: a pod has a GPU of its vendor, which may be this one."""
    if function.kind is not FunctionKind.GPU or not isinstance(function.driver, str) or function.on_vfio:
        return
    for allocation in unmapped:
        if vendor_of(allocation) == function.id.vendor:
            yield refusals.allocation_unmapped(
                function.address, allocation.pod, f"{allocation.resource}: {allocation.device}"
            )

"""Maps the allocations that the kubelet reports, of any device plugin, to the devices of this host.

Ids of device plugins: an address (gpuvirt, NVIDIA's for KubeVirt, AMD's), the number of an IOMMU group (KubeVirt), the
UUID of an mdev, `GPU-<uuid>` and `MIG-<uuid>` (NVIDIA), `card1-0` (Intel); a replica of a shared GPU ends with `::0`.
Other ids mean what their plugin answered for them. Where that shows no device either, the allocation is unmapped: any
GPU on a native driver may be the allocated one, of the vendor of the resource's domain where it is a GPU vendor's.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId, is_mdev_uuid, is_pci_address
from gpuvirt.facts.pci import AMD, INTEL, NVIDIA, FunctionKind, PciFunction
from gpuvirt.model.allocation.ondemandids import is_on_demand_id, vgpus_in
from gpuvirt.model.allocation.pluginanswers import (
    NamedDevices,
    PluginAnswer,
    gpus_by_uuid,
    is_nvidias_id,
    named_devices,
)
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals

_VENDORS_OF_DOMAINS = (
    (NVIDIA, re.compile(r"(?:gpu\.)?nvidia\.com")),
    (AMD, re.compile(r"(?:gpu\.)?amd\.com")),
    (INTEL, re.compile(r"gpu\.intel\.com")),
)
"""Domains of resources, and names of DRA drivers, under which only devices of this vendor are offered as GPUs."""

_KUBEVIRTS = "devices.kubevirt.io"

WITHOUT_GPUS = (
    _KUBEVIRTS,
    "*.network.kubevirt.io",
    "rdma",
    "mellanox.com",
    "openshift.io",
    "sgx.intel.com",
    "qat.intel.com",
    "dsa.intel.com",
    "iaa.intel.com",
    "dlb.intel.com",
    "fpga.intel.com",
    "compute-domain.nvidia.com",
    "github.com/fuse",
)
"""Domains, and one resource, of device plugins and DRA drivers that give no GPUs: KVM and networks of KubeVirt, RDMA,
network functions, accelerators of Intel that are no GPUs, memory channels between NVIDIA's nodes, FUSE."""


class ResourceRules(msgspec.Struct, frozen=True):
    """Properties of resources that the ids and answers of their plugins do not show."""

    ours: frozenset[ResourceName] = frozenset()
    """The resources that gpuvirt has ever offered on the node."""
    without_gpus: tuple[str, ...] = ()
    """Resources that are no GPUs besides `WITHOUT_GPUS`, by the settings."""

    def is_without_gpus(self, resource: ResourceName) -> bool:
        """Return whether a resource is known to be no GPU."""
        return any(_matches(pattern, resource) for pattern in (*WITHOUT_GPUS, *self.without_gpus))

    def is_group_number(self, resource: ResourceName, device: DeviceId, answer: PluginAnswer | None) -> bool:
        """Return whether a device id is the number of an IOMMU group, as in KubeVirt's own device plugin.

        Plugins of other devices count theirs: RDMA's shared plugin from 0. So digits are a group only as an id of
        gpuvirt's resources, which KubeVirt's plugin may offer too, of KubeVirt's, or of a GPU vendor's domain where
        the plugin's answer names no device nodes. Nodes in an answer show the group themselves.
        """
        if not is_number(device):
            return False
        if resource in self.ours or _matches(_KUBEVIRTS, resource):
            return True
        return vendor_of_domain(resource) is not None and (answer is None or not answer.nodes)


def is_number(device: DeviceId) -> bool:
    """Return whether a device id is a number."""
    return device.isascii() and device.isdigit()


def vendor_of_domain(resource: ResourceName) -> int | None:
    """Return the vendor whose GPUs are offered under the domain of a resource, None for another domain."""
    domain = resource.partition("/")[0]
    return next((vendor for vendor, pattern in _VENDORS_OF_DOMAINS if pattern.fullmatch(domain)), None)


def _matches(pattern: str, resource: ResourceName) -> bool:
    """Return whether a resource has a name or a domain; `*.example.com` stands for all domains below."""
    domain = resource.partition("/")[0]
    if pattern.startswith("*."):
        return domain.endswith(pattern[1:])
    return pattern in {resource, domain}


_REPLICA = re.compile(r"::[0-9]+\Z")
_DRM_NODE = re.compile(r"(card[0-9]+|renderD[0-9]+)(?:-[0-9]+)?")
_DASHED_ADDRESS = re.compile(r"([0-9a-f]{4})-([0-9a-f]{2})-([01][0-9a-f])-([0-7])-0x[0-9a-f]{4}")
"""Intel's DRA driver: `0000-03-00-0-0x56a0`."""
_NO_RULES = ResourceRules()


class Allocation(msgspec.Struct, frozen=True):
    """One device that the kubelet allocated to a pod."""

    resource: ResourceName
    """The resource, or the DRA driver."""
    device: DeviceId
    pod: str
    """The pod as text."""
    answer: PluginAnswer | None = None
    """The plugin's answer; None where it is unknown."""


class PodAllocations(msgspec.Struct, frozen=True):
    """The allocated devices of a host."""

    functions: Mapping[PciAddress, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The pods that have a function whole, or a part of a GPU that is not a vGPU: a replica, a MIG device."""
    vgpus: Mapping[VgpuId, tuple[str, ...]] = msgspec.field(default_factory=dict)
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
    inventory: Inventory,
    allocations: Iterable[Allocation],
    unknown: Reason | None = None,
    rules: ResourceRules = _NO_RULES,
) -> PodAllocations:
    """Return the allocated devices of a host."""
    functions: defaultdict[PciAddress, list[str]] = defaultdict(list)
    vgpus: defaultdict[VgpuId, list[str]] = defaultdict(list)
    unmapped: list[Allocation] = []
    for allocation in allocations:
        by_id, by_answer = _by_id(inventory, rules, allocation), _by_answer(inventory, rules, allocation)
        for named in (by_id, by_answer):
            for vgpu in (*named.vgpus, *_vgpus_in(inventory, named.groups)):
                vgpus[vgpu].append(allocation.pod)
            for address in (*named.functions, *_functions_in(inventory, named.groups)):
                functions[address].append(allocation.pod)
        if not (by_id.complete or by_answer.complete or rules.is_without_gpus(allocation.resource)):
            unmapped.append(allocation)
    return PodAllocations(
        {address: tuple(dict.fromkeys(pods)) for address, pods in functions.items()},
        {vgpu: tuple(dict.fromkeys(pods)) for vgpu, pods in vgpus.items()},
        tuple(unmapped),
        unknown,
    )


def _by_answer(inventory: Inventory, rules: ResourceRules, allocation: Allocation) -> NamedDevices:
    """Return the devices that a plugin's answer names; gpuvirt's own ids say it all, but those of mode on-demand."""
    if allocation.answer is None:
        return NamedDevices()
    if is_on_demand_id(allocation.device):
        vgpus = vgpus_in(allocation.answer)
        found = frozenset(VgpuId(vgpu) for vgpu in vgpus) & inventory.vgpus.keys()
        return NamedDevices(vgpus=frozenset(found), complete=bool(vgpus))
    if allocation.resource in rules.ours:
        return NamedDevices()
    return named_devices(inventory, allocation.answer)


def _by_id(inventory: Inventory, rules: ResourceRules, allocation: Allocation) -> NamedDevices:
    """Return the devices that an id names: none for an address or mdev that this host lacks.

    The kernel lists all addresses and mdevs, so one that is not listed does not exist. Plugins of other vendors may
    have UUIDs as ids that are no mdevs.
    """
    facts, resource = inventory.facts, allocation.resource
    device = DeviceId(_REPLICA.sub("", allocation.device))
    lower = device.lower()
    vgpus = frozenset({VgpuId(lower)} & inventory.vgpus.keys())
    if is_pci_address(device):
        return NamedDevices(frozenset({PciAddress(lower)} & facts.functions.keys()), vgpus, complete=True)
    if is_mdev_uuid(device):
        is_mdevs = bool(vgpus) or resource in rules.ours or vendor_of_domain(resource) is not None
        return NamedDevices(vgpus=vgpus, complete=is_mdevs)
    if dashed := _DASHED_ADDRESS.fullmatch(lower):
        return _found(frozenset({PciAddress("{}:{}:{}.{}".format(*dashed.groups()))} & facts.functions.keys()))
    if rules.is_group_number(resource, device, allocation.answer):
        groups = frozenset({IommuGroup(int(device))})
        members = (*_functions_in(inventory, groups), *_vgpus_in(inventory, groups))
        return NamedDevices(groups=groups, complete=bool(members))
    if drm := _DRM_NODE.fullmatch(device):
        return _found(frozenset({node} if (node := facts.device_ids.drm_nodes.get(drm[1])) is not None else ()))
    return _found(gpus_by_uuid(facts.device_ids, device) or frozenset())


def _found(functions: frozenset[PciAddress]) -> NamedDevices:
    return NamedDevices(functions, complete=bool(functions))


def _functions_in(inventory: Inventory, groups: Iterable[IommuGroup]) -> Iterator[PciAddress]:
    """Yield the functions of groups that a VM can get; bridges stay the host's."""
    for group in groups:
        for member in inventory.groups.get(group, ()):
            if inventory.facts.functions[member].kind is not FunctionKind.BRIDGE:
                yield member


def _vgpus_in(inventory: Inventory, groups: frozenset[IommuGroup]) -> Iterator[VgpuId]:
    if groups:
        yield from (vgpu_id for vgpu_id, vgpu in inventory.vgpus.items() if vgpu.live.group in groups)


def vendor_of(allocation: Allocation) -> int | None:
    """Return the vendor of an allocated GPU, by its id or resource; None if neither shows it."""
    if is_nvidias_id(allocation.device):
        return NVIDIA
    return vendor_of_domain(allocation.resource)


def unmapped_reasons(function: PciFunction, unmapped: Iterable[Allocation]) -> Iterator[Reason]:
    """Yield why a GPU keeps its native driver: a pod may have it, by an id and an answer that show no device."""
    if function.kind is not FunctionKind.GPU or not isinstance(function.driver, str) or function.on_vfio:
        return
    for allocation in unmapped:
        if (vendor := vendor_of(allocation)) in {None, function.id.vendor}:
            if_no_gpu = "; if the resource is no GPU, add it to `resources_without_gpus` in the agent's settings"
            yield Reason(
                ReasonCode.ALLOCATION_UNMAPPED,
                function.address,
                f"may be allocated to {allocation.pod}, which has {allocation.resource}: {allocation.device}; gpuvirt"
                " can't map this id to a GPU of this host",
                (Seen("the kubelet's checkpoint and pod-resources API"),),
                refusals.WAIT_FOR_POD + (if_no_gpu if vendor is None else ""),
            )

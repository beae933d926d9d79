"""What could be given to a virtual machine, and why the rest could not."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model import refusals
from gpuvirt.model.inventory import Inventory, Vgpu
from gpuvirt.model.naming import NAMESPACES, Named, Naming
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.settings import Settings


@dataclass(frozen=True, slots=True)
class Target:
    """What a device id stands for: a whole function, or a vGPU on a GPU."""

    gpu: PciAddress
    """The function itself, or the GPU that carries the vGPU."""
    vgpu: VgpuId | None = None
    type: VgpuType | None = field(default=None, compare=False)
    """The vGPU's type when it was given out; another one does not make it another device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that can be offered."""

    id: DeviceId
    target: Target
    named: Named
    group: IommuGroup | None
    numa_node: int | None
    framework: Framework | None
    """None for a whole function."""
    carrier: PciAddress
    """The function that a virtual machine gets, or that its vGPU is made on."""

    @property
    def is_mdev(self) -> bool:
        """Whether KubeVirt looks for it among mdevs."""
        return self.framework is Framework.MDEV


def passthrough(inventory: Inventory, naming: Naming, settings: Settings) -> Iterator[Candidate | Reason]:
    """Yield each whole function that can be offered, and for the others of interest the reason why not."""
    for function in inventory.facts.functions.values():
        if not inventory.matters(function):
            continue
        reason = _why_not_whole(inventory, function, settings)
        if reason is not None:
            yield reason
        elif isinstance(function.iommu_group, int):
            physfn = inventory.facts.functions.get(function.physfn) if function.physfn is not None else None
            yield Candidate(
                id=DeviceId(function.address),
                target=Target(function.address),
                named=naming.of_function(function.id, is_vf=physfn is not None and physfn.id == function.id),
                group=function.iommu_group,
                numa_node=function.numa_node,
                framework=None,
                carrier=function.address,
            )


def vgpus(inventory: Inventory, naming: Naming) -> Iterator[Candidate | Reason]:
    """Yield each vGPU that can be offered, and for the others the reason why not."""
    for vgpu in inventory.vgpus.values():
        live, gpu = vgpu.live, inventory.facts.functions.get(vgpu.gpu)
        carrier = inventory.facts.functions.get(live.slot)
        if (reason := _why_not_vgpu(inventory, vgpu)) is not None:
            yield reason
        elif gpu is not None and isinstance(live.type, str) and isinstance(live.group, int):
            yield Candidate(
                id=DeviceId(live.id),
                target=Target(vgpu.gpu, live.id, live.type),
                named=naming.of_type(gpu.id.vendor, live.type),
                group=live.group,
                numa_node=carrier.numa_node if carrier is not None else gpu.numa_node,
                framework=vgpu.framework,
                carrier=live.slot,
            )


def why_not(inventory: Inventory, settings: Settings, device: Candidate) -> Reason | None:
    """Return why a device can't be offered, None where it can, or is not there."""
    if device.target.vgpu is not None:
        vgpu = inventory.vgpus.get(device.target.vgpu)
        return _why_not_vgpu(inventory, vgpu) if vgpu is not None else None
    function = inventory.facts.functions.get(device.carrier)
    return _why_not_whole(inventory, function, settings) if function is not None else None


def _why_not_vgpu(inventory: Inventory, vgpu: Vgpu) -> Reason | None:
    live, gpu = vgpu.live, inventory.facts.functions.get(vgpu.gpu)
    for found in (live.type, live.group):
        if isinstance(found, Unread):
            return refusals.unread(live.id, found)
    if live.group is None:
        return _no_group_of_vgpu(live.id)
    if vgpu.framework is Framework.VENDOR_VFIO and (refused := _why_not_accepted(live.id)) is not None:
        return refused
    if gpu is None or gpu.id.vendor not in NAMESPACES:
        return Reason(
            ReasonCode.ODD_ENTRY, live.id, "is carried by a device that is no GPU of NVIDIA, AMD or Intel", vgpu.gpu
        )
    return None


def shares_group(inventory: Inventory, settings: Settings, candidate: Candidate) -> bool:
    """Return whether other functions that could be offered are in a device's group."""
    members = inventory.groups.get(candidate.group, ()) if candidate.group is not None else ()
    others = (inventory.facts.functions[address] for address in members if address != candidate.carrier)
    return any(other.on_vfio and settings.offers(other.kind) for other in others)


def _why_not_whole(inventory: Inventory, function: PciFunction, settings: Settings) -> Reason | None:
    address, driver = function.address, function.driver
    if isinstance(driver, Unread):
        return refusals.unread(address, driver)
    if not function.on_vfio:
        return _not_on_vfio(inventory, function)
    if not settings.offers(function.kind):
        return Reason(
            ReasonCode.NOT_ASKED_FOR,
            address,
            f"is a {function.kind} function, and only {', '.join(settings.offer) or 'nothing'} is offered",
            fix=f"add {function.kind} to `offer` in the agent's settings if virtual machines are to ask for it",
        )
    return _why_not_accepted(address) or _why_not_on_vfio(function)


def _why_not_accepted(address: str) -> Reason | None:
    if len(address.partition(":")[0]) <= 4:
        return None
    return Reason(
        ReasonCode.ADDRESS_NOT_ACCEPTED,
        address,
        "has a PCI domain of more than four digits (behind Intel VMD), which KubeVirt refuses",
        fix="switch VMD off for this slot in the firmware",
    )


def _why_not_on_vfio(function: PciFunction) -> Reason | None:
    address = function.address
    if function.physfn is not None and function.id.vendor == NVIDIA:
        return Reason(
            ReasonCode.VIRTUAL_FUNCTION,
            address,
            f"is a VF of {function.physfn} on {function.driver}; NVIDIA's VFs work as vGPUs only",
            fix=f"give it back to nvidia and set a vGPU type, or switch off the VFs of {function.physfn}",
        )
    if function.virtfns:
        return Reason(
            ReasonCode.VFS_ENABLED,
            address,
            f"is on {function.driver} with {len(function.virtfns)} VFs switched on, and opens with a VF token only",
            seen=f"/sys/bus/pci/devices/{address}/virtfn0",
            fix=f"echo 0 > /sys/bus/pci/devices/{address}/sriov_numvfs",
        )
    if isinstance(function.iommu_group, Unread):
        return refusals.unread(address, function.iommu_group)
    return refusals.no_group(address) if function.iommu_group is None else None


def _not_on_vfio(inventory: Inventory, function: PciFunction) -> Reason:
    address = function.address
    gpu = inventory.gpus.get(function.physfn or address)
    if gpu is not None and gpu.vgpu_host is not None:
        if function.physfn is not None or gpu.vgpu_host.live:
            carried = sum(live.slot == address or function.physfn is None for live in gpu.vgpu_host.live)
            return Reason(ReasonCode.CARRIES_VGPUS, address, f"is offered as its vGPUs, of which it carries {carried}")
        return Reason(
            ReasonCode.NO_VGPUS,
            address,
            "could carry vGPUs, but has none",
            fix="create vGPUs on it, or bind it to vfio-pci",
        )
    if function.driver is None:
        return _without_driver(inventory, function)
    return Reason(
        ReasonCode.NATIVE_DRIVER,
        address,
        f"is bound to {function.driver}, so it serves the host and containers",
        seen=f"/sys/bus/pci/devices/{address}/driver -> {function.driver}",
        fix=f"gpuvirt vfio bind {address}, to offer it to virtual machines",
    )


def _without_driver(inventory: Inventory, function: PciFunction) -> Reason:
    address, driver_link = function.address, f"/sys/bus/pci/devices/{function.address}/driver"
    until_then = "end the user in good order; nothing else can be done to the device until then"
    if using := _users(inventory, function):
        return Reason(
            ReasonCode.UNBIND_PENDING,
            address,
            f"is being unbound while {using} uses it; whoever unbinds it waits for that",
            seen=f"no {driver_link}, but its IOMMU group is open",
            fix=until_then,
        )
    if leaving := inventory.facts.users_of_lost_nodes:
        return Reason(
            ReasonCode.UNBIND_PENDING,
            address,
            f"may be what is being unbound while {refusals.named(leaving)} uses it; nothing tells which device that is",
            seen=f"no {driver_link}, and an open {leaving[0].node}",
            fix=until_then,
        )
    if function.iommu_group is None:
        return refusals.no_group(address)
    return Reason(
        ReasonCode.NO_DRIVER,
        address,
        "is bound to no driver",
        seen=f"no {driver_link}",
        fix=f"gpuvirt vfio bind {address}, or unbind to give it back to the host",
    )


def _users(inventory: Inventory, function: PciFunction) -> str | None:
    """Return who has a function's group open, in words."""
    users = inventory.facts.users
    if users is None or not isinstance(function.iommu_group, int) or function.iommu_group not in users:
        return None
    return refusals.named(users[function.iommu_group])


def _no_group_of_vgpu(subject: str) -> Reason:
    return Reason(
        ReasonCode.NO_IOMMU_GROUP,
        subject,
        "is in no IOMMU group, so no virtual machine can open it",
        seen=f"no iommu_group link in /sys for {subject}",
        fix="boot a kernel with VFIO_GROUP: without it mediated devices are in no group",
    )

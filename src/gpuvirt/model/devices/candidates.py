"""The functions and vGPUs that can be offered to VMs, why the others can't, and the selectors of KubeVirt for them.

Source of the selectors: KubeVirt's `permittedHostDevices`. It compares an id (`10DE:2236`) in any case, and a type's
name with `_` for each space. For a vGPU that is a VF on its vendor's driver, the selector is the VF's PCI id.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

import msgspec

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, VgpuId, VgpuType, is_mdev_uuid, is_pci_id, slot_of
from gpuvirt.facts.pci import GRACE_DRIVER, NOUVEAU, NVIDIA, PciFunction, Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.facts.vgpu import Framework, VgpuHost
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import Inventory, Vgpu
from gpuvirt.model.inventory.isolation import group_blockers
from gpuvirt.model.inventory.naming import NAMESPACES, Named, Naming
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, notoffered, refusals
from gpuvirt.model.reasons.notoffered import BY_AGENT, no_vgpus
from gpuvirt.model.reasons.reason import driver_link
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import profile_name


@dataclass(frozen=True, slots=True)
class Target:
    """The device of a device id: a whole function, or a vGPU of a GPU."""

    gpu: PciAddress
    """The function itself, or the GPU that carries the vGPU."""
    vgpu: VgpuId | None = None
    type: VgpuType | None = field(default=None, compare=False)
    """The vGPU's type when it was allocated. It does not count in comparisons."""

    @property
    def id(self) -> DeviceId:
        """The id under which gpuvirt offers the device; other plugins may have another, such as its group's number."""
        return DeviceId(self.vgpu or self.gpu)


class Candidate(msgspec.Struct, frozen=True):
    """A device that can be offered."""

    id: DeviceId
    target: Target
    named: Named
    group: IommuGroup | None
    numa_node: int | None
    framework: Framework | None
    """None for a whole function."""
    carrier: PciAddress
    """The function that a VM gets, or the parent of the vGPU."""

    @property
    def is_mdev(self) -> bool:
        """Whether the device is a mediated device."""
        return self.framework is Framework.MDEV


def framework_of(target: Target) -> Framework | None:
    """Return the framework of a device by its id, for one that the host does not show; None for a whole function."""
    if target.vgpu is None:
        return None
    return Framework.MDEV if is_mdev_uuid(target.vgpu) else Framework.VENDOR_VFIO


def passthrough(inventory: Inventory, naming: Naming, settings: Settings) -> Iterator[Candidate | Reason]:
    """Yield each whole function that can be offered, and a reason for each other GPU, sibling function or NVSwitch."""
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
                named=naming.of_function(
                    function.id,
                    function.kind,
                    is_vf=physfn is not None and physfn.id == function.id,
                    parts=len(physfn.virtfns) if physfn is not None and function.is_gpu_part else 1,
                ),
                group=function.iommu_group,
                numa_node=function.numa_node,
                framework=None,
                carrier=function.address,
            )


class KnownVgpus(msgspec.Struct, frozen=True):
    """The vGPUs of an earlier inventory, by the same inputs of names."""

    inventory: Inventory
    candidates: Mapping[VgpuId, Candidate]
    """Those that could be offered."""

    def again(self, inventory: Inventory, vgpu: Vgpu) -> Candidate | None:
        """Return the candidate of a vGPU if the same follows from a later inventory, else None."""
        live, before = vgpu.live, self.inventory.vgpus.get(vgpu.live.id)
        if before is None or before.live is not live or (before.gpu, before.framework) != (vgpu.gpu, vgpu.framework):
            return None
        now, then = inventory.facts.functions, self.inventory.facts.functions
        is_same = all(now.get(address) is then.get(address) for address in (vgpu.gpu, live.parent))
        return self.candidates.get(live.id) if is_same else None


def vgpus(inventory: Inventory, naming: Naming, known: KnownVgpus | None = None) -> Iterator[Candidate | Reason]:
    """Yield each vGPU that can be offered, and a reason for each other vGPU."""
    functions, names = inventory.facts.functions, dict[tuple[int, VgpuType], Named]()
    for vgpu in inventory.vgpus.values():
        if known is not None and (again := known.again(inventory, vgpu)) is not None:
            yield again
            continue
        live, gpu = vgpu.live, functions.get(vgpu.gpu)
        carrier = functions.get(live.parent)
        if (reason := _why_not_vgpu(inventory, vgpu)) is not None:
            yield reason
        elif gpu is not None and isinstance(live.type, str) and isinstance(live.group, int):
            kind = gpu.id.vendor, live.type
            if (named := names.get(kind)) is None:
                named = names[kind] = naming.of_type(*kind)
            yield Candidate(
                id=DeviceId(live.id),
                target=Target(vgpu.gpu, live.id, live.type),
                named=named,
                group=live.group,
                numa_node=carrier.numa_node if carrier is not None else gpu.numa_node,
                framework=vgpu.framework,
                carrier=live.parent,
            )


def why_not(inventory: Inventory, settings: Settings, device: Candidate) -> Reason | None:
    """Return why a device can't be offered, None if it can, or if it does not exist."""
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
        return refusals.no_group(live.id)
    if vgpu.framework is Framework.VENDOR_VFIO and (refused := _why_not_accepted(live.id)) is not None:
        return refused
    if gpu is None or gpu.id.vendor not in NAMESPACES:
        what = "is carried by a device that is not a GPU of NVIDIA, AMD or Intel"
        return notoffered.malformed(live.id, what, Seen(vgpu.gpu))
    return None


def shares_group(inventory: Inventory, settings: Settings, candidate: Candidate) -> bool:
    """Return whether a device's IOMMU group has other functions that can be offered."""
    members = inventory.groups.get(candidate.group, ()) if candidate.group is not None else ()
    others = (inventory.facts.functions[address] for address in members if address != candidate.carrier)
    return any(other.on_vfio and settings.offers(other.kind) for other in others)


def _why_not_whole(inventory: Inventory, function: PciFunction, settings: Settings) -> Reason | None:
    if not function.on_vfio:
        return _not_on_vfio(inventory, function)
    if not settings.offers(function.kind):
        return Reason(
            ReasonCode.KIND_NOT_OFFERED,
            function.address,
            f"is a {function.kind} function, and the agent's settings offer only"
            f" {', '.join(settings.offer) or 'nothing'}",
            fix=f"to offer it to VMs, add {function.kind} to `offer` in the agent's settings",
        )
    return _why_not_accepted(function.address) or _why_not_on_vfio(function)


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
    if function.is_nvidias_vf:
        return Reason(
            ReasonCode.VIRTUAL_FUNCTION,
            function.address,
            f"is a VF of {function.physfn} on {function.driver}, but NVIDIA's VFs work only as vGPUs",
            (driver_link(function.address, function.driver),),
            f"bind it to nvidia and set a vGPU type, or switch off the VFs of {function.physfn}",
        )
    if function.virtfns:
        return refusals.vfs_enabled(function)
    if isinstance(function.iommu_group, Unread):
        return refusals.unread(address, function.iommu_group)
    return refusals.no_group(address) if function.iommu_group is None else None


def _not_on_vfio(inventory: Inventory, function: PciFunction) -> Reason:
    address = function.address
    gpu = inventory.gpus.get(function.physfn or address)
    if not isinstance(function.driver, Unread) and gpu is not None and gpu.vgpu_host is not None:
        if function.physfn is not None or gpu.vgpu_host.live:
            carried = sum(live.parent == address or function.physfn is None for live in gpu.vgpu_host.live)
            return refusals.carries_vgpus(address, carried)
        return why_no_vgpus(inventory, function, gpu.vgpu_host)
    return why_native(inventory, function)


def why_native(inventory: Inventory, function: PciFunction) -> Reason:
    """Return why a function, on no VFIO driver, can't be offered as a whole."""
    if isinstance(function.driver, Unread):
        return refusals.unread(function.address, function.driver)
    if function.fell_off_bus:
        return refusals.fell_off_bus(function.address, function.address)
    if function.bars_unassigned:
        return refusals.bar_unassigned(function.address, function.address, function.bars_unassigned)
    if function.driver is None:
        return _without_driver(inventory, function)
    if function.virtfns:
        return refusals.vfs_enabled(function)
    address, driver, to_bind = function.address, function.driver, _to_bind(inventory, function)
    is_stub = function.is_idle
    return notoffered.no_driver(address, to_bind, stub=driver) if is_stub else _native_driver(address, driver, to_bind)


def _to_bind(inventory: Inventory, function: PciFunction) -> str:
    """Return how the function gets to VMs: by a command that the planner accepts, else what has to change before."""
    address, group = function.address, function.iommu_group
    functions = inventory.facts.functions
    own = (address,) if function.is_gpu_part else inventory.slots[slot_of(address)]
    uses = [f"{member} {use}" for member in own if (use := functions[member].console) is not None]
    if group is None:
        return "gpuvirt doctor shows what keeps it out of an IOMMU group, without which no VM can open it"
    if uses:
        return f"{uses[0]}, so it stays with the host: make another display the primary one in the firmware, and reboot"
    groups = {functions[member].iommu_group for member in own}
    members = [member for number in groups if isinstance(number, int) for member in inventory.groups.get(number, ())]
    foreign = group_blockers(functions, sorted(set(members) - set(own)))
    if foreign:
        return refusals.move_or_bind(address, [other.address for other in foreign])
    if function.needs_grace_driver:
        return (
            f"gpuvirt doctor shows whether the kernel has {GRACE_DRIVER}; then gpuvirt vfio bind {address}, {BY_AGENT}"
        )
    emptied = " --remove-vgpus" if function.virtfns else ""
    return f"gpuvirt vfio bind{emptied} {address}, {BY_AGENT}"


def why_no_vgpus(inventory: Inventory, function: PciFunction, host: VgpuHost) -> Reason:
    """Return why a GPU whose driver creates vGPUs has none."""
    types = sorted({name for types in host.creatable.values() for name, count in types.items() if count > 0})
    creatable = profile_name(next((name for name in types if name.endswith("Q")), types[0])) if types else None
    below = "virtfn*/" if function.virtfns else ""
    is_mdev = host.framework is Framework.MDEV
    attribute = f"{below}mdev_supported_types" if is_mdev else "virtfn*/nvidia/creatable_vgpu_types"
    has_mig = any(card.is_mig for card in catalog.cards_of(function.id, function.subsystem))
    whole = _to_bind(inventory, function)
    return _gpu_without_vgpus(function.address, attribute, types, creatable, whole, has_mig=has_mig)


def _without_driver(inventory: Inventory, function: PciFunction) -> Reason:
    address = function.address
    if using := _users(inventory, function):
        return refusals.unbind_pending(address, using)
    if leaving := inventory.facts.users_of_lost_nodes:
        return refusals.unbind_pending(address, leaving, certain=False)
    if function.iommu_group is None:
        return refusals.no_group(address)
    carries_vgpus = function.id.vendor == NVIDIA and bool(catalog.cards_of(function.id, function.subsystem))
    by_hand = inventory.has_nvswitches
    return notoffered.no_driver(address, _to_bind(inventory, function), carries_vgpus=carries_vgpus, by_hand=by_hand)


def _users(inventory: Inventory, function: PciFunction) -> Sequence[OpenDeviceUser]:
    """Return the processes that have a function's group open."""
    users = inventory.facts.users
    return (users or {}).get(function.iommu_group, ()) if isinstance(function.iommu_group, int) else ()


def _native_driver(address: str, driver: str, fix: str) -> Reason:
    """The function serves the host and containers."""
    message, seen = f"is bound to {driver}, so it serves the host and containers", (driver_link(address, driver),)
    if driver == NOUVEAU:  # of NVIDIA's GPUs it is of no use to containers, and its unbind can hang
        message = "is bound to nouveau, whose unbind can hang where the GPU shows a console"
        fix = f"blacklist nouveau, and reboot: gpuvirt doctor prints the commands; then {fix}"
    return Reason(ReasonCode.NATIVE_DRIVER, address, message, seen, fix)


def _gpu_without_vgpus(
    address: str, attribute: str, types: Sequence[str], creatable: str | None, whole: str, *, has_mig: bool
) -> Reason:
    """The GPU's driver could create vGPUs. `creatable`: a type that it can create now, None if it lists none.

    `whole`: how the GPU is passed through whole.
    """
    if creatable is not None:
        fix = (
            f"gpuvirt vgpu create {address} {creatable}, or another creatable type; with an agent, for all GPUs of the"
            f" node and in place of their unused vGPUs: kubectl label --overwrite node NODE"
            f" nvidia.com/vgpu.config={creatable}"
        )
    elif has_mig:  # in MIG mode the driver lists a type only where a GPU instance of its size is free
        fix = (
            f"if nvidia-smi shows MIG mode, it has no GPU instance: gpuvirt vgpu create {address} TYPE, where TYPE"
            " is a MIG-backed type of gpuvirt vgpu types, makes one; else end the processes that occupy the GPU"
        )
    else:
        fix = "no type can be created now: end the processes that occupy the GPU's capacity (nvidia-smi)"
    seen = Seen(sysfs.device_path(PciAddress(address), attribute), ", ".join(types) or "no creatable type")
    fix += f"; or pass it through whole: {whole}"
    return no_vgpus(address, "could carry vGPUs, but has none", seen, fix=fix)


class ResourceKind(StrEnum):
    """The kind of a resource's devices."""

    WHOLE = "whole"
    VGPU = "vgpu"


class Selectors(msgspec.Struct, frozen=True):
    """The selectors of a resource, sorted and without duplicates."""

    kind: ResourceKind = ResourceKind.WHOLE
    pci: tuple[str, ...] = ()
    """`10DE:2236`"""
    mdev: tuple[str, ...] = ()
    """`NVIDIA A10-24Q`, the host's name of the type."""


def selectors_of(inventory: Inventory, devices: Iterable[Candidate]) -> Selectors:
    """Return the selectors of the devices of one resource; devices that the host no longer has have none."""
    pci, mdev, kind = set[str](), set[str](), ResourceKind.WHOLE
    for device in devices:
        target = device.target
        if target.vgpu is not None:
            kind = ResourceKind.VGPU
        if target.vgpu is not None and is_mdev_uuid(target.vgpu):
            mdev |= {str(target.type)} if target.type is not None else set()
            continue
        function = inventory.facts.functions.get(PciAddress(target.vgpu) if target.vgpu is not None else target.gpu)
        if function is not None:
            pci.add(str(function.id).upper())
    return Selectors(kind, tuple(sorted(pci)), tuple(sorted(mdev)))


def normal(selector: str) -> str:
    """Return a selector as KubeVirt compares it."""
    return selector.lower() if is_pci_id(selector) else selector.replace(" ", "_").strip()


def spellings(selector: str) -> Iterator[str]:
    """Yield all spellings that KubeVirt treats as the same selector, the given one first."""
    if not is_pci_id(selector):
        yield from dict.fromkeys((selector, selector.replace(" ", "_")))
        return
    letters = [dict.fromkeys((letter, letter.lower(), letter.upper())) for letter in selector]
    yield from ("".join(spelling) for spelling in product(*letters))

"""The GPUs and vGPUs of a node, with their slots, IOMMU groups and isolation units, and malformed entries of sysfs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId, slot_of
from gpuvirt.facts.pci import FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework, LiveVgpu, UnnamedType, VgpuHost
from gpuvirt.model.inventory.isolation import UnitId, groups_of, units_of
from gpuvirt.model.inventory.naming import NO_NAMES, TypeNames
from gpuvirt.model.reasons import Reason, notoffered, refusals

VITAL = frozenset({"vendor", "device", "class", "driver", "iommu_group"})
"""Attributes of a function that keep its device from being offered when they can't be read."""


class Mode(StrEnum):
    """The use of a GPU that its present driver allows."""

    PASSTHROUGH = "passthrough"
    """By one VM, whole: the GPU is bound to a VFIO driver."""
    VGPU = "vgpu"
    """By VMs, as vGPUs: the GPU is bound to a driver that creates vGPUs."""
    CONTAINER = "container"
    """By containers and the host: the GPU is bound to a native driver."""
    SHARED = "shared"
    """By pods, in units: the GPU is bound to its native driver, and mode `shared` is desired."""
    UNBOUND = "unbound"
    """None: the GPU has no driver, or one that only reserves it."""
    UNKNOWN = "unknown"
    """The driver could not be read."""


class Gpu(msgspec.Struct, frozen=True):
    """One physical GPU."""

    function: PciFunction
    mode: Mode
    unit: UnitId
    siblings: tuple[PciAddress, ...] = ()
    """The other functions of its slot: audio, USB."""
    vgpu_host: VgpuHost | None = None


class Vgpu(msgspec.Struct, frozen=True):
    """One vGPU, with the GPU that carries it."""

    live: LiveVgpu
    gpu: PciAddress
    framework: Framework


class Inventory(msgspec.Struct, frozen=True):
    """The inventory that follows from the facts of one observation."""

    facts: Facts
    gpus: Mapping[PciAddress, Gpu]
    vgpus: Mapping[VgpuId, Vgpu]
    slots: Mapping[str, Sequence[PciAddress]]
    """The physical functions of each slot."""
    groups: Mapping[IommuGroup, tuple[PciAddress, ...]]
    units: Mapping[UnitId, tuple[PciAddress, ...]]

    @property
    def has_nvswitches(self) -> bool:
        """Whether NVSwitches join the host's GPUs: a native driver that probes a single GPU can hang."""
        return any(function.kind is FunctionKind.NVSWITCH for function in self.facts.functions.values())

    def matters(self, function: PciFunction) -> bool:
        """Return whether a function is a GPU, a sibling function of one, or an NVSwitch."""
        if function.kind in {FunctionKind.GPU, FunctionKind.NVSWITCH}:
            return True
        if function.kind in {FunctionKind.OTHER, FunctionKind.BRIDGE}:
            return False
        return any(address in self.gpus for address in self.slots.get(slot_of(function.address), ()))


def build_inventory(facts: Facts, type_names: TypeNames = NO_NAMES) -> Inventory:
    """Return the inventory of the facts.

    `type_names` has the names of vGPU types that were learned earlier: a host without room for more vGPUs no longer
    names the types of those that it carries. The names of another version of the driver are not used.
    """
    type_names = type_names.of(facts)
    units = units_of(facts.functions)
    unit_of = {address: unit for unit, members in units.items() for address in members}
    slots: defaultdict[str, list[PciAddress]] = defaultdict(list)
    for address, function in facts.functions.items():
        if function.physfn is None:
            slots[slot_of(address)].append(address)
    gpus = {
        address: Gpu(
            function=function,
            mode=mode_of(function, facts.vgpu_hosts.get(address)),
            unit=unit_of[address],
            siblings=tuple(other for other in sorted(slots[slot_of(address)]) if other != address),
            vgpu_host=facts.vgpu_hosts.get(address),
        )
        for address, function in sorted(facts.functions.items())
        if function.kind is FunctionKind.GPU and function.physfn is None
    }
    vgpus = {
        live.id: Vgpu(type_names.named(gpu, live), gpu, host.framework)
        for gpu, host in sorted(facts.vgpu_hosts.items())
        for live in host.live
    }
    return Inventory(facts, gpus, vgpus, slots, groups_of(facts.functions.values()), units)


def unnamed_types(inventory: Inventory) -> Mapping[PciAddress, UnnamedType]:
    """Return one vGPU type without a name of each GPU that carries such types."""
    types = ((vgpu.gpu, vgpu.live.type) for vgpu in inventory.vgpus.values())
    return {gpu: type_ for gpu, type_ in types if isinstance(type_, UnnamedType)}


def mode_of(function: PciFunction, vgpu_host: VgpuHost | None) -> Mode:
    """Return the mode of a function with its present driver."""
    if isinstance(function.driver, Unread):
        return Mode.UNKNOWN
    if function.on_vfio:
        return Mode.PASSTHROUGH
    if vgpu_host is not None:
        return Mode.VGPU
    return Mode.UNBOUND if function.is_idle else Mode.CONTAINER


def malformed_entries(facts: Facts) -> Iterator[Reason]:
    """Yield a reason for each entry that is malformed or could not be read, and that concerns no device."""
    for malformed in facts.malformed_entries:
        yield notoffered.malformed(malformed.path, malformed.what)
    for unread in _odd_attributes(facts):
        yield notoffered.malformed(unread.path, f"can't be understood: {unread.detail}; gpuvirt ignores it")
    for unread in facts.unread:
        yield refusals.unread(unread.path, unread, "its last known state is kept")


def _odd_attributes(facts: Facts) -> Iterator[Unread]:
    """Yield attributes with an invalid value that keep no device from being offered: a NUMA node, a revision."""
    for function in facts.functions.values():
        for unread in function.unread:
            if unread.seen is not None and unread.path.rpartition("/")[2] not in VITAL:
                yield unread

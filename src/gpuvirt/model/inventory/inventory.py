"""The GPUs of a node and their vGPUs, with what belongs together."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId, VgpuType, slot_of
from gpuvirt.facts.pci import FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.model.inventory.isolation import UnitId, groups_of, units_of


class Mode(StrEnum):
    """How a GPU can be used as it stands."""

    PASSTHROUGH = "passthrough"
    """Whole, by a virtual machine: a VFIO driver has it."""
    VGPU = "vgpu"
    """In parts, by virtual machines: NVIDIA's vGPU manager or its like has it."""
    CONTAINER = "container"
    """By containers and the host: a native driver has it."""
    UNBOUND = "unbound"
    """By nobody: no driver has it."""
    UNKNOWN = "unknown"
    """It could not be read which driver has it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU."""

    function: PciFunction
    mode: Mode
    unit: UnitId
    siblings: tuple[PciAddress, ...] = ()
    """The other functions of its slot: audio, USB."""
    vgpu_host: VgpuHost | None = None


@dataclass(frozen=True, slots=True)
class Vgpu:
    """One vGPU that exists, with the GPU that carries it."""

    live: LiveVgpu
    gpu: PciAddress
    framework: Framework


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one look at a host means."""

    facts: Facts
    gpus: Mapping[PciAddress, Gpu]
    vgpus: Mapping[VgpuId, Vgpu]
    slots: Mapping[str, Sequence[PciAddress]]
    """The physical functions of each slot."""
    groups: Mapping[IommuGroup, tuple[PciAddress, ...]]
    units: Mapping[UnitId, tuple[PciAddress, ...]]

    def matters(self, function: PciFunction) -> bool:
        """Return whether a function is a GPU, of a GPU's card, or an NVSwitch; a chipset's audio is not."""
        if function.kind in {FunctionKind.GPU, FunctionKind.NVSWITCH}:
            return True
        if function.kind in {FunctionKind.OTHER, FunctionKind.BRIDGE}:
            return False
        return any(address in self.gpus for address in self.slots.get(slot_of(function.address), ()))


def build_inventory(facts: Facts, type_names: Mapping[str, VgpuType] | None = None) -> Inventory:
    """Return the GPUs and vGPUs that the facts show.

    `type_names` are those of vGPU types as they were known before, by the host's ids: a host without room for more
    vGPUs no longer names the types that it carries.
    """
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
        live.id: Vgpu(_named(live, type_names or {}), gpu, host.framework)
        for gpu, host in sorted(facts.vgpu_hosts.items())
        for live in host.live
    }
    return Inventory(facts, gpus, vgpus, slots, groups_of(facts.functions.values()), units)


def _named(live: LiveVgpu, type_names: Mapping[str, VgpuType]) -> LiveVgpu:
    known = type_names.get(live.type_id) if live.type_id is not None and isinstance(live.type, Unread) else None
    return live if known is None else replace(live, type=known)


def mode_of(function: PciFunction, vgpu_host: VgpuHost | None) -> Mode:
    """Return how a function can be used as it stands."""
    if isinstance(function.driver, Unread):
        return Mode.UNKNOWN
    if function.on_vfio:
        return Mode.PASSTHROUGH
    if vgpu_host is not None:
        return Mode.VGPU
    return Mode.UNBOUND if function.driver is None else Mode.CONTAINER

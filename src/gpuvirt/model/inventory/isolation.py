"""What can't be told apart: functions that must be decided on together, and who spoils an IOMMU group for VFIO."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NewType

from gpuvirt.facts.ids import IommuGroup, PciAddress, slot_of
from gpuvirt.facts.pci import FunctionKind, PciFunction

UnitId = NewType("UnitId", str)
"""The lowest address among a unit's functions."""


Slots = tuple[str, ...]
"""PCI slots, in the order of their addresses."""


def slots_of(functions: Mapping[PciAddress, PciFunction], members: Iterable[PciAddress]) -> Slots:
    """Return the slots of members of a unit; the slot of a VF is that of its PF."""
    found = {one: functions.get(one) for one in members}
    return tuple(sorted({slot_of(one if known is None else known.physfn or one) for one, known in found.items()}))


def groups_of(functions: Iterable[PciFunction]) -> Mapping[IommuGroup, tuple[PciAddress, ...]]:
    """Return the members of each IOMMU group, in the order of their addresses."""
    found: defaultdict[IommuGroup, list[PciAddress]] = defaultdict(list)
    for function in functions:
        if isinstance(function.iommu_group, int):
            found[function.iommu_group].append(function.address)
    return {group: tuple(sorted(members)) for group, members in found.items()}


def units_of(functions: Mapping[PciAddress, PciFunction]) -> Mapping[UnitId, tuple[PciAddress, ...]]:
    """Return the functions by unit: the connected components over slot, IOMMU group, and PF with its VFs.

    Bridges tie nothing together: a root port is in the group of what lies below it only where ACS is off.
    """
    parents = {address: address for address, function in functions.items() if function.kind is not FunctionKind.BRIDGE}

    def head(address: PciAddress) -> PciAddress:
        while parents[address] != address:
            parents[address] = parents[parents[address]]
            address = parents[address]
        return address

    first_with: dict[str | IommuGroup | PciAddress, PciAddress] = {}
    for address in parents:
        function = functions[address]
        ties: list[str | IommuGroup | PciAddress] = [slot_of(function.physfn or address)]
        if isinstance(function.iommu_group, int):
            ties.append(function.iommu_group)
        for tie in ties:
            one, other = head(first_with.setdefault(tie, address)), head(address)
            parents[max(one, other)] = min(one, other)
    units: defaultdict[UnitId, list[PciAddress]] = defaultdict(list)
    for address in sorted(parents):
        units[UnitId(head(address))].append(address)
    return {unit: tuple(members) for unit, members in units.items()}


def spoilers(functions: Mapping[PciAddress, PciFunction], members: Iterable[PciAddress]) -> tuple[PciFunction, ...]:
    """Return the members for whose sake the kernel lets nobody open a group's devices.

    A member with a driver that does its own DMA makes the group not viable (kernel 6.1: VFIO_GROUP_GET_STATUS gives
    flags 0). Bridges, members without a driver and those of VFIO, pci-stub and pcieport don't.
    """
    found = (functions[address] for address in members if address in functions)
    return tuple(function for function in found if function.spoils_group and function.kind is not FunctionKind.BRIDGE)

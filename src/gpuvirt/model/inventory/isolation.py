"""Isolation units, IOMMU groups, and the functions whose drivers keep an IOMMU group from VFIO."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NewType

from gpuvirt.facts.ids import IommuGroup, PciAddress, slot_of
from gpuvirt.facts.pci import FunctionKind, PciFunction

UnitId = NewType("UnitId", str)
"""The id of an isolation unit: the lowest address of its functions."""


Slots = tuple[str, ...]
"""PCI slots, in the order of their addresses."""


def slots_of(functions: Mapping[PciAddress, PciFunction], members: Iterable[PciAddress]) -> Slots:
    """Return the slots of members of a unit. A VF belongs to the slot of its PF."""
    found = {address: functions.get(address) for address in members}
    return tuple(sorted({slot_of((function and function.physfn) or address) for address, function in found.items()}))


def groups_of(functions: Iterable[PciFunction]) -> Mapping[IommuGroup, tuple[PciAddress, ...]]:
    """Return the members of each IOMMU group, in the order of their addresses."""
    found: defaultdict[IommuGroup, list[PciAddress]] = defaultdict(list)
    for function in functions:
        if isinstance(function.iommu_group, int):
            found[function.iommu_group].append(function.address)
    return {group: tuple(sorted(members)) for group, members in found.items()}


def units_of(functions: Mapping[PciAddress, PciFunction]) -> Mapping[UnitId, tuple[PciAddress, ...]]:
    """Return the functions by unit: the connected components over slot, IOMMU group, and PF with its VFs.

    Bridges do not connect functions: a root port is in the group of the devices below it only if ACS is off.
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
            first, second = head(first_with.setdefault(tie, address)), head(address)
            parents[max(first, second)] = min(first, second)
    units: defaultdict[UnitId, list[PciAddress]] = defaultdict(list)
    for address in sorted(parents):
        units[UnitId(head(address))].append(address)
    return {unit: tuple(members) for unit, members in units.items()}


def group_blockers(
    functions: Mapping[PciAddress, PciFunction], members: Iterable[PciAddress]
) -> tuple[PciFunction, ...]:
    """Return the members because of which the kernel opens none of a group's devices.

    A member whose driver does its own DMA makes the group not viable (kernel 6.1: VFIO_GROUP_GET_STATUS returns flags
    0). Bridges, members without a driver, and members on VFIO, pci-stub and pcieport do not.
    """
    found = (functions[address] for address in members if address in functions)
    return tuple(function for function in found if function.spoils_group and function.kind is not FunctionKind.BRIDGE)

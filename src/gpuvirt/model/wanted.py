"""What is wanted of each GPU of a node, by the settings, and where that is not so yet."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.model.driverjournal import DriverJournal
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.isolation import UnitId
from gpuvirt.model.plan import Wish, Wishes


class WantedMode(StrEnum):
    """What an admin may want of a GPU."""

    UNMANAGED = "unmanaged"
    """Whatever it is; nothing is done to it."""
    PASSTHROUGH = "passthrough"
    """Whole, for virtual machines."""
    CONTAINER = "container"
    """With its native driver, for containers and the host."""
    VGPU = "vgpu"
    """With the driver that makes vGPUs of it; those that exist are offered."""


@dataclass(frozen=True, slots=True)
class Modes:
    """What is wanted of the GPUs of a node."""

    default: WantedMode = WantedMode.UNMANAGED
    by_gpu: Mapping[str, WantedMode] = field(default_factory=dict)
    """What is wanted of single GPUs instead."""

    def of(self, gpu: str) -> WantedMode:
        """Return what is wanted of a GPU."""
        return self.by_gpu.get(gpu, self.default)

    @property
    def are_at_odds(self) -> bool:
        """Whether some need what others can't be beside: the kernel module nvidia.ko, each from another driver."""
        return {WantedMode.CONTAINER, WantedMode.VGPU} <= {self.default, *self.by_gpu.values()}


_WISHES: Mapping[str, Wish] = {
    WantedMode.PASSTHROUGH: Wish.PASSTHROUGH,
    WantedMode.CONTAINER: Wish.NATIVE,
    WantedMode.VGPU: Wish.NATIVE,
}


def wish_of(mode: str) -> Wish | None:
    """Return which driver a mode needs, None for a mode that leaves a GPU alone."""
    return _WISHES.get(mode)


def wishes_of(modes: Modes, gpus: Iterable[PciAddress]) -> Wishes:
    """Return what is wished of each GPU; no wish means leave alone."""
    wanted = {gpu: modes.of(gpu) for gpu in gpus}
    return {gpu: _WISHES[mode] for gpu, mode in wanted.items() if mode in _WISHES}


def unmet(inventory: Inventory, wishes: Wishes, journal: DriverJournal) -> Mapping[UnitId, Wishes]:
    """Return the units in which a GPU is not as it is wished, each with all wishes for it.

    It is cheap, and tells whether a plan is worth making: a function of a slot is on the wrong side, or a change of it
    was started and has not ended.
    """
    units = {
        inventory.gpus[gpu].unit
        for gpu, wish in wishes.items()
        if any(_is_elsewhere(inventory, one, wish, journal) for one in (gpu, *inventory.gpus[gpu].companions))
    }
    return {unit: {gpu: wish for gpu, wish in wishes.items() if inventory.gpus[gpu].unit == unit} for unit in units}


def interrupted(inventory: Inventory, wishes: Wishes, journal: DriverJournal) -> Wishes:
    """Return where GPUs go that a change which was killed has left half done, and of which nothing is wished.

    Whatever needs the fewest steps: a GPU that a VFIO driver has keeps it, one that had no driver gets the one that it
    was to get, any other goes back to its native driver.
    """
    found: dict[PciAddress, Wish] = {}
    for address, gpu in inventory.gpus.items():
        changes = [journal.changes[one] for one in (address, *gpu.companions) if one in journal.changes]
        if address in wishes or not changes:
            continue
        had_none = gpu.function.driver is None and all(one.to_vfio and one.driver is None for one in changes)
        found[address] = Wish.PASSTHROUGH if gpu.function.on_vfio or had_none else Wish.NATIVE
    return found


def withdrawn(inventory: Inventory, wishes: Wishes) -> frozenset[PciAddress]:
    """Return the functions that are offered no more, since their GPU is to go back to the host."""
    return frozenset(
        one for gpu, wish in wishes.items() if wish is Wish.NATIVE for one in (gpu, *inventory.gpus[gpu].companions)
    )


def _is_elsewhere(inventory: Inventory, address: PciAddress, wish: Wish, journal: DriverJournal) -> bool:
    function = inventory.facts.functions[address]
    if function.kind is FunctionKind.BRIDGE:
        return False
    if address in journal.changes:
        return True
    if wish is Wish.PASSTHROUGH:
        return not function.on_vfio
    if address in inventory.gpus and function.is_idle:
        return True
    return function.on_vfio or address in journal.overrides or (function.driver is None and address in journal.drivers)

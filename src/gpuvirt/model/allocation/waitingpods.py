"""Pods from before a reboot that wait until their whole GPU is bound for VMs again.

The agent binds it, which takes nothing from them. No container of theirs has it: gpuvirt gave it by its VFIO nodes, and
PreStartContainer refuses each start while it is on another driver (`containerstarts`).
"""

from collections.abc import Iterable

from msgspec import UNSET

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.inventory.inventory import Inventory


def had(entries: Iterable[Entry], inventory: Inventory | None) -> tuple[Entry, ...]:
    """Return the allocations of pods that do not wait: a change may take none of these devices."""
    return tuple(entry for entry in entries if not _waits(entry, inventory))


def waiting(entries: Iterable[Entry], inventory: Inventory | None) -> frozenset[tuple[ResourceName, DeviceId]]:
    """Return the devices of the pods that wait, as the kubelet names them."""
    return frozenset((entry.resource, entry.device) for entry in entries if _waits(entry, inventory))


def _waits(entry: Entry, inventory: Inventory | None) -> bool:
    """Return whether the pod of an allocation waits for its GPU.

    An allocation without a time may be that of another plugin, whose containers use native drivers.
    """
    was_rebooted = entry.answered_group is not UNSET
    if inventory is None or entry.target.vgpu is not None or entry.allocated_s is None or not was_rebooted:
        return False
    function = inventory.facts.functions.get(entry.target.gpu)
    return function is not None and not isinstance(function.driver, Unread) and not function.on_vfio

"""Claims GPUs for shares: behind the same gate as devices, so that no change of a GPU can miss a share.

Allocate knows only units, which name no GPU, so it claims none. PreStartContainer chooses the GPUs, claims them, and
records them before it answers. Until then the units are in the kubelet's record, where no change can map them to a GPU,
and a GPU that a change has is no choice.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from gpuvirt.agent.change.allocationgate import AllocationGate
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.known.state import NodeState
from gpuvirt.facts.ids import DeviceId, PciAddress, slot_of
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions.modules import driver_of
from gpuvirt.model.allocation.tenancy import TenantKind
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.resets import Reset, reset_of
from gpuvirt.model.offers.sharing import addresses_of
from gpuvirt.model.reasons import Reason, notoffered, refusals, sharing
from gpuvirt.model.shares.placement import GpuId


class GpuClaims(Protocol):
    """Claims GPUs for shares."""

    def why_closed(self, gpu: GpuId) -> Reason | None:
        """Return why a GPU can't be claimed now, None if it may be."""
        ...

    def claim(self, gpus: Collection[GpuId], unit: DeviceId, record: Callable[[], None]) -> None:
        """Call `record` while no change can begin, or raise RefusedError because a change has one of these GPUs.

        `unit` is an id that the kubelet's accounts show: changes by other processes wait until they do.
        """
        ...


class GatedGpus:
    """The GPUs of one host, each behind the gate of its slot."""

    def __init__(self, state: NodeState, gate: AllocationGate, kernel: Kernel) -> None:
        self._state = state
        self._gate = gate
        self._kernel = kernel

    def why_closed(self, gpu: GpuId) -> Reason | None:
        """Return why a GPU can't be claimed now: the driver does not show it, or a change of this process has it."""
        found = self._address_of(gpu)
        if isinstance(found, Reason):
            return found
        _, address = found
        return refusals.changing(address, None) if self._state.changes.closed.covers(Target(address)) else None

    def claim(self, gpus: Collection[GpuId], unit: DeviceId, record: Callable[[], None]) -> None:
        """Claim GPUs; raise RefusedError."""
        addresses: list[PciAddress] = []
        slots: dict[str, list[DeviceId]] = {}
        for gpu in sorted(gpus):
            found = self._address_of(gpu)
            if isinstance(found, Reason):
                raise RefusedError(found)
            inventory, address = found
            function = inventory.facts.functions[address]
            addresses.append(address)
            slots[slot_of(function.physfn or address)] = [unit]

        def verify_and_record() -> None:
            for address in addresses:
                self._verify_driver(address)
            self._record_tenants(addresses)
            record()

        targets = [(str(address), Target(address)) for address in addresses]
        self._gate.allocate(", ".join(addresses), slots, targets, verify_and_record)

    def _record_tenants(self, addresses: Sequence[PciAddress]) -> None:
        """Record that containers have these GPUs; raise RefusedError if they would get a VM's memory."""
        state = self._state
        functions = state.inventory.facts.functions if state.inventory is not None else {}
        for address in addresses:
            if (unreset := state.former.why_withheld(functions, address, TenantKind.NATIVE)) is not None:
                raise RefusedError(unreset)
        on_disk = state.terms.settings.require_reset and any(
            reset_of(functions, address) is not Reset.POSSIBLE for address in addresses
        )
        tenants = dict.fromkeys(addresses, TenantKind.NATIVE)
        if (reason := state.tenancies.give(tenants, on_disk=on_disk)) is not None:
            raise RefusedError(reason)

    def _address_of(self, gpu: GpuId) -> tuple[Inventory, PciAddress] | Reason:
        inventory = self._state.inventory
        address = addresses_of(inventory).get(gpu) if inventory is not None else None
        unknown = sharing.not_initialized(gpu, "folder in /proc", "not there", "*")
        return unknown if inventory is None or address is None else (inventory, address)

    def _verify_driver(self, address: PciAddress) -> None:
        """Raise RefusedError unless a GPU is on NVIDIA's driver now; the last scan of the host is a moment old."""
        driver = driver_of(self._kernel, address)
        if isinstance(driver, Unread):
            raise RefusedError(refusals.unread(address, driver, "no container gets a share of it"))
        if driver != NVIDIA_DRIVER:
            raise RefusedError(notoffered.withdrawn(address, unshared=f"is bound to {driver or 'no driver'}"))


NVIDIA_DRIVER = "nvidia"
"""The driver of the GPUs that can be shared."""

"""The GPUs that other device plugins offer or have given: a GPU is given by one front end.

The kubelet has the devices of all plugins in its accounts. The ids of gpuvirt's own units name no GPU, and don't count.
"""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.allocation.podallocations import Allocation, map_allocations, vendor_of
from gpuvirt.model.desired.settings import CONTAINER_RESOURCES
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals
from gpuvirt.model.reasons.sharing import LEAVE_IT

Device = tuple[ResourceName, DeviceId]


class OtherPlugins(msgspec.Struct, frozen=True):
    """The devices of all resources but the units."""

    registered: frozenset[Device] = frozenset()
    """The devices that the kubelet can give to pods."""
    allocated: Mapping[Device, str] = msgspec.field(default_factory=dict)
    """The pods that have devices, as text."""
    without_devices: frozenset[ResourceName] = frozenset()
    """The resources of NVIDIA's device plugin of which the kubelet has no device now."""


def other_plugins(account: KubeletAccount | None, units: ResourceName) -> OtherPlugins | Unknown:
    """Return the devices of other resources than `units`; unknown where the kubelet's accounts are incomplete."""
    if account is None or not account.recorded or account.partial is not None:
        return Unknown(account.partial if account is not None else None)
    if isinstance(account.counted, Unread):
        return Unknown(refusals.allocations_unknown("the kubelet", Seen(account.counted.path, account.counted.detail)))
    recorded = {
        (resource, device)
        for resource, devices in account.registered.items()
        for device in devices
        if resource != units
    }
    counted = {key for key in account.counted if key[0] != units}
    named = {resource for resource, _ in counted}
    return OtherPlugins(
        frozenset(recorded | counted),
        {key: consumer.text for key, consumer in account.devices.items() if key[0] != units},
        frozenset(
            resource
            for resource, devices in account.registered.items()
            if not devices and resource not in named and resource.startswith(CONTAINER_RESOURCES)
        ),
    )


def why_given_elsewhere(inventory: Inventory, plugins: OtherPlugins) -> Mapping[PciAddress, Reason]:
    """Return the GPUs of NVIDIA that another device plugin offers or has given, or may offer, each with the reason."""
    reasons: dict[PciAddress, Reason] = {}
    nvidias = [address for address, gpu in inventory.gpus.items() if gpu.function.id.vendor == NVIDIA]
    for address, reason in _reasons(inventory, plugins, nvidias):
        reasons.setdefault(address, reason)
    return reasons


def _reasons(
    inventory: Inventory, plugins: OtherPlugins, nvidias: list[PciAddress]
) -> Iterator[tuple[PciAddress, Reason]]:
    """Yield the reasons, those that are certain first."""
    uncertain: list[Allocation] = []
    elsewhere = registered_elsewhere
    registered = [Allocation(resource, device, "") for resource, device in sorted(plugins.registered)]
    allocated = [Allocation(*key, pod) for key, pod in sorted(plugins.allocated.items())]
    for allocation in (*registered, *allocated):
        mapped = map_allocations(inventory, (allocation,))
        for address in mapped.by_gpu(inventory):
            yield address, elsewhere(address, allocation.resource, allocation.device, pod=allocation.pod)
        uncertain += mapped.unmapped
    for allocation in uncertain:
        for address in nvidias if vendor_of(allocation) == NVIDIA else ():
            yield address, elsewhere(address, allocation.resource, allocation.device, is_certain=False)
    for resource in sorted(plugins.without_devices):
        for address in nvidias:
            yield address, elsewhere(address, resource, None)


def registered_elsewhere(
    address: str, resource: str, device: str | None, *, pod: str = "", is_certain: bool = True
) -> Reason:
    """The kubelet could give the whole GPU to one pod, and units of it to others.

    `pod` has the GPU from the other device plugin. `is_certain`: the plugin's id of its device names this GPU. Without
    a device: the plugin lists none now, as one that restarts.
    """
    message = f"is offered as {resource} by another device plugin, so gpuvirt offers no units of it"
    fix = LEAVE_IT
    if pod:
        message = f"is allocated to {pod} as {resource} of another device plugin"
        fix = "no action needed: its units are offered when the pod has ended"
    elif device is None:
        message = (
            f"may be offered as {resource} again: another device plugin has registered it, and lists no device now"
        )
        fix = f"no action needed if that plugin was removed: the kubelet forgets it after 5 minutes; else {LEAVE_IT}"
    elif not is_certain:
        message = (
            f"may be a GPU that another device plugin offers as {resource}: the device's id names no GPU of this host"
        )
    seen = (Seen("the kubelet's devices", f"{resource}: {device or 'none'}"),)
    return Reason(ReasonCode.REGISTERED_ELSEWHERE, address, message, seen, fix)

"""Whether a container may start with the devices that the kubelet has recorded for it, or the reason against it.

The ids name the devices themselves. Those of on-demand vGPUs do not, and have their own check (`ondemandstarts`).
"""

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId, is_mdev_uuid
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.ondemandids import vgpus_in
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.allocation.recordednodes import foreign_nodes, own_nodes
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, notoffered
from gpuvirt.model.reasons.notoffered import CHECKPOINT
from gpuvirt.model.reasons.reason import driver_link
from gpuvirt.model.reasons.refusals import allocations_unknown


def why_no_start(
    inventory: Inventory,
    entries: Iterable[Entry],
    recorded: Recorded | Unknown,
    resource: ResourceName,
    devices: Sequence[DeviceId],
) -> Reason | None:
    """Return why no container may start with devices: it would get nodes of others, or that is unknown.

    Which of a pod's containers starts is unknown, so that the answers of all of them count.
    """
    for device in devices:
        answers, is_new = _answers(recorded, resource, device), _is_of_this_boot(entries, resource, device)
        if not is_new and (awaited := _why_awaited(inventory, device)) is not None:
            return awaited
        for answer in answers:
            if device in vgpus_in(answer) and (foreign := foreign_nodes(inventory, answer)):
                return nodes_changed(device, device, foreign, own_nodes(inventory, [device]))
        if not answers and not is_new:
            return allocations_unknown(
                device,
                Seen(CHECKPOINT, _why_unknown(recorded)),
                message="can't be used by its container: the recorded device nodes are unknown, and the container may"
                " be from before this boot",
            )
    return None


def _why_awaited(inventory: Inventory, device: DeviceId) -> Reason | None:
    """Return that a device of an earlier boot has not been made or bound again, None where it is there or unknown."""
    function = inventory.facts.functions.get(PciAddress(device))
    if VgpuId(device) in inventory.vgpus:
        return None
    if is_mdev_uuid(device) or (function is not None and function.is_nvidias_vf):
        return notoffered.awaited(device)
    if function is None or isinstance(function.driver, Unread) or function.on_vfio:
        return None
    return notoffered.awaited(device, driver_link(device, function.driver), is_vgpu=False)


def _answers(recorded: Recorded | Unknown, resource: ResourceName, device: DeviceId) -> Sequence[PluginAnswer]:
    """Return the answers that the kubelet has recorded for a device; a record that lacks other pods may have them."""
    listed = recorded.listed if isinstance(recorded, Unknown) else recorded
    consumers = listed.get((resource, device), frozenset())
    return [consumer.answer for consumer in consumers if isinstance(consumer.answer, PluginAnswer)]


def _is_of_this_boot(entries: Iterable[Entry], resource: ResourceName, device: DeviceId) -> bool:
    """Return whether gpuvirt has allocated a device since the host has booted, so that its answer is right.

    An entry that was made from the kubelet's accounts has no time, and may be of a pod from before a reboot.
    """
    entry = next((entry for entry in entries if (entry.resource, entry.device) == (resource, device)), None)
    if entry is None or entry.allocated_s is None:
        return False
    return entry.answered_group is UNSET and not entry.earlier_boot


def _why_unknown(recorded: Recorded | Unknown) -> str:
    if not isinstance(recorded, Unknown):
        return "does not have the device"
    return recorded.reason.text if recorded.reason is not None else "could not be read"


def nodes_changed(device: str, target: str, recorded: Sequence[str], own: Sequence[str]) -> Reason:
    """The kernel chooses the numbers of groups and of VFIO devices, and a device gets others after a reboot."""
    message = (
        f"can't be used by its container: the device nodes in the kubelet's record are not those of {target}, and may"
        " be another pod's"
    )
    seen = (Seen(CHECKPOINT, ", ".join(recorded)), Seen(f"nodes of {target}", ", ".join(own) or "none"))
    fix = "delete the pod, so that a new one gets a device with its nodes; a Deployment or a Job creates it again"
    return Reason(ReasonCode.NODES_CHANGED, device, message, seen, fix)

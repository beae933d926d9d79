"""Whether a container may start with the devices that the kubelet has recorded for it, or the reason against it.

The ids name the devices themselves. Those of on-demand vGPUs do not, and have their own check (`ondemandstarts`).
"""

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId, is_mdev_uuid
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.allocation.attachment import CONTAINER, VFIO_FOLDER
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.ondemandids import vgpus_in
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, notoffered
from gpuvirt.model.reasons.notoffered import CHECKPOINT
from gpuvirt.model.reasons.reason import driver_link
from gpuvirt.model.reasons.refusals import allocations_unknown
from gpuvirt.paths import HostPath


# The agent binds it, which takes nothing from them. No container of theirs has it: gpuvirt gave it by its VFIO nodes,
# and PreStartContainer refuses each start while it is on another driver (`containerstarts`).
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


# The kubelet starts a container again with the answer of before a reboot, without a call of Allocate. The kernel
# numbers IOMMU groups, VFIO devices and regions of EGM in the order in which they come, so a recorded node may be that
# of another pod's device.
_NUMBERED = (f"{VFIO_FOLDER}/", "/dev/egm")


def foreign_nodes(inventory: Inventory, answer: PluginAnswer) -> tuple[HostPath, ...]:
    """Return the paths of an answer's nodes that belong to none of the devices that the answer names.

    A device has the nodes of its group and of the functions in it. A device whose group is unknown has none, so that
    its recorded nodes are foreign. The folder of all groups, which a setting gives, is no node.
    """
    own = {CONTAINER, *own_nodes(inventory, vgpus_in(answer))}
    recorded = (node.path for node in answer.nodes if node.path.startswith(_NUMBERED))
    return tuple(sorted(path for path in recorded if path not in own))


def own_nodes(inventory: Inventory, devices: Iterable[DeviceId]) -> tuple[HostPath, ...]:
    """Return the paths of the nodes that are those of vGPUs and whole functions alone."""
    devices = tuple(devices)
    groups = {group for device in devices if (group := _group_of(inventory, device)) is not None}
    egm = (region.node for region in inventory.facts.platform.egm if region.gpus <= set(devices))
    return tuple(dict.fromkeys((*(path for group in sorted(groups) for path in _nodes_of(inventory, group)), *egm)))


def _group_of(inventory: Inventory, device: DeviceId) -> IommuGroup | None:
    """Return the group of a vGPU or a whole function."""
    vgpu, function = inventory.vgpus.get(VgpuId(device)), inventory.facts.functions.get(PciAddress(device))
    if vgpu is not None:
        group = vgpu.live.group
    elif function is not None and not function.is_nvidias_vf:
        group = function.iommu_group
    else:
        return None
    return group if isinstance(group, int) else None  # unknown: no node counts as the device's


def _nodes_of(inventory: Inventory, group: IommuGroup) -> tuple[HostPath, ...]:
    functions = (inventory.facts.functions[address] for address in inventory.groups.get(group, ()))
    cdevs = (HostPath(f"{VFIO_FOLDER}/devices/{name}") for function in functions for name in function.cdevs)
    return HostPath(f"{VFIO_FOLDER}/{group}"), *cdevs


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

"""Whether a container may start with on-demand vGPUs, and whose they are from then on.

The kubelet's ids of such vGPUs name no device: the vGPU is the one that both the ledger and the kubelet's record have
for the id. Other devices have their own check (`allocation.containerstarts`).
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, ResourceName, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import UnnamedType
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.allocation.containerstarts import foreign_nodes, nodes_changed, own_nodes
from gpuvirt.model.allocation.ledger import Consumer, Entry, Stage
from gpuvirt.model.allocation.ondemandids import vgpus_in
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.inventory.inventory import Inventory, Vgpu
from gpuvirt.model.reasons import Reason, Seen, notoffered, refusals
from gpuvirt.model.reasons.notoffered import CHECKPOINT


def started(
    inventory: Inventory,
    entries: Sequence[Entry],
    recorded: Recorded | Unknown,
    resource: ResourceName,
    devices: Iterable[DeviceId],
) -> tuple[Entry, ...] | Reason:
    """Return the allocations of a container's ids as they are once it starts, or the reason against its start.

    Which of a pod's containers starts is unknown, so that the answers of all of them count.
    """
    found: list[Entry] = []
    for device in devices:
        entry = _started(inventory, entries, recorded, (resource, device))
        if isinstance(entry, Reason):
            return entry
        found.append(entry)
    return tuple(found)


def _started(
    inventory: Inventory,
    entries: Sequence[Entry],
    recorded: Recorded | Unknown,
    key: tuple[ResourceName, DeviceId],
) -> Entry | Reason:
    device = key[1]
    if isinstance(recorded, Unknown):
        why = recorded.reason.text if recorded.reason is not None else "could not be read"
        return _not_recorded(device, why)
    entry = next((entry for entry in entries if (entry.resource, entry.device) == key), None)
    if entry is None:
        return _not_recorded(device, "no vGPU was created for this id")
    consumers = recorded.get(key, frozenset())
    against = _why_not_its_vgpu(inventory, entry, list(_named(consumers))) or _why_foreign(inventory, entry, consumers)
    if against is not None:
        return against
    with_it = next(consumer.in_ledger for consumer in consumers if entry.target.id in _named([consumer]))
    consumer = entry.consumer.with_uid_of(with_it) if entry.consumer is not None else with_it
    return replace(entry, consumer=consumer, stage=Stage.STARTED)


def _why_not_its_vgpu(inventory: Inventory, entry: Entry, named: Sequence[DeviceId]) -> Reason | None:
    """Return that the kubelet's record names another vGPU than the ledger, or one that is gone or was replaced."""
    vgpu = entry.target.id
    if vgpu not in named:
        return _not_recorded(entry.device, f"names {', '.join(named) or 'no vGPU'}; expected {vgpu}")
    found = inventory.vgpus.get(VgpuId(vgpu))
    if found is None:
        return _not_recorded(entry.device, f"names {vgpu}, which does not exist on this host any more")
    return _why_unlike(entry, found)


def _why_unlike(entry: Entry, vgpu: Vgpu) -> Reason | None:
    """Return that the vGPU of an allocation can't be read, or is of another type than the one that was created."""
    live, before = vgpu.live, entry.target.type
    for unread in (live.type, live.group):
        # The id of a type without a name was read: a GPU that is full names none of its types.
        if isinstance(unread, Unread) and not isinstance(unread, UnnamedType):
            return refusals.unread(live.id, unread, "no container starts with it")
    if live.group is None:
        return refusals.no_group(live.id)
    if isinstance(live.type, str) and live.type != (before or live.type):  # an adopted allocation may have no type
        return _not_recorded(entry.device, f"names {live.id}, which is {live.type} now; expected {before}")
    return None


def _why_foreign(inventory: Inventory, entry: Entry, consumers: Iterable[Consumer]) -> Reason | None:
    """Return that a container with the vGPU would get a node that is not its own."""
    for answer in (answer for answer in _answers(consumers) if entry.target.id in vgpus_in(answer)):
        if foreign := foreign_nodes(inventory, answer):
            own = own_nodes(inventory, [entry.target.id])
            return nodes_changed(entry.device, entry.target.id, foreign, own)
    return None


def _answers(consumers: Iterable[Consumer]) -> Iterator[PluginAnswer]:
    """Yield the answers that the kubelet has recorded for containers, and that could be read."""
    for consumer in consumers:
        if isinstance(consumer.answer, PluginAnswer):
            yield consumer.answer


def _named(consumers: Iterable[Consumer]) -> Iterator[DeviceId]:
    """Yield the vGPUs in the answers that the kubelet has recorded for containers."""
    for answer in _answers(consumers):
        yield from vgpus_in(answer)


def _not_recorded(device: str, why: str) -> Reason:
    """The kubelet's record has to name the vGPU with which a container starts."""
    message = "can't be used by its container: the kubelet's record does not assign this vGPU to the container"
    fix = "delete the pod; a Deployment or a Job creates it again"
    return notoffered.not_recorded(device, message, fix, Seen(CHECKPOINT, why))

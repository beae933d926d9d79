"""The view of on-demand resources: the listed ids with the vGPUs of pods, and KubeVirt's selectors."""

from collections.abc import Iterator

from gpuvirt.facts.ids import DeviceId, ResourceName, VgpuType, is_mdev_uuid
from gpuvirt.facts.sysfs import MDEVS, PCI_DEVICES
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.allocation.attachment import vm_nodes
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.desired.settings import VfioNodes
from gpuvirt.model.devices.candidates import Candidate, ResourceKind, Selectors
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.naming import Named
from gpuvirt.model.offers.ondemand.offer import OnDemandOffer
from gpuvirt.model.offers.view import DeviceView
from gpuvirt.model.reasons import Reason, notoffered


def devices(
    inventory: Inventory, offer: OnDemandOffer, resource: ResourceName, vfio_nodes: VfioNodes
) -> Iterator[DeviceView]:
    """Yield the ids of a resource: those of pods first, then those for which a vGPU would be created."""
    for entry in offer.given.get(resource, {}).values():
        yield _given(inventory, entry, vfio_nodes)
    for device in offer.free.get(resource, ()):
        yield DeviceView(device, healthy=True, numa_node=None, group=None, gpu=None)


def healthy_ids(inventory: Inventory, offer: OnDemandOffer, resource: ResourceName) -> list[DeviceId]:
    """Return the healthy ids of a resource, which the kubelet may count."""
    given = offer.given.get(resource, {}).values()
    existing = (entry.device for entry in given if _is_healthy(entry, candidate_of(inventory, entry)))
    return [*existing, *offer.free.get(resource, ())]


def _is_healthy(entry: Entry, candidate: Candidate | None) -> bool:
    """Return whether the id of a pod's vGPU is healthy: its vGPU exists, or the agent is about to make it.

    The latter holds for one that a reboot has taken, too. The kubelet admits pods again after a reboot, and refuses for
    good a pod whose device is unhealthy. It tries again where a container may not start yet.
    """
    was_not_seen = entry.group is None  # in this boot: the agent makes it again
    return entry.intended or was_not_seen or candidate is not None


def _given(inventory: Inventory, entry: Entry, vfio_nodes: VfioNodes) -> DeviceView:
    """Return the id of a pod's vGPU; an id whose vGPU is gone has the reason."""
    candidate = candidate_of(inventory, entry)
    gone = None if entry.intended or candidate is not None else _gone(entry)
    return DeviceView(
        entry.device,
        healthy=_is_healthy(entry, candidate),
        numa_node=candidate.numa_node if candidate is not None else None,
        group=entry.group,
        gpu=entry.target.gpu,
        nodes=vm_nodes(inventory, candidate, vfio_nodes) if candidate is not None else (),
        reasons=(gone,) if gone is not None else (),
        allocated_to=entry.allocated_to,
        vgpu=entry.target.vgpu,
    )


def _gone(entry: Entry) -> Reason:
    vgpu = entry.target.id
    return notoffered.device_gone(vgpu, MDEVS if is_mdev_uuid(vgpu) else PCI_DEVICES)


def candidate_of(inventory: Inventory, entry: Entry) -> Candidate | None:
    """Return the vGPU of an allocation as a device, by the vGPU's own id; None if the host does not show it whole."""
    vgpu = inventory.vgpus.get(entry.target.vgpu) if entry.target.vgpu is not None else None
    if vgpu is None or not isinstance(vgpu.live.group, int):
        return None
    carrier = inventory.facts.functions.get(vgpu.live.parent)
    return Candidate(
        id=entry.target.id,
        target=entry.target,
        named=Named(entry.resource),
        group=vgpu.live.group,
        numa_node=carrier.numa_node if carrier is not None else None,
        framework=vgpu.framework,
        carrier=vgpu.live.parent,
    )


def selectors(inventory: Inventory, offer: OnDemandOffer, resource: ResourceName, vgpu_type: VgpuType) -> Selectors:
    """Return KubeVirt's selectors of a resource: its type's name, or the ids of the VFs that carry it.

    A resource whose type has got another one has none: it stays for the pods that have its vGPUs.
    """
    if offer.current.get(resource) != vgpu_type:
        return Selectors(ResourceKind.VGPU)
    hosts = [found.vgpu_host for gpu in offer.gpus if (found := inventory.gpus.get(gpu)) is not None]
    pci = {
        str(inventory.facts.functions[parent].id).upper()
        for host in hosts
        if host is not None and host.framework is not Framework.MDEV
        for parent in host.creatable
        if parent in inventory.facts.functions
    }
    mdev = any(host is not None and host.framework is Framework.MDEV for host in hosts)
    return Selectors(ResourceKind.VGPU, tuple(sorted(pci)), (str(vgpu_type),) if mdev else ())

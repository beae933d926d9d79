"""The devices of a host, offered or not, by the ids that the kubelet may have for them."""

from gpuvirt.facts.ids import DeviceId, IommuGroup
from gpuvirt.facts.pci import FunctionKind, Unread
from gpuvirt.model.allocation.ledger import Known
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory


def known_devices(inventory: Inventory) -> Known:
    """Return the devices by their ids.

    In KubeVirt's own plugin, and in NVIDIA's before 1.5, the id of a device is the number of its group.
    """
    endpoints = {
        group: [member for member in members if inventory.facts.functions[member].kind is not FunctionKind.BRIDGE]
        for group, members in inventory.groups.items()
    }
    by_group = {DeviceId(str(group)): (Target(found[0]), group) for group, found in endpoints.items() if found}
    functions = {
        DeviceId(function.address): (Target(function.address), _known_group(function.iommu_group))
        for function in inventory.facts.functions.values()
    }
    vgpus = {
        DeviceId(vgpu.live.id): (
            Target(vgpu.gpu, vgpu.live.id, None if isinstance(vgpu.live.type, Unread) else vgpu.live.type),
            _known_group(vgpu.live.group),
        )
        for vgpu in inventory.vgpus.values()
    }
    vgpus_by_group = {DeviceId(str(group)): (target, group) for target, group in vgpus.values() if group is not None}
    return by_group | functions | vgpus | vgpus_by_group


def _known_group(group: IommuGroup | Unread | None) -> IommuGroup | None:
    return None if isinstance(group, Unread) else group

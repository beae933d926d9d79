"""The device nodes in the kubelet's recorded answers that its devices do not have any more.

The kubelet starts a container again with the answer of before a reboot, without a call of Allocate. The kernel numbers
IOMMU groups, VFIO devices and regions of EGM in the order in which they come, so a recorded node may be that of another
pod's device.
"""

from collections.abc import Iterable

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, VgpuId
from gpuvirt.model.allocation.attachment import CONTAINER, VFIO_FOLDER
from gpuvirt.model.allocation.ondemandids import vgpus_in
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.paths import HostPath

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

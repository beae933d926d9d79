"""The VFIO nodes in the kubelet's recorded answer that its vGPUs do not have any more.

The kubelet starts a container again with the answer of before a reboot, without a call of Allocate. The kernel numbers
IOMMU groups and VFIO devices in the order in which they come, so a recorded node may be that of another pod's vGPU.
"""

from gpuvirt.facts.ids import IommuGroup, VgpuId
from gpuvirt.model.allocation.attachment import CONTAINER, VFIO_FOLDER
from gpuvirt.model.allocation.ondemandids import vgpus_in
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.paths import HostPath


def foreign_nodes(inventory: Inventory, answer: PluginAnswer) -> tuple[HostPath, ...]:
    """Return the paths of an answer's VFIO nodes that belong to none of the vGPUs that the answer names.

    A vGPU has the nodes of its group and of the functions in it. A vGPU whose group is unknown has none, so that its
    recorded nodes are foreign. The folder of all groups, which a setting gives, is no node.
    """
    named = (inventory.vgpus.get(VgpuId(vgpu)) for vgpu in vgpus_in(answer))
    groups = {vgpu.live.group for vgpu in named if vgpu is not None and isinstance(vgpu.live.group, int)}
    own = {CONTAINER, *(path for group in groups for path in _nodes_of(inventory, group))}
    recorded = (node.path for node in answer.nodes if node.path.startswith(f"{VFIO_FOLDER}/"))
    return tuple(sorted(path for path in recorded if path not in own))


def _nodes_of(inventory: Inventory, group: IommuGroup) -> tuple[HostPath, ...]:
    functions = (inventory.facts.functions[address] for address in inventory.groups.get(group, ()))
    cdevs = (HostPath(f"{VFIO_FOLDER}/devices/{name}") for function in functions for name in function.cdevs)
    return HostPath(f"{VFIO_FOLDER}/{group}"), *cdevs

"""The environment and device nodes that a container gets, so that a VM in it can use its devices.

KubeVirt reads the environment (`PCI_RESOURCE_NVIDIA_COM_GA102GL_A10=0000:65:00.0`). The nodes are `/dev/vfio/vfio` and
one for each group; on hosts with iommufd its nodes come before and after these, unless the setting `vfio_nodes` chooses
one kind. Several devices come one after the other, as in the kubevirt-gpu-device-plugin.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from gpuvirt.facts.ids import ResourceName
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import IOMMUFD
from gpuvirt.model.desired.settings import CdiUse, Settings, VfioNodes
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.naming import cdi_name, env_name
from gpuvirt.paths import HostPath

VFIO_FOLDER = HostPath("/dev/vfio")
CONTAINER = HostPath("/dev/vfio/vfio")


class Attachment(msgspec.Struct, frozen=True):
    """The environment and devices of one container."""

    env: Mapping[str, str]
    device_nodes: tuple[HostPath, ...]
    """Paths on the host; the container has the same paths, with permissions `mrw`."""
    cdi_devices: tuple[str, ...] = ()
    """CDI devices that the container runtime applies."""


def attach(
    inventory: Inventory, resource: ResourceName, devices: Sequence[Candidate], settings: Settings
) -> Attachment:
    """Return the attachment of a container for devices of one resource, in the order of the request."""
    mediated = any(device.is_mdev for device in devices)
    prefix = "MDEV_PCI_RESOURCE" if mediated else "PCI_RESOURCE"
    env = {env_name(prefix, resource): ",".join(device.id for device in devices)} if devices else {}
    if not devices:
        nodes: Iterable[HostPath] = ()
    elif mediated:
        each = (_group_nodes(inventory.facts, device) for device in devices)
        nodes = (VFIO_FOLDER,) if settings.compat.whole_vfio_folder else chain.from_iterable(each)
    else:
        nodes = _function_nodes(inventory, devices, settings.vfio_nodes)
    named = devices if settings.cdi is CdiUse.ANSWERS else ()
    cdi_devices = tuple(cdi_name(resource, device.id) for device in named)
    return Attachment(env, tuple(dict.fromkeys(nodes)), cdi_devices)


def vm_nodes(inventory: Inventory, device: Candidate, chosen: VfioNodes) -> tuple[HostPath, ...]:
    """Return the node by which a VM opens one device: the device's own node, or that of its group.

    The device's own comes first, unless `chosen` is the group and VFIO's container is there to open it.

    Kata plugs in every node that it gets: runtime-rs takes also `/dev/vfio/vfio` for a device, and fails. It opens that
    node and `/dev/iommu` by itself. A device that is gone has no node, since another group may have its group's number
    by now.
    """
    facts, function = inventory.facts, inventory.facts.functions.get(device.carrier)
    if function is None or (device.target.vgpu is not None and device.target.vgpu not in inventory.vgpus):
        return ()
    has_group = device.group is not None and device.group in facts.group_nodes
    by_group = chosen is VfioNodes.GROUP and has_group and facts.platform.vfio_container
    has_cdev = facts.platform.iommufd and function.cdevs[:1] and function.cdevs[0] in facts.cdev_nodes
    if has_cdev and not device.is_mdev and not by_group:
        return (HostPath(f"{VFIO_FOLDER}/devices/{function.cdevs[0]}"),)
    return (HostPath(f"{VFIO_FOLDER}/{device.group}"),) if has_group else ()


def _function_nodes(inventory: Inventory, devices: Sequence[Candidate], chosen: VfioNodes) -> Iterator[HostPath]:
    """Yield the nodes of functions; with one kind chosen, those of CDI specs, with what opens them.

    Kata with cold plug compares both, and plugs each node that is not in the spec.
    """
    for device in devices:
        if chosen is not VfioNodes.BOTH:
            for node in vm_nodes(inventory, device, chosen):
                is_cdev = node.startswith(f"{VFIO_FOLDER}/devices/")
                yield from (node, IOMMUFD) if is_cdev else _group_nodes(inventory.facts, device)
            continue
        cdevs = _cdevs(inventory, device)
        for name in cdevs:
            yield HostPath(f"{VFIO_FOLDER}/devices/{name}")
        yield from _group_nodes(inventory.facts, device)
        if cdevs:
            yield IOMMUFD
    given = {device.carrier for device in devices}
    yield from (region.node for region in inventory.facts.platform.egm if region.gpus <= given)


def _group_nodes(facts: Facts, device: Candidate) -> Iterator[HostPath]:
    """Yield the nodes of VFIO's container and of the group; a kernel without VFIO groups has neither."""
    if device.group is not None and device.group in facts.group_nodes:
        if facts.platform.vfio_container:
            yield CONTAINER
        yield HostPath(f"/dev/vfio/{device.group}")


def _cdevs(inventory: Inventory, device: Candidate) -> tuple[str, ...]:
    """Return the iommufd nodes of all members of a device's group that are on VFIO.

    The result is empty if the host has no iommufd, or if a member has no node: the VM then opens the group.
    """
    facts = inventory.facts
    if not facts.platform.iommufd or device.group is None:
        return ()
    members = [facts.functions[address] for address in inventory.groups.get(device.group, ())]
    served = [function for function in members if function.on_vfio or function.address == device.carrier]
    if not all(function.cdevs and function.cdevs[0] in facts.cdev_nodes for function in served):
        return ()
    return tuple(function.cdevs[0] for function in served)

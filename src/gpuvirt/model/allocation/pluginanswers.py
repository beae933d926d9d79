"""A device plugin's answer to Allocate, and the devices of this host that the answer names.

Of a plugin whose ids name no device, the answer shows the container's devices: by device nodes, which belong to a
device by their numbers, and by ids of GPUs in the environment, in mounts (NVIDIA's strategy `volume-mounts`) and in
names of CDI.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, VgpuId, is_mdev_uuid, is_pci_address
from gpuvirt.facts.nodes import NO_DEVICE, DeviceNode, DeviceNumber
from gpuvirt.facts.pci import FunctionKind, Unread
from gpuvirt.facts.snapshot import DeviceIds, DriverInformation
from gpuvirt.model.inventory.inventory import Inventory

NVIDIA_MAJOR = 195
"""Documentation/admin-guide/devices.txt; each GPU has its own minor number."""
NVIDIAS_SHARED_MINORS = frozenset({254, 255})
"""`/dev/nvidia-modeset` and `/dev/nvidiactl`."""

_GROUP_NODE = re.compile(r"/vfio/(?:noiommu-)?([0-9]{1,9})\Z")
_OWN_NODE = re.compile(r"/vfio-dev/(vfio[0-9]+)\Z")
_SHARED_BY_AMDS_GPUS = re.compile(r"/kfd\Z")
_PARTITION = re.compile(r"/platform/amdgpu_xcp[._][0-9]+/")
"""A partition of one of AMD's accelerators, which no link connects with its GPU (amdgpu_xcp_drm_dev_alloc)."""
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_NVIDIAS = re.compile(rf"(GPU|MIG(?:-GPU)?)-({_UUID})(?![0-9a-z])", re.IGNORECASE)
"""Other plugins that share GPUs append a number to the UUID: `-3`, `-_-0`. In drivers before 470 the id of a MIG device
is `MIG-GPU-<uuid of the GPU>/1/0`."""
_VISIBLE = frozenset({"NVIDIA_VISIBLE_DEVICES", "AMD_VISIBLE_DEVICES"})
"""The variables by which container runtimes add the nodes of GPUs to a container."""
_NO_GPUS = frozenset({"void", "none"})
_LISTS = re.compile(r"[,;\s]+")
NVIDIAS_MOUNTS = "/var/run/nvidia-container-devices"
"""NVIDIA's strategy `volume-mounts`: a file mounted below it names a GPU."""


@dataclass(frozen=True, slots=True)
class PluginAnswer:
    """The parts of an answer (ContainerAllocateResponse) by which a container gets devices."""

    nodes: tuple[DeviceNode, ...] = ()
    """The device nodes, and the mounted files under `/dev`."""
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Variables, which may have tokens of other programs as values: no log or message shows them."""
    mounts: tuple[str, ...] = ()
    """The places of mounts in the container."""
    cdi_devices: tuple[str, ...] = ()
    """The names of CDI devices, in the answer itself or in its annotations: `nvidia.com/gpu=0`."""


def combine_answers(answers: Sequence[PluginAnswer]) -> PluginAnswer:
    """Return the answers that the containers of one device got as one answer."""
    return PluginAnswer(
        tuple(dict.fromkeys(node for answer in answers for node in answer.nodes)),
        tuple(dict.fromkeys(variable for answer in answers for variable in answer.env)),
        tuple(dict.fromkeys(place for answer in answers for place in answer.mounts)),
        tuple(dict.fromkeys(name for answer in answers for name in answer.cdi_devices)),
    )


class NamedDevices(msgspec.Struct, frozen=True):
    """The devices of this host that an id or an answer names."""

    functions: frozenset[PciAddress] = frozenset()
    vgpus: frozenset[VgpuId] = frozenset()
    groups: frozenset[IommuGroup] = frozenset()
    complete: bool = False
    """Whether it names a device, and every device that it names is known, on this host or none of its GPUs."""


class _Other(Enum):
    """Kinds of names in an answer, besides those of GPUs, vGPUs and groups."""

    NO_GPU = auto()
    SHARED = auto()
    """A node that serves all GPUs of a driver: `/dev/nvidiactl`, `/dev/kfd`."""
    UNKNOWN = auto()


_Named = PciAddress | VgpuId | IommuGroup | _Other


def named_devices(inventory: Inventory, answer: PluginAnswer) -> NamedDevices:
    """Return the devices that an answer names."""
    found = {*_nodes(inventory, answer), *_words(inventory, answer)}
    groups = frozenset(IommuGroup(name) for name in found if isinstance(name, int))
    texts = {name for name in found if isinstance(name, str)}
    functions = frozenset(PciAddress(text) for text in texts if is_pci_address(text))
    vgpus = frozenset(VgpuId(text) for text in texts if text in inventory.vgpus)
    of_gpus = (
        groups or vgpus or any(inventory.facts.functions[address].kind is FunctionKind.GPU for address in functions)
    )
    complete = bool(found) and _Other.UNKNOWN not in found and (bool(of_gpus) or _Other.SHARED not in found)
    return NamedDevices(functions, vgpus, groups, complete)


def vfio_ids(answer: PluginAnswer) -> Iterator[DeviceId]:
    """Yield the numbers of the IOMMU groups, and the ids of the devices, whose VFIO nodes an answer has.

    The path shows the group where the node could not be read: to take it for allocated is safe.
    """
    for node in answer.nodes:
        device = node.device if isinstance(node.device, str) else node.path
        if group := _GROUP_NODE.search(device):
            yield DeviceId(group[1])
        elif _OWN_NODE.search(device):
            ids = [part for part in device.split("/") if is_pci_address(part) or is_mdev_uuid(part)]
            yield from map(DeviceId, ids[-1:])


def _nodes(inventory: Inventory, answer: PluginAnswer) -> Iterator[_Named]:
    for node in answer.nodes:
        yield from _of_node(inventory, node)


def _of_node(inventory: Inventory, node: DeviceNode) -> Iterator[_Named]:
    number, device = node.number, node.device
    if number is None or isinstance(number, Unread) or number == NO_DEVICE or isinstance(device, Unread):
        yield _Other.UNKNOWN
    elif device is None:
        yield _without_device(inventory.facts.device_ids, number)
    elif group := _GROUP_NODE.search(device):
        yield IommuGroup(int(group[1]))
    elif (own := _OWN_NODE.search(device)) and (
        of_cdev := [address for address, function in inventory.facts.functions.items() if own[1] in function.cdevs]
    ):
        yield from of_cdev
    else:
        yield _of_path(inventory, device)


def _without_device(ids: DeviceIds, number: DeviceNumber) -> _Named:
    """Return what has a number for which the kernel lists no device: GPUs of NVIDIA's driver, or all of them."""
    if number.major != NVIDIA_MAJOR or number.minor in NVIDIAS_SHARED_MINORS:
        return _Other.SHARED
    minors = {known.minor: gpu for gpu, known in ids.information.items() if isinstance(known, DriverInformation)}
    return minors.get(number.minor, _Other.UNKNOWN)


def _of_path(inventory: Inventory, device: str) -> _Named:
    """Return the innermost mdev or function in the path of a device: `.../0000:65:00.0/drm/renderD128`."""
    for part in reversed(device.split("/")):
        if VgpuId(part) in inventory.vgpus:
            return VgpuId(part)
        if is_pci_address(part):
            return PciAddress(part) if part in inventory.facts.functions else _Other.UNKNOWN
    if _PARTITION.search(device):
        return _Other.UNKNOWN
    return _Other.SHARED if _SHARED_BY_AMDS_GPUS.search(device) else _Other.NO_GPU


def _words(inventory: Inventory, answer: PluginAnswer) -> Iterator[_Named]:
    """Yield the devices that words of an answer name: words of variables, mounts, and names of CDI devices."""
    for name, value in answer.env:
        for word in _LISTS.split(value):
            named = _of_word(inventory, word)
            if not named and name in _VISIBLE and word.lower() not in _NO_GPUS and word.strip("/"):
                named = () if word.startswith("/") else (_Other.UNKNOWN,)
            yield from named
    for place in answer.mounts:
        folder, _, word = place.rpartition("/")
        if folder == NVIDIAS_MOUNTS:
            yield from _of_word(inventory, word) or (_Other.UNKNOWN,)
    for device in answer.cdi_devices:
        yield from _of_word(inventory, device.partition("=")[2]) or (_Other.UNKNOWN,)


def _of_word(inventory: Inventory, word: str) -> tuple[_Named, ...]:
    """Return the devices that a word names, none for a word that is no id of a device."""
    lower = word.lower()
    if is_pci_address(word):
        return (PciAddress(lower) if lower in inventory.facts.functions else _Other.NO_GPU,)
    if is_mdev_uuid(word):
        return (VgpuId(lower),) if lower in inventory.vgpus else ()
    gpus = gpus_by_uuid(inventory.facts.device_ids, word)
    return () if gpus is None else tuple(gpus) or (_Other.UNKNOWN,)


def is_nvidias_id(word: str) -> bool:
    """Return whether a word has the form of an id of NVIDIA's driver."""
    return _NVIDIAS.match(word) is not None


def gpus_by_uuid(ids: DeviceIds, word: str) -> frozenset[PciAddress] | None:
    """Return the GPUs of an id of NVIDIA's driver, none where they are unknown; None for a word that is no such id.

    A MIG device may be on any GPU that has GPU instances.
    """
    nvidias = _NVIDIAS.match(word)
    if nvidias is None:
        return None
    if nvidias[1].upper() == "MIG":
        return ids.mig_gpus or frozenset()
    gpu = ids.gpu_uuids.get(nvidias[2].lower())
    return frozenset() if gpu is None else frozenset({gpu})

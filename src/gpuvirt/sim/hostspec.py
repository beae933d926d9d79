"""Machine files: which boards a machine has in which slots, and in what state."""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt import documents
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import VgpuType
from gpuvirt.facts.vgpu import Framework
from gpuvirt.sim.platform import PlatformSpec
from gpuvirt.sim.vgpu import MigProfileSpec, VgpuTypeSpec

MOST_VFS = 256
MOST_GROUP = (1 << 31) - 1
MOST_NUMA_NODE = 1023

# A name becomes part of a path, here and where the machine is written out as files.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,63}\Z")]
EgmName = Annotated[str, Meta(pattern=r"^egm[0-9]{1,4}\Z")]
ClassCode = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{6}\Z")]
Revision = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{2}\Z")]
Vfs = Annotated[int, Meta(ge=0, le=MOST_VFS)]
Group = Annotated[int, Meta(ge=0, le=MOST_GROUP)]
NumaNode = Annotated[int, Meta(ge=-1, le=MOST_NUMA_NODE)]
Cdev = Annotated[int, Meta(ge=0, le=MOST_GROUP)]
Left = Annotated[int, Meta(ge=0, le=MOST_GROUP)]
Count = Annotated[int, Meta(ge=1, le=MOST_VFS)]


class LiveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A vGPU that exists."""

    slot: str
    """The function that carries it: the GPU itself, or a VF."""
    type: VgpuType
    uuid: str | None = None
    """Of a mediated device."""
    group: Group | None = None
    """The IOMMU group of a mediated device."""
    cdev: Cdev | None = None
    """The number of a mediated device as a VFIO device: 3 for `vfio3`."""


class CarriesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The vGPUs of a GPU as a real host was found to have them."""

    framework: Framework
    types: tuple[VgpuTypeSpec, ...]
    slots: tuple[str, ...] = ()
    """The functions that can carry them; left out, the GPU itself."""
    live: tuple[LiveSpec, ...] = ()
    left: dict[str, dict[VgpuType, Left]] = {}
    """How many more of a type a function can take by the host's own word, where `size` and `most` would say otherwise.

    It holds as long as the vGPUs are those in `live`.
    """


class FunctionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One function of a board."""

    id: str
    """`10de:2236`"""
    class_code: ClassCode = msgspec.field(name="class")
    """Six hexadecimal digits: `030200`"""
    subsystem: str | None = None
    revision: Revision | None = "a1"
    """None: it shows none, as before kernel 4.10, or nobody asked it."""
    native_driver: Name | None = None
    """The driver that the kernel would give it."""


class CardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A kind of card."""

    functions: Annotated[tuple[FunctionSpec, ...], Meta(min_length=1, max_length=8)]
    vf_id: str | None = None
    vf_class: ClassCode | None = None
    """Of its VFs, where it is another than the GPU's; no driver takes those."""
    total_vfs: Vfs | None = None
    numvfs: bool = True
    """Its native driver lets `sriov_numvfs` switch VFs; False: sriov-manage alone does, as with NVIDIA's."""
    vgpus: Framework | None = None
    vgpus_on_vfs: bool = False
    """Its VFs carry the vGPUs, and nothing does while they are off."""
    vgpu_types: tuple[VgpuTypeSpec, ...] = ()
    mig_profiles: tuple[MigProfileSpec, ...] = ()
    """The GPU instances that it can have in MIG mode."""


class SlotSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A card in a slot."""

    at: str
    """The address of its first function: `0000:65:00.0`"""
    board: str
    driver: Name | None = "native"
    """`native`, `none`, or the driver that has all its functions: `vfio-pci`."""
    group: Group | None = None
    """The IOMMU group; left out where the machine has no IOMMU."""
    numa: NumaNode = -1
    behind: str | None = None
    """The address of the bridge that it sits behind, which stands earlier in the file."""
    vfs: Vfs = 0
    """VFs that are switched on, at most the board's `total_vfs`."""
    vgpus: dict[VgpuType, Count] = {}
    """vGPUs that exist from the start."""
    vgpu_types: tuple[VgpuTypeSpec, ...] = ()
    """In place of the board's."""
    mixed_sizes: bool = False
    """It is in mixed-size mode."""
    mig: dict[str, Count] = {}
    """It is in MIG mode, and has so many GPU instances of each profile."""
    vf_of: str | None = None
    """It is a VF of the function at this address, which stands earlier in the file: in place of that one's `vfs`."""
    cdev: Cdev | None = None
    """The number of its first function as a VFIO device: 3 for `vfio3`; left out, they are numbered as they come."""
    fell_off_bus: bool = False
    """Its configuration space answers 0xffff."""
    carries: CarriesSpec | None = None
    """Its vGPUs as a real host was found to have them: in place of `vgpus`, and of what its board says of them."""


class EgmSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A region of extended GPU memory."""

    name: EgmName
    gpus: tuple[str, ...]


class HostSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A host file."""

    about: str
    slots: tuple[SlotSpec, ...] = ()
    boards: dict[str, CardSpec] = {}
    """Boards of this file alone, beside those that all machines know."""
    iommu: bool = True
    iommufd: bool = False
    group_nodes: bool = True
    """False: a kernel without VFIO_GROUP, where devices are opened by their own nodes alone."""
    cdev_nodes: bool | None = None
    """Whether VFIO devices have nodes of their own; left out, they do where there is iommufd."""
    vfio_dev: bool = True
    """False: a kernel before 6.1, whose VFIO devices have no folder `vfio-dev`."""
    vfio_loaded: bool = True
    """False: the modules are not loaded, so there is no `/dev/vfio/vfio`."""
    missing_nodes: tuple[Group, ...] = ()
    """Groups whose nodes somebody has deleted."""
    stray_nodes: tuple[Group, ...] = ()
    """Groups that have a node though no VFIO driver that we know has a device of theirs."""
    egm: tuple[EgmSpec, ...] = ()
    platform: PlatformSpec = PlatformSpec()
    """The host besides its devices."""


class CardsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The boards that all machines know."""

    boards: dict[str, CardSpec]


def host_names() -> tuple[str, ...]:
    """Return the names of the machines that come with gpuvirt."""
    names = (entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))
    return tuple(sorted(name for name in names if name != "boards"))


def load_host(name: str) -> HostSpec:
    """Return a machine by its name, or from a file when `name` is a path; raise ConfigError where there is none."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or path.is_absolute():
        return documents.load(path, HostSpec)
    if name not in host_names():
        raise ConfigError(
            f"no such machine; there are {', '.join(host_names())}, or give the path of a file", where=name
        )
    entry = _folder() / f"{name}.yaml"
    return documents.parse(entry.read_text("utf-8"), HostSpec, where=entry.name)


def shared_cards() -> dict[str, CardSpec]:
    """Return the boards that all machines know."""
    entry = _folder() / "boards.yaml"
    return documents.parse(entry.read_text("utf-8"), CardsFile, where=entry.name).boards


def _folder() -> Traversable:
    return resources.files("gpuvirt.sim") / "hosts"

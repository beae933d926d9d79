"""Host files: which cards a simulated host has in which slots, and in what state."""

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
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.devices.vgpu import MigProfileSpec, VgpuTypeSpec

MOST_VFS = 256
MOST_GROUP = (1 << 31) - 1
MOST_NUMA_NODE = 1023

# A name becomes part of a path, also where the simulated host is exported as files.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,63}\Z")]
EgmName = Annotated[str, Meta(pattern=r"^egm[0-9]{1,4}\Z")]
ClassCode = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{6}\Z")]
Revision = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{2}\Z")]
Vfs = Annotated[int, Meta(ge=0, le=MOST_VFS)]
Group = Annotated[int, Meta(ge=0, le=MOST_GROUP)]
NumaNode = Annotated[int, Meta(ge=-1, le=MOST_NUMA_NODE)]
Cdev = Annotated[int, Meta(ge=0, le=MOST_GROUP)]
Left = Annotated[int, Meta(ge=0, le=MOST_GROUP)]
Product = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_. ]{0,63}\Z")]
Count = Annotated[int, Meta(ge=1, le=MOST_VFS)]


class LiveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A vGPU that exists."""

    slot: str
    """The function that carries the vGPU: the GPU, or one of the GPU's VFs."""
    type: VgpuType
    uuid: str | None = None
    """Only of a mediated device."""
    group: Group | None = None
    """The IOMMU group of a mediated device."""
    cdev: Cdev | None = None
    """The number of a mediated device as a VFIO device: 3 for `vfio3`."""


class CarriesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The vGPUs of a GPU, as an imported host had them."""

    framework: Framework
    types: tuple[VgpuTypeSpec, ...]
    slots: tuple[str, ...] = ()
    """The functions that can carry vGPUs; by default the GPU."""
    live: tuple[LiveSpec, ...] = ()
    left: dict[str, dict[VgpuType, Left]] = {}
    """How many more of a type a function can take, where the imported host's number does not follow from size and most.

    It applies as long as the vGPUs are those in `live`.
    """


class FunctionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One function of a board."""

    id: str
    """`10de:2236`"""
    class_code: ClassCode = msgspec.field(name="class")
    """Six hexadecimal digits: `030200`"""
    subsystem: str | None = None
    revision: Revision | None = "a1"
    """None: sysfs shows no revision, as before kernel 4.10, or the import has not read it."""
    native_driver: Name | None = None
    """The driver that the kernel would bind to the function."""


class CardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A model of card."""

    functions: Annotated[tuple[FunctionSpec, ...], Meta(min_length=1, max_length=8)]
    product: Product = "NVIDIA Graphics Device"
    """The product name that NVIDIA's driver shows of the GPU."""
    vf_id: str | None = None
    vf_class: ClassCode | None = None
    """The class of the card's VFs, where it differs from the GPU's; no driver binds to such VFs."""
    total_vfs: Vfs | None = None
    numvfs: bool = True
    """Whether the native driver creates VFs by `sriov_numvfs`; False: only sriov-manage does, as with NVIDIA's."""
    vgpus: Framework | None = None
    vgpus_on_vfs: bool = False
    """Whether the GPU's VFs carry the vGPUs; without VFs, the GPU carries no vGPU."""
    vgpu_types: tuple[VgpuTypeSpec, ...] = ()
    mig_profiles: tuple[MigProfileSpec, ...] = ()
    """The GPU instances that the card can have in MIG mode."""


class SlotSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A card in a slot."""

    at: str
    """The address of the card's first function: `0000:65:00.0`"""
    board: str
    driver: Name | None = "native"
    """`native`, `none`, or the driver of all functions of the card: `vfio-pci`."""
    group: Group | None = None
    """The IOMMU group; left out on a host without an IOMMU."""
    numa: NumaNode = -1
    behind: str | None = None
    """The address of the bridge above the card; the file has the bridge earlier."""
    vfs: Vfs = 0
    """The number of enabled VFs, at most the board's `total_vfs`."""
    vgpus: dict[VgpuType, Count] = {}
    """vGPUs that exist from the start."""
    vgpu_types: tuple[VgpuTypeSpec, ...] = ()
    """vGPU types in place of the board's."""
    mixed_sizes: bool = False
    """Whether the GPU is in mixed-size mode."""
    mig: dict[str, Count] = {}
    """The number of GPU instances by profile; the GPU is in MIG mode where there are some."""
    vgpu: Product | None = None
    """The vGPU type, where the host is a VM and the GPU its vGPU: `GRID V100-8Q`."""
    vf_of: str | None = None
    """The address of the PF of a VF, which comes earlier in the file. A VF in the file replaces the `vfs` of the PF."""
    cdev: Cdev | None = None
    """The number of the first function as a VFIO device: 3 for `vfio3`; by default the next free number."""
    fell_off_bus: bool = False
    """Whether the card's configuration space reads as 0xffff."""
    carries: CarriesSpec | None = None
    """The GPU's vGPUs on an imported host, in place of `vgpus` and of the board's types."""


class EgmSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A region of extended GPU memory."""

    name: EgmName
    gpus: tuple[str, ...]


class HostSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A host file."""

    about: str
    slots: tuple[SlotSpec, ...] = ()
    boards: dict[str, CardSpec] = {}
    """Boards that only this file uses, besides those shared by all hosts."""
    iommu: bool = True
    iommufd: bool = False
    group_nodes: bool = True
    """False: a kernel without VFIO_GROUP, where devices are opened only by their own nodes."""
    cdev_nodes: bool | None = None
    """Whether VFIO devices have nodes of their own; by default, they have with iommufd."""
    vfio_dev: bool = True
    """False: a kernel before 6.1, whose VFIO devices have no folder `vfio-dev`."""
    vfio_loaded: bool = True
    """False: the modules are not loaded, so there is no `/dev/vfio/vfio`."""
    missing_nodes: tuple[Group, ...] = ()
    """Groups whose nodes were deleted."""
    stray_nodes: tuple[Group, ...] = ()
    """Groups that have a node although none of their devices is on a VFIO driver."""
    egm: tuple[EgmSpec, ...] = ()
    platform: PlatformSpec = PlatformSpec()
    """The host's processor, firmware, kernel and files: all but its devices."""


class CardsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The boards that all hosts share."""

    boards: dict[str, CardSpec]


def host_names() -> tuple[str, ...]:
    """Return the names of the simulated hosts that come with gpuvirt."""
    names = (entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))
    return tuple(sorted(name for name in names if name != "boards"))


def load_host(name: str) -> HostSpec:
    """Return a simulated host by its name, or from a file where `name` is a path; raise ConfigError without one."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or path.is_absolute():
        return documents.load(path, HostSpec)
    if name not in host_names():
        meant = meant_host(name)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ConfigError(
            f"no such simulated host; there are {', '.join(host_names())}, or give the path of a host file{hint}",
            where=name,
        )
    entry = _folder() / f"{name}.yaml"
    return documents.parse(entry.read_text("utf-8"), HostSpec, where=entry.name)


def meant_host(text: str) -> str | None:
    """Return the simulated host whose name a user has probably meant: `2xA1O`, `HOST=2xA10`; None for another text."""
    return nearest(text.removeprefix("HOST="), host_names())


def shared_cards() -> dict[str, CardSpec]:
    """Return the boards that all hosts share."""
    entry = _folder() / "boards.yaml"
    return documents.parse(entry.read_text("utf-8"), CardsFile, where=entry.name).boards


def _folder() -> Traversable:
    return resources.files("gpuvirt_sim") / "hosts"

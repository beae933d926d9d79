"""Makes a host file of a host that gpuvirt has read, and reports what of the host its simulation does not show.

Each function becomes a slot with a board of one function, because functions need not have anything in common.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt import documents, plain
from gpuvirt.agent.store import hostfiles
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import VFIO_DRIVERS, FunctionKind, PciFunction, Unread, kind_of
from gpuvirt.facts.setup import Setup
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.archives.redaction import Discreet
from gpuvirt.hardware.functions import pci
from gpuvirt.hardware.host.platform import read_setup
from gpuvirt.hardware.scan import scan
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt_sim.archives.archived import ArchivedKernel
from gpuvirt_sim.archives.differences import Loss, differences, setup_differences
from gpuvirt_sim.archives.importedplatform import platform_of
from gpuvirt_sim.archives.importedvgpus import carries_of
from gpuvirt_sim.archives.unpacking import unpack
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.hostspec import (
    MOST_NUMA_NODE,
    MOST_VFS,
    CardSpec,
    EgmSpec,
    FunctionSpec,
    HostSpec,
    SlotSpec,
    shared_cards,
)

NATIVE = {
    (FunctionKind.GPU, 0x10DE): "nvidia",
    (FunctionKind.GPU, 0x1002): "amdgpu",
    (FunctionKind.GPU, 0x8086): "i915",
    (FunctionKind.NVSWITCH, 0x10DE): "nvidia-nvswitch",
    (FunctionKind.SERIAL, 0x10DE): "nvidia-gpu",
}
NATIVE_OF_ANY = {FunctionKind.AUDIO: "snd_hda_intel", FunctionKind.USB: "xhci_hcd", FunctionKind.BRIDGE: "pcieport"}
"""The drivers that a kernel would bind to a function that has none, or a VFIO driver; the host does not show them."""

_NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,63}")
_EGM = re.compile(r"egm[0-9]{1,4}")
_CDEV = re.compile(r"vfio([0-9]{1,9})")


class UnfitError(GpuvirtError):
    """A host has properties that no host file can express, or that make no consistent simulated host."""


COMMENT = """\
# Made by `gpuvirt sim import`. These values are guesses: native_driver, the driver that the kernel would bind to a
# function, where the host had no driver or a VFIO driver on it and gpuvirt had not recorded an earlier one; `size` and
# `most` of vGPU types that the host did not describe.
"""


class Imported(msgspec.Struct, frozen=True):
    """A simulated host that was made of a real host."""

    spec: HostSpec
    text: str
    """Its host file."""
    losses: tuple[Loss, ...]
    """The properties of the real host that the simulated one does not show."""


def import_archive(path: Path) -> Imported:
    """Return the simulated host of a support archive; raise DamagedError for a file that is not an archive."""
    with path.open("rb") as file:
        try:
            opened = unpack(file)
            kernel = ArchivedKernel(opened)
        except DamagedError as error:
            raise DamagedError(f"{path}: {error}") from error
    manifest = opened.manifest
    made = import_host(kernel, f"{manifest.node}, as gpuvirt {manifest.gpuvirt} read it on {manifest.at:%Y-%m-%d}")
    # A file that failed with an errno fails again here, and appears among the differences.
    missing = tuple(Loss(file.path, "not in the archive", file.why) for file in manifest.unread if file.errno is None)
    return replace(made, losses=(*made.losses, *missing))


def import_host(kernel: Kernel, about: str) -> Imported:
    """Return the simulated host that shows what `kernel` shows; raise GpuvirtError where none can be built."""
    facts = scan(kernel)
    importing = _Importing(kernel, facts, recorded=_recorded(kernel))
    gpus = [gpu.function for gpu in build_inventory(facts).gpus.values()]
    setup = _setup(kernel, gpus)
    imported = importing.host_spec(about)
    try:
        platform = platform_of(setup, lambda platform: _shown(imported, platform, gpus))
        if (version := facts.platform.nvidia_version) is not None:
            platform = replace(platform, nvidia_version=version)
        platform = replace(platform, cgroup_v2=facts.platform.cgroup_v2)
        # Parse and build the same text that a user would load.
        text = COMMENT + plain.write(msgspec.to_builtins(replace(imported, platform=platform)))
        spec = documents.parse(text, HostSpec, where="host.yaml")
        simulated = build_host(spec, where="host.yaml")
        losses = (*differences(facts, scan(simulated)), *setup_differences(setup, _setup(simulated, gpus)))
    except GpuvirtError as error:
        raise UnfitError(f"this host can't be simulated: {error}; please report it with the support archive") from error
    return Imported(spec, text, (*importing.losses, *losses))


def _setup(kernel: Kernel, gpus: Sequence[PciFunction]) -> Setup:
    """Return what doctor reads besides the devices, redacted: a host file contains nothing else."""
    return read_setup(Discreet(kernel), Facts(), gpus)


def _shown(spec: HostSpec, platform: PlatformSpec, gpus: Sequence[PciFunction]) -> Setup:
    return _setup(build_host(msgspec.structs.replace(spec, platform=platform)), gpus)


class _Importing(msgspec.Struct):
    kernel: Kernel
    facts: Facts
    losses: list[Loss] = msgspec.field(default_factory=list)
    boards: dict[str, CardSpec] = msgspec.field(default_factory=dict)
    recorded: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The drivers that functions had before gpuvirt bound them to VFIO drivers."""

    def host_spec(self, about: str) -> HostSpec:
        facts = self.facts
        vfio_functions = [function for function in facts.functions.values() if function.on_vfio]
        on_vfio = {function.iommu_group for function in vfio_functions if isinstance(function.iommu_group, int)}
        live = [vgpu for host in facts.vgpu_hosts.values() for vgpu in host.live]
        on_vfio |= {vgpu.group for vgpu in live if isinstance(vgpu.group, int)}
        container = facts.platform.vfio_container
        groupless = any(vgpu.group is None for vgpu in live)  # without VFIO_GROUP, mdevs are in no group
        group_nodes = container or bool(facts.group_nodes) or not (facts.cdev_nodes or on_vfio or groupless)
        cdevs = bool(facts.cdev_nodes) if on_vfio or facts.cdev_nodes else facts.platform.iommufd
        return HostSpec(
            about=about,
            slots=tuple(self._slots()),
            boards=self.boards,
            iommu=any(function.iommu_group is not None for function in facts.functions.values()),
            iommufd=facts.platform.iommufd,
            group_nodes=group_nodes,
            cdev_nodes=None if cdevs == facts.platform.iommufd else cdevs,
            vfio_dev=not (vfio_functions and not any(function.cdevs for function in facts.functions.values())),
            vfio_loaded=container or not group_nodes,
            missing_nodes=tuple(sorted(on_vfio - facts.group_nodes)) if group_nodes else (),
            stray_nodes=tuple(sorted(facts.group_nodes - on_vfio)),
            egm=tuple(self._egm()),
        )

    def _slots(self) -> Iterator[SlotSpec]:
        folders = {address: self._folder(address) for address in self.facts.functions}
        numbers = {
            vf: number
            for function in self.facts.functions.values()
            for number, vf in enumerate(function.virtfns, start=1)
        }

        def order(address: PciAddress) -> tuple[int, int, PciAddress]:
            """Put bridges before the functions behind them, PFs before their VFs, and VFs in the order of numbers."""
            is_vf = self.facts.functions[address].physfn is not None
            return folders[address].count("/"), numbers.get(address, MOST_VFS) if is_vf else 0, address

        for address in sorted(self.facts.functions, key=order):
            above = folders[address].split("/")[-2:-1]
            behind = next((bridge for bridge in above if bridge in self.facts.functions), None)
            yield self._slot(self.facts.functions[address], behind)

    def _folder(self, address: PciAddress) -> str:
        try:
            return self.kernel.readlink(device_path(address))
        except OSError:
            return address

    def _slot(self, function: PciFunction, behind: str | None) -> SlotSpec:
        address = function.address
        driver, group = function.driver, function.iommu_group
        if isinstance(driver, Unread) or (driver is not None and not _NAME.fullmatch(driver)):
            self._lose(
                address, "driver", f"{driver.detail if isinstance(driver, Unread) else driver}: imported as none"
            )
            driver = None
        if isinstance(group, Unread):
            self._lose(address, "IOMMU group", f"{group.detail}: imported as none")
            group = None
        if driver in VFIO_DRIVERS and group is None:
            self._lose(address, "driver", f"{driver} without an IOMMU group: imported as none")
            driver = None
        host = self.facts.vgpu_hosts.get(address)
        carries, losses = carries_of(self.kernel, host, self.facts) if host is not None else (None, ())
        self.losses += losses
        return SlotSpec(
            at=address,
            board=self._card(function, driver),
            driver=driver or "none",
            group=group,
            numa=self._numa_node(function),
            behind=behind,
            vf_of=function.physfn if function.physfn in self.facts.functions else None,
            cdev=next((int(found[1]) for name in function.cdevs if (found := _CDEV.fullmatch(name))), None),
            fell_off_bus=function.fell_off_bus,
            carries=carries,
        )

    def _card(self, function: PciFunction, driver: str | None) -> str:
        """Return the name of the board with this one function, and add the board where it is missing."""
        board = CardSpec(
            functions=(
                FunctionSpec(
                    id=str(function.id),
                    class_code=f"{function.class_code:06x}",
                    subsystem=self._subsystem(function),
                    revision=self._revision(function),
                    native_driver=self._native(function, driver),
                ),
            ),
            total_vfs=None if function.sriov_total_vfs is None else min(function.sriov_total_vfs, MOST_VFS),
        )
        ids = str(function.id).replace(":", "-")
        for number in range(1, len(self.boards) + 2):
            name = ids if number == 1 else f"{ids}-{number}"
            if self.boards.setdefault(name, board) == board:
                return name
        raise AssertionError(ids)

    def _native(self, function: PciFunction, driver: str | None) -> str | None:
        if driver and driver not in VFIO_DRIVERS:
            return driver
        recorded = self.recorded.get(function.address, "")
        return recorded if _NAME.fullmatch(recorded) and recorded not in VFIO_DRIVERS else _native(function)

    def _subsystem(self, function: PciFunction) -> str | None:
        if function.subsystem is not None:
            return str(function.subsystem)
        ids = [
            self._value(function, name, attributes.pci_id) if _is_plain(function) else None
            for name in ("subsystem_vendor", "subsystem_device")
        ]
        return f"{ids[0]:04x}:{ids[1]:04x}" if ids[0] is not None and ids[1] is not None else None

    def _revision(self, function: PciFunction) -> str | None:
        plain = self._value(function, "revision", attributes.pci_revision) if _is_plain(function) else None
        revision = function.revision if function.revision is not None else plain
        return None if revision is None else f"{revision:02x}"

    def _numa_node(self, function: PciFunction) -> int:
        plain = self._value(function, "numa_node", attributes.numa_node) if _is_plain(function) else None
        node = function.numa_node if function.numa_node is not None else plain
        return -1 if node is None else min(node, MOST_NUMA_NODE)

    def _value(self, function: PciFunction, name: str, parse: Callable[[str], int]) -> int | None:
        """Return an attribute that the facts leave out for functions that matter only for their IOMMU group."""
        found = attributes.parsed(self.kernel, pci.attribute(function.address, name), parse)
        return found if isinstance(found, int) else None

    def _egm(self) -> Iterator[EgmSpec]:
        for region in self.facts.platform.egm:
            name = region.node.rpartition("/")[2]
            if _EGM.fullmatch(name):
                yield EgmSpec(name=name, gpus=tuple(sorted(region.gpus)))

    def _lose(self, where: str, what: str, why: str) -> None:
        self.losses.append(Loss(where, what, why))


def _is_plain(function: PciFunction) -> bool:
    """Return whether a scan reads only the identity of such a function."""
    return function.kind in {FunctionKind.OTHER, FunctionKind.BRIDGE}


def _recorded(kernel: Kernel) -> Mapping[PciAddress, str]:
    try:
        return hostfiles.JOURNAL_FORMAT.decode(
            kernel.read(hostfiles.DRIVERS, limit=attributes.FILE_BYTES)
        ).value.drivers
    except (OSError, DamagedError):
        return {}


@cache
def _shared() -> Mapping[str, str]:
    """Return the native drivers on the shared boards, by PCI id."""
    functions = [function for board in shared_cards().values() for function in board.functions]
    return {function.id: function.native_driver for function in functions if function.native_driver is not None}


def _native(function: PciFunction) -> str | None:
    kind = kind_of(function.class_code, function.id.vendor)
    return _shared().get(str(function.id)) or NATIVE.get((kind, function.id.vendor)) or NATIVE_OF_ANY.get(kind)

"""Copies the files of a host that describe its devices, and those that doctor reads, each at its own path.

This module names each file; no folder is walked blindly. Files whose read can sleep or acts on the device are left out.
`driver_override`, `uevent`, `sriov_numvfs` and `sriov_vf_total_msix` take the device's lock (as of 6.12); a process
that unbinds the device has that lock for as long as a VM uses the device. The links show the number of VFs. `vpd` and
`rom` act on the device, and `vpd` has serial numbers.
"""

import errno
import re
from collections.abc import Iterable, Mapping
from posixpath import basename, dirname

import msgspec

from gpuvirt.archive import Entry, Folder, Symlink
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciAddress, is_mdev_uuid, parse_pci_address, slot_of
from gpuvirt.facts.pci import FunctionKind, Unread, kind_of
from gpuvirt.facts.platform import Attribute, Listing, Presence, SymbolicLink
from gpuvirt.facts.setup import Part, parts
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import IOMMU_GROUPS, MDEV_PARENTS, MDEVS, PCI_DEVICES, device_path, mdev_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, Kernel
from gpuvirt.hardware.archives import redaction
from gpuvirt.hardware.archives.redaction import Discreet
from gpuvirt.hardware.functions import iommu, pci
from gpuvirt.hardware.host.platform import MODULES, read_setup
from gpuvirt.paths import HostPath

TEXT_BYTES = 1 << 20

_SAFE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.:@+]{0,127}")
"""Names in sysfs that are safe as file names of an archive; others are reported."""


def is_safe(name: str) -> bool:
    """Return whether a name is safe as the name of a file in an archive."""
    return bool(_SAFE.fullmatch(name))


class Copying(msgspec.Struct):
    """A copy in progress. A file that is read through a link is stored under the link's target, as on the host."""

    kernel: Kernel
    members: dict[HostPath, Entry] = msgspec.field(default_factory=dict)
    unread: list[Unread] = msgspec.field(default_factory=list)

    def names(self, path: HostPath, place: HostPath | None = None) -> list[str]:
        """Return the safe names in a folder, none where it does not exist; `place` is the folder's path in the copy."""
        found = attributes.names(self.kernel, path)
        if isinstance(found, Unread):
            self.unread.append(found)
        if found is None or isinstance(found, Unread):
            return []
        if place is not None:
            self.members.setdefault(place, Folder())
        unsafe = [name for name in found if not is_safe(name)]
        self.unread += (Unread(HostPath(f"{path}/{name}"), seen="a name that no device has") for name in unsafe)
        return [name for name in found if name not in unsafe]

    def files(self, here: HostPath, place: HostPath, names: Iterable[str]) -> None:
        """Copy files of the folder `here`, whose path in the copy is `place`."""
        for name in names:
            self.file(HostPath(f"{here}/{name}"), HostPath(dirname(f"{place}/{name}")))

    def file(self, path: HostPath, place: HostPath, limit: int = ATTRIBUTE_BYTES) -> None:
        """Copy an existing file into the folder `place`."""
        try:
            self.members[HostPath(f"{place}/{basename(path)}")] = self.kernel.read(path, limit=limit)
        except OSError as error:
            self.unread.append(Unread(path, errno=error.errno))

    def text(self, path: HostPath) -> None:
        """Copy a file that may be absent."""
        try:
            self.members[path] = self.kernel.read(path, limit=TEXT_BYTES)
        except OSError as error:
            if error.errno not in attributes.ABSENT:
                self.unread.append(Unread(path, errno=error.errno))

    def link(self, path: HostPath, place: HostPath | None = None) -> str | None:
        """Copy a link and return its target, None where it could not be copied."""
        try:
            target = self.kernel.readlink(path)
        except OSError as error:
            self.unread.append(Unread(path, errno=error.errno))
            return None
        inside = HostPath(f"{place}/{basename(path)}") if place is not None else path
        if target.startswith("/") or not target.isprintable() or not joined(HostPath(dirname(inside)), target):
            self.unread.append(Unread(path, seen=f"a link to {target[:60]}, out of /sys"))
            return None
        self.members[inside] = Symlink(target)
        return target

    def entry(self, path: HostPath) -> HostPath:
        """Copy a device's link in a bus or class, and return the folder of the device itself."""
        try:
            self.kernel.readlink(path)
        except OSError as error:
            if error.errno == errno.EINVAL:  # the entry is the folder itself, not a link
                return path
        target = self.link(path)
        return joined(HostPath(dirname(path)), target) if target else path


def joined(folder: HostPath, target: str) -> HostPath:
    """Return the path to which a relative link in `folder` leads; an empty path where it leaves the root."""
    parts = [part for part in folder.split("/") if part]
    for part in target.split("/"):
        if part == "..":
            if not parts:
                return HostPath("")
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    return HostPath("/" + "/".join(parts))


IDS = ("vendor", "device", "class")
LINKS = ("driver", "iommu_group", "physfn")
WHOLE = (
    *("subsystem_vendor", "subsystem_device", "revision", "numa_node", "local_cpulist", "resource", "reset_method"),
    *("boot_vga", "enable", "power_state", "sriov_totalvfs", "sriov_offset", "sriov_stride", "sriov_vf_device"),
    "sriov_drivers_autoprobe",
)
"""The files that are copied of GPUs and the functions beside them, besides ids, links and `config`."""
VGPU_FILES = ("nvidia/creatable_vgpu_types", "nvidia/current_vgpu_type")
TYPE_FILES = ("name", "description", "device_api", "available_instances")
IOMMU_CLASS = HostPath("/sys/class/iommu")
IOMMU_FILES = ("intel-iommu/version", "intel-iommu/cap", "intel-iommu/ecap", "amd-iommu/cap", "amd-iommu/features")
SINGLE_FILES = (
    HostPath("/proc/modules"),
    HostPath("/proc/version"),
    HostPath("/proc/sys/kernel/random/boot_id"),
    HostPath("/proc/driver/nvidia/version"),
    HostPath("/sys/module/nvidia/version"),
    HostPath("/sys/fs/cgroup/cgroup.controllers"),
)
"""Files that are copied unchanged."""
HEADER_BYTES = 64
"""The part of configuration space that unprivileged processes may read; some cards fail beyond it (lspci(8), -xxx)."""
CONFIG_BYTES = 256
LEFT_OUT: Mapping[str, str] = {
    "driver_override, uevent, sriov_numvfs, sriov_vf_total_msix": "reading them can hang while a device is unbound",
    "type, reserved_regions (of IOMMU groups)": "reading them waits while a process changes the group",
    "vpd, rom": "reading them acts on the device; vpd has serial numbers",
    "configuration space": f"{CONFIG_BYTES} bytes are copied of GPUs and NVSwitches, {HEADER_BYTES} of others",
    "other PCI functions": "only ids, class, driver and IOMMU group are copied of functions unrelated to GPUs",
    "processes": "only node.json and doctor.json list the processes that have a device open",
    **redaction.LEFT_OUT,
}
"""The data that a copy leaves out on purpose, with the reason."""
_NODE = re.compile(r"iommu|kvm|egm[0-9]+")
_VIRTFN = re.compile(r"virtfn[0-9]+")

LAID_OUT = ("/sys/class/iommu", "/sys/kernel/iommu_groups", "/sys/bus/pci/devices/")
"""The folders that are copied with the devices, including links."""
SCREENS = "/sys/class/graphics/"
OF_FOLDERS = ("/sys/module", "/sys/class/iommu")
"""Folders whose entries are folders; the entries of others are files."""
NODES = HostPath("/sys/devices/system/node")
UNSAFE = "a name that is not safe in an archive"
_NUMA_NODE = re.compile(r"node[0-9]{1,4}")


def copy_platform(copying: Copying) -> None:
    """Copy the files that `read_setup` reads, and list those that it could not read."""
    setup = read_setup(copying.kernel, Facts(), ())
    for part in parts(setup).values():
        if not part.path.startswith(LAID_OUT):
            _copy(copying, part)
    for name in copying.names(NODES):
        if _NUMA_NODE.fullmatch(name):
            copying.file(HostPath(f"{NODES}/{name}/cpulist"), HostPath(f"{NODES}/{name}"))


def _copy(copying: Copying, part: Part) -> None:
    target = part.target if isinstance(part, SymbolicLink) else None
    names = part.path.split("/")[1:] + ([target] if isinstance(target, str) else [])
    if not all(map(is_safe, names)):
        copying.unread.append(Unread(part.path, seen=UNSAFE))
    elif (unread := _unread(part)) is None:
        _copy_read(copying, part)
    elif unread.errno is None:
        copying.text(part.path)  # the file can be read, but not parsed
    else:
        copying.unread.append(unread)


def _unread(part: Part) -> Unread | None:
    match part:
        case Attribute(_, Unread() as unread) | Listing(_, Unread() as unread) | SymbolicLink(_, Unread() as unread):
            return unread
        case Presence(_, Unread() as unread):
            return unread
        case _:
            return None


def _copy_read(copying: Copying, part: Part) -> None:
    match part:
        case Attribute(path, str(text)):
            copying.members[path] = f"{text}\n".encode()
        case Attribute(path, None) if path.startswith(SCREENS):
            copying.members.setdefault(HostPath(dirname(path)), Folder())  # a framebuffer may have no name
        case Listing(path, tuple(names)) if path.startswith(MODULES):
            copying.members[path] = "".join(f"{name}.ko:\n" for name in names).encode()
        case Listing(path, tuple(names)):
            _copy_names(copying, path, names)
        case SymbolicLink(path, str(target)):
            copying.members[path] = Symlink(f"../../../{target}")
        case Presence(path, exists=True):
            copying.members[path] = Folder() if path.endswith("/entries") else b""
        case _:  # the file does not exist
            return


def _copy_names(copying: Copying, path: HostPath, names: tuple[str, ...]) -> None:
    copying.members.setdefault(path, Folder())
    for name in names:
        if is_safe(name):
            copying.members.setdefault(HostPath(f"{path}/{name}"), Folder() if path in OF_FOLDERS else b"")
        else:
            copying.unread.append(Unread(HostPath(f"{path}/{name}"), seen=UNSAFE))


class HostCopy(msgspec.Struct, frozen=True):
    """Files of a host by their paths on the host, and the files that could not be read."""

    members: Mapping[HostPath, Entry]
    unread: tuple[Unread, ...]


def copy_host(kernel: Kernel) -> HostCopy:
    """Return a copy of the host's files, with the list of files that could not be read; write nothing."""
    copying = _HostCopying(Discreet(kernel))
    copying.pci()
    copying.groups()
    copying.mdevs()
    copying.nodes()
    for path in SINGLE_FILES:
        copying.text(path)
    copy_platform(copying)
    return HostCopy(copying.members, tuple(copying.unread))


class _HostCopying(Copying):
    """A copy of the files that describe the devices."""

    def pci(self) -> None:
        classes: dict[PciAddress, int | None] = {}
        folders: dict[PciAddress, HostPath] = {}
        groups: dict[PciAddress, str | None] = {}
        for name in self.names(PCI_DEVICES, PCI_DEVICES):
            try:
                address = parse_pci_address(name)
            except InvalidIdError:
                self.link(device_path(name))
                continue
            here = device_path(address)
            folders[address] = self.entry(here)
            found = attributes.parsed(self.kernel, HostPath(f"{here}/class"), attributes.pci_class)
            classes[address] = found if isinstance(found, int) else None
            groups[address] = self.identity(here, folders[address])
        for address in _of_interest(classes, folders, groups):
            self.whole(address, folders[address], is_gpu=_is_gpu(self.kernel, address, classes[address]))

    def identity(self, here: HostPath, folder: HostPath) -> str | None:
        """Copy the ids, the links and the VFIO nodes of a function, and return its IOMMU group."""
        entries = self.names(here, folder)
        self.files(here, folder, [name for name in IDS if name in entries])
        targets = {name: self.link(HostPath(f"{here}/{name}"), folder) for name in LINKS if name in entries}
        if driver := targets.get("driver"):
            self.members.setdefault(joined(folder, driver), Folder())
        self.cdevs(here, folder, entries)
        group = targets.get("iommu_group")
        return basename(group) if group is not None else None

    def whole(self, address: PciAddress, folder: HostPath, *, is_gpu: bool) -> None:
        """Copy the files in `WHOLE` and further files of a GPU, or of a function beside a GPU."""
        here = device_path(address)
        entries = self.names(here, folder)
        self.files(here, folder, [name for name in WHOLE if name in entries])
        if "config" in entries:
            self.file(HostPath(f"{here}/config"), folder, CONFIG_BYTES if is_gpu else HEADER_BYTES)
        if "reset" in entries:  # the file cannot be read; its existence shows that the function can be reset
            self.members[HostPath(f"{folder}/reset")] = b""
        for name in filter(_VIRTFN.fullmatch, entries):
            self.link(HostPath(f"{here}/{name}"), folder)
        if "nvidia" in entries and "physfn" in entries:
            inner = self.names(HostPath(f"{here}/nvidia"), HostPath(f"{folder}/nvidia"))
            self.files(here, folder, [name for name in VGPU_FILES if name.partition("/")[2] in inner])

    def cdevs(self, here: HostPath, folder: HostPath, entries: Iterable[str]) -> None:
        if "vfio-dev" in entries:
            place = HostPath(f"{folder}/vfio-dev")
            for name in self.names(HostPath(f"{here}/vfio-dev"), place):
                self.members[HostPath(f"{place}/{name}")] = Folder()

    def groups(self) -> None:
        for group in self.names(IOMMU_GROUPS, IOMMU_GROUPS):
            devices = HostPath(f"{IOMMU_GROUPS}/{group}/devices")
            for device in self.names(devices, devices):
                self.link(HostPath(f"{devices}/{device}"))
        for name in self.names(IOMMU_CLASS, IOMMU_CLASS):
            here = HostPath(f"{IOMMU_CLASS}/{name}")
            place = self.entry(here)
            self.members.setdefault(place, Folder())
            for kind in ("intel-iommu", "amd-iommu"):
                found = self.names(HostPath(f"{here}/{kind}"))
                self.files(here, place, [file for file in IOMMU_FILES if file in {f"{kind}/{name}" for name in found}])

    def mdevs(self) -> None:
        for parent in self.names(MDEV_PARENTS, MDEV_PARENTS):
            here = HostPath(f"{MDEV_PARENTS}/{parent}")
            place = self.entry(here)
            types = "mdev_supported_types"
            for type_id in self.names(HostPath(f"{here}/{types}"), HostPath(f"{place}/{types}")):
                inner, folder = HostPath(f"{here}/{types}/{type_id}"), HostPath(f"{place}/{types}/{type_id}")
                found = self.names(inner, folder)
                self.files(inner, folder, [name for name in TYPE_FILES if name in found])
        for device in self.names(MDEVS, MDEVS):
            here = mdev_path(device)
            place = self.entry(here)
            if not is_mdev_uuid(device):
                continue
            entries = self.names(here, place)
            for name in ("mdev_type", "iommu_group", "driver"):
                if name in entries:
                    self.link(HostPath(f"{here}/{name}"), place)
            self.cdevs(here, place, entries)

    def nodes(self) -> None:
        """Copy the device nodes as empty files."""
        for folder in (iommu.VFIO, iommu.CDEVS):
            for name in self.names(folder, folder):
                if name != "devices":
                    self.members[HostPath(f"{folder}/{name}")] = b""
        nodes = attributes.names(self.kernel, HostPath("/dev"))
        self.unread += (found for found in (nodes,) if isinstance(found, Unread))
        for name in filter(_NODE.fullmatch, nodes if isinstance(nodes, list) else ()):
            self.members[HostPath(f"/dev/{name}")] = b""
        if iommu.exists(self.kernel, iommu.IOMMUFD_CLASS) is True:
            self.members[iommu.IOMMUFD_CLASS] = Folder()
        for region in self.names(iommu.CLASS, iommu.CLASS):
            here = HostPath(f"{iommu.CLASS}/{region}")
            found = self.names(here, here)
            self.files(here, here, [name for name in ("gpu_devices",) if name in found])


def _of_interest(
    classes: Mapping[PciAddress, int | None],
    folders: Mapping[PciAddress, HostPath],
    groups: Mapping[PciAddress, str | None],
) -> list[PciAddress]:
    """Return display controllers, accelerators, NVSwitches, all functions of their slots and IOMMU groups, and the
    bridges above them."""
    slots = {slot_of(address) for address, code in classes.items() if _may_be_gpu(code)}
    of_slots = [address for address in classes if slot_of(address) in slots]
    shared = {groups[address] for address in of_slots} - {None}
    members = [address for address in classes if address in of_slots or groups[address] in shared]
    above = {name for address in members for name in folders[address].split("/")}
    return [address for address in classes if address in above or address in members]


def _may_be_gpu(code: int | None) -> bool:
    return code is None or code >> 16 in {0x03, 0x12} or code >> 8 == 0x0680


def _is_gpu(kernel: Kernel, address: PciAddress, code: int | None) -> bool:
    vendor = attributes.parsed(kernel, pci.attribute(address, "vendor"), attributes.pci_id)
    return (
        code is not None
        and isinstance(vendor, int)
        and kind_of(code, vendor) in {FunctionKind.GPU, FunctionKind.NVSWITCH}
    )

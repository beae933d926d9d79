"""Reads the host besides its devices for `gpuvirt doctor`: firmware, kernel, modules, boot loader, runtimes.

No file is read whose read sleeps while a process waits for a device to be unbound: neither `uevent` nor
`driver_override`, nor `sriov_numvfs`, which takes the device's lock in many kernels (6.1 among them; the links of the
VFs show the same number). `reset_method` is read of bound functions only, in a thread that can be abandoned.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from errno import ETIMEDOUT

from msgspec.structs import asdict

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.platform import Attribute, Framebuffer, FunctionSetup, Listing, Presence, SymbolicLink
from gpuvirt.facts.setup import KernelSetup, Setup
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import IOMMU_GROUPS
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.attributes import read_attribute, read_listing
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import iommu, pci
from gpuvirt.hardware.host.runtimes import KATA_FOLDERS, read_cdi_specs, read_kata, read_runtimes
from gpuvirt.paths import HostPath

PINS = HostPath("/etc/driverctl.d")
"""driverctl has one file for each function: `pci-ADDRESS`, in older versions `ADDRESS`."""


def read_pins(kernel: Kernel, addresses: Iterable[PciAddress]) -> Mapping[PciAddress, str]:
    """Return the driver that driverctl binds each function to, for the functions in its configuration."""
    names = attributes.names(kernel, PINS)
    if not isinstance(names, list):
        return {}
    found = {
        address: attributes.text(kernel, HostPath(f"{PINS}/{name}"))
        for address in addresses
        for name in (f"pci-{address}", address)
        if name in names
    }
    return {address: driver for address, driver in found.items() if isinstance(driver, str) and driver}


MODULES = "/lib/modules"
IRQS = "/sys/kernel/irq"
MOST_IRQS = 4096
PATIENCE_S = 2.0
FRAMEBUFFER = re.compile(r"fb[0-9]+")

MODPROBE_FOLDERS = tuple(
    map(HostPath, ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"))
)
BOOT_FILES = tuple(
    map(
        HostPath,
        (
            "/etc/default/grub",
            "/usr/sbin/update-grub",
            "/boot/grub2/grub.cfg",
            "/boot/grub/grub.cfg",
            "/usr/sbin/grubby",
            "/usr/bin/grubby",
            "/boot/loader/entries",
            "/boot/efi/loader/entries",
            "/efi/loader/entries",
            "/etc/kernel/cmdline",
            "/etc/kernel/proxmox-boot-uuids",
            "/run/ostree-booted",
            "/usr/bin/rpm-ostree",
            "/usr/sbin/update-initramfs",
            "/usr/bin/dracut",
        ),
    )
)
VFIO_PARAMETERS = tuple(
    HostPath(f"/sys/module/vfio_pci/parameters/{name}") for name in ("ids", "disable_vga", "enable_sriov")
)


def read_kernel(kernel: Kernel) -> KernelSetup:
    """Return the kernel of a host, with its modules and its boot loader."""
    release = read_attribute(kernel, "/proc/sys/kernel/osrelease")
    modules = f"{MODULES}/{release.text if release.text and '/' not in release.text else 'unknown'}"
    folders = tuple(read_listing(kernel, folder) for folder in MODPROBE_FOLDERS)
    return KernelSetup(
        cmdline=read_attribute(kernel, "/proc/cmdline"),
        release=release,
        os_release=read_attribute(kernel, "/etc/os-release"),
        boot_files=tuple(Presence(path, iommu.exists(kernel, path)) for path in BOOT_FILES),
        modules=read_listing(kernel, "/sys/module"),
        builtin_modules=_modules(kernel, f"{modules}/modules.builtin"),
        available_modules=_modules(kernel, f"{modules}/modules.dep"),
        modprobe=tuple(_files(kernel, folders, ".conf")),
        modprobe_folders=folders,
    )


def read_setup(kernel: Kernel, facts: Facts, gpus: Iterable[PciFunction]) -> Setup:
    """Return the setup of a host; more files are read of the functions in `gpus`."""
    gpus = tuple(gpus)
    iommus = read_listing(kernel, "/sys/class/iommu")
    runtimes = tuple(read_runtimes(kernel))
    kata = tuple(read_kata(kernel, runtimes))
    cdi_folders, cdi_specs = read_cdi_specs(kernel) if kata else ((), ())
    return Setup(
        **asdict(read_kernel(kernel)),
        cpu=_first_processor(kernel),
        dmi=read_attribute(kernel, "/sys/class/dmi/id/product_name"),
        acpi_tables=read_listing(kernel, "/sys/firmware/acpi/tables"),
        iommus=iommus,
        iommu_groups=read_listing(kernel, IOMMU_GROUPS),
        ecaps=tuple(
            read_attribute(kernel, f"{iommus.path}/{name}/intel-iommu/ecap")
            for name in iommus.known
            if name.startswith("dmar")
        ),
        irq_chips=_irq_chips(kernel),
        unsafe_interrupts=read_attribute(kernel, "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"),
        kvm=Presence(HostPath("/dev/kvm"), iommu.exists(kernel, HostPath("/dev/kvm"))),
        vfio_parameters=tuple(read_attribute(kernel, path) for path in VFIO_PARAMETERS),
        framebuffers=tuple(_framebuffers(kernel)),
        runtimes=runtimes,
        kata=kata,
        kata_folders=tuple(read_listing(kernel, folder) for folder in KATA_FOLDERS) if runtimes and not kata else (),
        cdi_folders=cdi_folders,
        cdi_specs=cdi_specs,
        functions={gpu.address: _function(kernel, gpu) for gpu in gpus},
        numa_cpus={
            node: read_attribute(kernel, f"/sys/devices/system/node/node{node}/cpulist")
            for node in sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
        },
        allowed_cpus=_allowed_cpus(kernel, facts),
    )


def _first_processor(kernel: Kernel) -> Attribute:
    """Return the first processor in `/proc/cpuinfo`; the limit cuts the file off within a later processor."""
    path = HostPath("/proc/cpuinfo")
    try:
        content = kernel.read(path, limit=1 << 16)
    except OSError as error:
        return Attribute(path, None if error.errno in attributes.ABSENT else Unread(path, errno=error.errno))
    return Attribute(path, content.partition(b"\n\n")[0].decode(errors="replace").strip())


def _irq_chips(kernel: Kernel) -> tuple[Attribute, ...] | Unread | None:
    """Return the first interrupt chip of the host, and its first chip that remaps interrupts."""
    irqs = read_listing(kernel, IRQS)
    if not isinstance(irqs.names, tuple):
        return irqs.names
    found: list[Attribute] = []
    for irq in irqs.names[:MOST_IRQS]:
        chip = read_attribute(kernel, f"{irqs.path}/{irq}/chip_name")
        remaps = chip.text is not None and chip.text.startswith("IR-")
        if chip.text and (remaps or not found):
            found.append(chip)
        if remaps:
            break
    return tuple(found)


def _modules(kernel: Kernel, path: str) -> Listing:
    """Return the names of the modules in a list of module files: `kernel/drivers/vfio/pci/vfio-pci.ko.xz: ...`."""
    content = read_attribute(kernel, path, limit=attributes.FILE_BYTES)
    if content.text is None:
        return Listing(content.path, content.value if isinstance(content.value, Unread) else None)
    files = (line.partition(":")[0].rpartition("/")[2] for line in content.text.splitlines())
    names = sorted({file.partition(".ko")[0].replace("-", "_") for file in files if ".ko" in file})
    return Listing(content.path, tuple(map(attributes.legible, names)))


def read_modprobe(kernel: Kernel) -> tuple[Attribute, ...]:
    """Return modprobe's files, and as Unread the folders that cannot be listed."""
    folders = [attributes.read_listing(kernel, path) for path in MODPROBE_FOLDERS]
    unlisted = (Attribute(folder.path, folder.names) for folder in folders if isinstance(folder.names, Unread))
    return (*_files(kernel, folders, ".conf"), *unlisted)


def _files(kernel: Kernel, folders: Iterable[Listing], suffix: str) -> Iterator[Attribute]:
    """Yield the files in folders; of files with the same name, the one in the first folder counts."""
    seen: set[str] = set()
    for folder in folders:
        for name in folder.known:
            if name.endswith(suffix) and name not in seen:
                seen.add(name)
                yield read_attribute(kernel, f"{folder.path}/{name}", limit=attributes.FILE_BYTES)


def _framebuffers(kernel: Kernel) -> Iterator[Framebuffer]:
    folder = read_listing(kernel, "/sys/class/graphics")
    for name in folder.known:
        if FRAMEBUFFER.fullmatch(name):
            path = HostPath(f"{folder.path}/{name}/device")
            device = SymbolicLink(path, attributes.link_name(kernel, path))
            yield Framebuffer(read_attribute(kernel, f"{folder.path}/{name}/name"), device)


def _function(kernel: Kernel, gpu: PciFunction) -> FunctionSetup:
    methods = pci.attribute(gpu.address, "reset_method")
    reset = pci.attribute(gpu.address, "reset")
    bound = isinstance(gpu.driver, str)
    return FunctionSetup(
        resource=read_attribute(kernel, pci.attribute(gpu.address, "resource")),
        boot_vga=read_attribute(kernel, pci.attribute(gpu.address, "boot_vga")),
        reset_method=_patiently(methods, lambda: read_attribute(kernel, methods)) if bound else None,
        reset=Presence(reset, iommu.exists(kernel, reset)),
    )


def _patiently(path: HostPath, read: Callable[[], Attribute]) -> Attribute:
    """Return the result of `read`, Unread where it sleeps: the device's lock may be held while the device is in use."""
    found: list[Attribute] = []
    reading = threading.Thread(target=lambda: found.append(read()), name="doctor", daemon=True)
    reading.start()
    reading.join(PATIENCE_S)
    return found[0] if found else Attribute(path, Unread(path, errno=ETIMEDOUT))


def _allowed_cpus(kernel: Kernel, facts: Facts) -> Mapping[int, Attribute]:
    pids = sorted({user.pid for users in (facts.users or {}).values() for user in users})
    return {pid: _allowed(kernel, pid) for pid in pids}


def _allowed(kernel: Kernel, pid: int) -> Attribute:
    status = read_attribute(kernel, f"/proc/{pid}/status")
    if status.text is None:
        return status
    lines = (line.partition(":") for line in status.text.splitlines())
    return Attribute(
        status.path, next((value.strip() for name, _, value in lines if name == "Cpus_allowed_list"), None)
    )

"""The platform of a simulated host: processor, firmware, kernel, modules and boot loader, as files that doctor reads.

By default everything is healthy, so that a host file contains only the faults.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.facts.ids import PciAddress, parse_pci_address
from gpuvirt.facts.pci import GRACE_DRIVER, GRACE_IDS
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.function import resource
from gpuvirt_sim.devices.pci import PciBus
from gpuvirt_sim.files.tree import DeviceNode, File, Folder, Link, Tree, constant

MODULES = "/sys/module"
NVIDIA_VERSION = "580.159.04"
NULL = 1 << 8 | 3
KVM = 10 << 8 | 232
CPUS_OF_A_NODE = 16
FLAGS = "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat clflush mmx fxsr sse sse2 ht syscall nx lm"
ECAP = 0xF020DF
"""Extended capabilities of a Xeon's IOMMU: interrupt remapping (bit 3) and x2APIC (bit 4) among others."""

USUAL_TABLES = ("FACP", "APIC")
"""ACPI tables that every firmware has."""

ABSOLUTE_PATH = r"^/(?:[A-Za-z0-9][-A-Za-z0-9_.:@+]{0,127}/){0,9}[A-Za-z0-9][-A-Za-z0-9_.:@+]{0,127}\Z"
AbsolutePath = Annotated[str, Meta(pattern=ABSOLUTE_PATH)]
LinkedName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.:@+]{0,127}\Z")]
ScreenNumber = Annotated[int, Meta(ge=0, le=63)]


class Cpu(StrEnum):
    """The vendor of a host's processor."""

    INTEL = "intel"
    AMD = "amd"
    ARM = "arm"


class Boot(StrEnum):
    """The boot loader, or other program, that keeps the kernel's command line."""

    GRUB = "grub"
    GRUB2 = "grub2"
    BLS = "bls"
    TALOS = "talos"
    SYSTEMD_BOOT = "systemd-boot"
    OSTREE = "ostree"
    PROXMOX = "proxmox"
    NONE = "none"


class ScreenSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A framebuffer of the kernel."""

    number: ScreenNumber = 0
    """Its number: 1 for `fb1`."""
    name: str | None = None
    """The driver of the framebuffer: `EFI VGA`, `nouveaudrmfb`."""
    device: LinkedName | None = None
    """The device of the framebuffer: an address, `efi-framebuffer.0`."""


class PlatformSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The `platform` of a host file."""

    cpu: Cpu = Cpu.INTEL
    virtualization: bool = True
    """Whether the processor has vmx or svm."""
    hypervisor: bool = False
    """Whether the host is itself a VM."""
    product: str = "PowerEdge R750"
    cmdline: str | None = None
    """The kernel's command line; by default the options that the processor's IOMMU needs, where the host has one."""
    release: str = "6.8.0-31-generic"
    boot: Boot = Boot.GRUB
    kvm: bool = True
    acpi: tuple[str, ...] | None = None
    """The firmware's ACPI tables that describe an IOMMU; by default the processor's, where the host has one."""
    interrupt_remapping: bool = True
    unsafe_interrupts: bool = False
    modules: tuple[str, ...] | None = None
    """Loaded modules; by default VFIO's, KVM's and those of the drivers that are bound to a function."""
    nvidia_version: str = NVIDIA_VERSION
    """The version of NVIDIA's driver, where its module is loaded."""
    cgroup_v2: bool = True
    """Whether control groups are of version 2 alone."""
    available: tuple[str, ...] = ("vfio-pci", "vfio_iommu_type1", "nouveau", "kvm-intel", "kvm-amd")
    """Modules that can be loaded. With `nvgrace_gpu_vfio_pci` the driver for Grace GPUs is the best for them."""
    console: str | None = None
    """The address of the GPU on which the firmware shows its screen."""
    screen: str = "EFI VGA"
    """The driver of the console's framebuffer."""
    without_reset: tuple[str, ...] = ()
    """Addresses of functions for which the kernel has no reset method."""
    bars_unassigned: tuple[str, ...] = ()
    """Addresses of functions whose large BAR has no address."""
    screens: tuple[ScreenSpec, ...] = ()
    """The kernel's framebuffers, where `console` and `screen` can't express them."""
    missing: tuple[AbsolutePath, ...] = ()
    """Files and folders that a host has by default and this one does not have."""
    folders: tuple[AbsolutePath, ...] = ()
    """Additional folders."""
    files: dict[AbsolutePath, str] = {}
    """Additional files, such as `/etc/modprobe.d/vfio.conf`; they replace existing ones."""


BOOT_FILES: dict[Boot, dict[str, str]] = {
    Boot.GRUB: {
        "/etc/default/grub": 'GRUB_CMDLINE_LINUX=""\n',
        "/usr/sbin/update-grub": "",
        "/usr/sbin/update-initramfs": "",
        "/etc/os-release": "ID=debian\n",
    },
    Boot.GRUB2: {"/etc/default/grub": "", "/boot/grub2/grub.cfg": "", "/etc/os-release": 'ID="opensuse-leap"\n'},
    Boot.BLS: {
        "/etc/default/grub": "",
        "/boot/grub2/grub.cfg": "",
        "/usr/sbin/grubby": "",
        "/usr/bin/dracut": "",
        "/boot/loader/entries/linux.conf": "",
        "/etc/os-release": 'ID="rhel"\n',
    },
    Boot.TALOS: {"/etc/os-release": 'NAME="Talos"\nID=talos\n'},
    Boot.SYSTEMD_BOOT: {"/boot/loader/entries/linux.conf": "", "/etc/os-release": "ID=arch\n"},
    Boot.OSTREE: {"/run/ostree-booted": "", "/usr/bin/rpm-ostree": "", "/etc/os-release": 'ID="rhcos"\n'},
    Boot.PROXMOX: {
        "/etc/kernel/proxmox-boot-uuids": "",
        "/etc/kernel/cmdline": "root=ZFS=rpool/ROOT/pve-1\n",
        "/etc/os-release": "ID=debian\n",
    },
    Boot.NONE: {},
}


def place_platform(tree: Tree, bus: PciBus, spec: PlatformSpec, *, iommu: bool, has_manager: bool) -> None:
    """Put a host's files into its tree; `iommu`: whether its devices are in IOMMU groups; `has_manager`: whether
    NVIDIA's vGPU manager drives a GPU."""
    tables = spec.acpi if spec.acpi is not None else (_TABLES[spec.cpu],) if iommu else ()
    for table in (*USUAL_TABLES, *tables):
        tree.place(HostPath(f"/sys/firmware/acpi/tables/{table}"), File(read=lambda: b"table"))
    _place_cpu(tree, spec)
    _place_iommu(tree, spec, iommu=iommu)
    cmdline = spec.cmdline if spec.cmdline is not None else _cmdline(spec, iommu=iommu)
    _texts(
        tree,
        {
            "/proc/cmdline": f"BOOT_IMAGE=/boot/vmlinuz-{spec.release} root=/dev/sda2 ro {cmdline}".rstrip(),
            "/proc/sys/kernel/osrelease": spec.release,
            "/sys/class/dmi/id/product_name": spec.product,
            f"/lib/modules/{spec.release}/modules.builtin": "kernel/drivers/pci/pcie/aer.ko",
            f"/lib/modules/{spec.release}/modules.dep": "\n".join(
                f"kernel/drivers/{name}.ko.zst:" for name in spec.available
            ),
        },
    )
    if GRACE_DRIVER in spec.available:
        _texts(tree, {f"/lib/modules/{spec.release}/modules.alias": "\n".join(_aliases())})
    if spec.cgroup_v2:
        _texts(tree, {"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc"})
    tree.place(HostPath("/dev/null"), DeviceNode(NULL))
    if spec.kvm:
        tree.place(HostPath("/dev/kvm"), DeviceNode(KVM))
    _place_modules(tree, bus, spec, has_manager=has_manager)
    _place_functions(tree, bus, spec)
    _place_screens(tree, bus, spec)
    for path, text in BOOT_FILES[spec.boot].items():
        tree.place(HostPath(path), _text(text))
    _change(tree, spec)


def _aliases() -> Iterator[str]:
    """Yield the lines of modules.alias: the driver for Grace GPUs, and the native one of all of NVIDIA's."""
    yield from (f"alias pci:v000010DEd*sv*sd*bc03sc{sub}i00* nvidia" for sub in ("00", "02"))
    for found in sorted(GRACE_IDS, key=str):
        yield f"alias vfio_pci:v{found.vendor:08X}d{found.device:08X}sv*sd*bc*sc*i* {GRACE_DRIVER}"


def _change(tree: Tree, spec: PlatformSpec) -> None:
    """Apply the host file's own files, folders and missing paths."""
    for missing in spec.missing:
        tree.remove(HostPath(missing))
    for folder in spec.folders:
        tree.make(_real(tree, folder))
    for path, text in spec.files.items():
        tree.place(_real(tree, path), _text(text))


def _real(tree: Tree, path: str) -> HostPath:
    """Return the real path of a file that may not exist yet, with the links above it resolved."""
    above, _, name = path.rpartition("/")
    if not above or not tree.exists(HostPath(above)):
        return HostPath(path) if not above else HostPath(f"{_real(tree, above)}/{name}")
    return HostPath(f"{tree.real_path(HostPath(above)).rstrip('/')}/{name}")


_TABLES = {Cpu.INTEL: "DMAR", Cpu.AMD: "IVRS", Cpu.ARM: "IORT"}


def _text(text: str) -> File:
    return File(read=lambda: text)


def _texts(tree: Tree, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        tree.place(HostPath(path), constant(text))


def _cmdline(spec: PlatformSpec, *, iommu: bool) -> str:
    if not iommu:
        return "quiet"
    return "quiet intel_iommu=on iommu=pt" if spec.cpu is Cpu.INTEL else "quiet iommu=pt"


def _place_cpu(tree: Tree, spec: PlatformSpec) -> None:
    if spec.cpu is Cpu.ARM:
        tree.place(
            HostPath("/proc/cpuinfo"), _text("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n\n")
        )
        return
    vendor, flag = ("GenuineIntel", "vmx") if spec.cpu is Cpu.INTEL else ("AuthenticAMD", "svm")
    flags = " ".join((FLAGS, *([flag] if spec.virtualization else []), *(["hypervisor"] if spec.hypervisor else [])))
    entry = "processor\t: {}\nvendor_id\t: " + vendor + f"\nflags\t\t: {flags}\n\n"
    tree.place(HostPath("/proc/cpuinfo"), _text("".join(entry.format(number) for number in range(4))))


def _place_iommu(tree: Tree, spec: PlatformSpec, *, iommu: bool) -> None:
    tree.make(HostPath("/sys/class/iommu"))
    if iommu and spec.cpu is Cpu.INTEL:
        ecap = ECAP if spec.interrupt_remapping else ECAP & ~8
        _texts(tree, {"/sys/class/iommu/dmar0/intel-iommu/ecap": f"{ecap:x}"})
    elif iommu and spec.cpu is Cpu.AMD:
        tree.make(HostPath("/sys/class/iommu/ivhd0/amd-iommu"))
    prefix = "IR-" if iommu and spec.interrupt_remapping else ""
    chips = ("IO-APIC", "", f"{prefix}IO-APIC", f"{prefix}PCI-MSI")
    for irq, chip in enumerate(("GICv3", "ITS-MSI") if spec.cpu is Cpu.ARM else chips):
        _texts(tree, {f"/sys/kernel/irq/{irq}/chip_name": chip})


def _place_modules(tree: Tree, bus: PciBus, spec: PlatformSpec, *, has_manager: bool) -> None:
    bound = [function.driver for function in bus.functions.values() if function.driver is not None]
    drivers = {driver.replace("-", "_") for driver in bound}
    vgpus = {"nvidia_vgpu_vfio"} if has_manager else set()
    kvm = {Cpu.INTEL: {"kvm", "kvm_intel"}, Cpu.AMD: {"kvm", "kvm_amd"}, Cpu.ARM: {"kvm"}}[spec.cpu]
    usual = {"vfio", "vfio_iommu_type1", "vfio_pci", "vfio_pci_core"} | drivers | kvm | vgpus
    for name in sorted(spec.modules if spec.modules is not None else usual):
        tree.make(HostPath(f"{MODULES}/{name}"))
        if name == "vfio_pci":
            _texts(tree, {f"{MODULES}/{name}/parameters/disable_vga": "N"})
            tree.place(HostPath(f"{MODULES}/{name}/parameters/enable_sriov"), bus.enable_sriov)
        elif name == "nvidia":
            tree.place(HostPath(f"{MODULES}/{name}/version"), _text(spec.nvidia_version))
        elif name == "vfio_iommu_type1":
            value = "Y" if spec.unsafe_interrupts else "N"
            _texts(tree, {f"{MODULES}/{name}/parameters/allow_unsafe_interrupts": value})


def _place_functions(tree: Tree, bus: PciBus, spec: PlatformSpec) -> None:
    for address in (*spec.without_reset, *spec.bars_unassigned, *([spec.console] if spec.console else ())):
        if parse_pci_address(address) not in bus.functions:
            raise ValueError(f"there is no function at {address}")
    for address in spec.without_reset:
        function = bus.functions[PciAddress(address)]
        tree.remove(HostPath(f"{function.folder}/reset_method"))
        tree.remove(HostPath(f"{function.folder}/reset"))
    for address in spec.bars_unassigned:
        folder = bus.functions[PciAddress(address)].folder
        tree.place(HostPath(f"{folder}/resource"), _text(resource(unassigned=True)))
    for node in {function.numa_node for function in bus.functions.values() if function.numa_node >= 0}:
        first = node * CPUS_OF_A_NODE
        cpus = f"{first}-{first + CPUS_OF_A_NODE - 1}"
        tree.place(HostPath(f"/sys/devices/system/node/node{node}/cpulist"), constant(cpus))


def _place_screens(tree: Tree, bus: PciBus, spec: PlatformSpec) -> None:
    tree.place(HostPath("/sys/class/graphics"), Folder())
    functions = bus.functions.values()
    displays = [function for function in functions if function.class_code >> 8 == 0x0300 and function.physfn is None]
    bound = [function.address for function in displays if function.driver is not None]
    console = spec.console or min(bound, default=None)
    for function in displays:
        tree.place(HostPath(f"{function.folder}/boot_vga"), constant("1" if function.address == console else "0"))
    if spec.console is not None:
        tree.place(HostPath(f"{bus.functions[PciAddress(spec.console)].folder}/boot_vga"), constant("1"))
        tree.place(HostPath("/sys/class/graphics/fb0/name"), constant(spec.screen))
        tree.place(HostPath("/sys/class/graphics/fb0/device"), Link("../../../efi-framebuffer.0"))
    for screen in spec.screens:
        place = f"/sys/class/graphics/fb{screen.number}"
        tree.make(HostPath(place))
        if screen.name is not None:
            tree.place(HostPath(f"{place}/name"), _text(screen.name))
        if screen.device is not None:
            tree.place(HostPath(f"{place}/device"), Link(f"../../../{screen.device}"))

"""Hosts with one fault each, and what doctor must report."""

from collections.abc import Callable
from dataclasses import dataclass

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.reasons import FindingCode, ReasonCode
from gpuvirt.model.reasons.codes import Level
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.platform import Cpu, PlatformSpec
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.kernel import SimKernel
from tests.diagnosis.doctor.sickhost import host, simulated

GPU = "0000:65:00.0"
MODULES = "/lib/modules/6.8.0-31-generic"
FOLDER = f"/sys/bus/pci/devices/{GPU}"

TYPELESS = """
about: cards on nvidia that offer no type
boards:
  card: {functions: [{id: '10de:2236', class: '030200', native_driver: nvidia}], total_vfs: 32}
slots: [{at: '0000:65:00.0', board: card, group: 12, numa: 0, vfs: VFS}]
platform: {modules: [nvidia, vfio_pci, vfio_iommu_type1, nvidia_vgpu_vfio]}
"""


VOLTA = """
about: a V100 that the driver of the host has left alone
boards:
  old: {functions: [{id: '10de:1db4', class: '030200'}]}
slots: [{at: '0000:65:00.0', board: old, group: 12, numa: 0}]
platform: {modules: [nvidia, vfio_pci, vfio_iommu_type1], nvidia_version: 595.71.05}
"""


def acted(kernel: SimKernel, act: Callable[[SimKernel], object]) -> SimKernel:
    act(kernel)
    return kernel


def pinned(kernel: SimKernel) -> None:
    process = kernel.start_vm(IommuGroup(12))
    kernel.tree.place(HostPath(f"/proc/{process.pid}/status"), constant("Name:\tqemu\nCpus_allowed_list:\t16-31"))


def with_file(path: str, text: str) -> PlatformSpec:
    return PlatformSpec(files={path: text})


@dataclass(frozen=True)
class Bad:
    """A host with one fault."""

    build: Callable[[], SimKernel]
    code: FindingCode | ReasonCode
    level: Level
    seen: str
    """Part of the place that was read, and of its content."""
    fix: str


BAD = {
    "no VT-x": Bad(
        lambda: host(PlatformSpec(virtualization=False)),
        FindingCode.NO_VIRTUALIZATION, Level.ERROR, "/proc/cpuinfo: flags without vmx", "(VT-x)",
    ),
    "a VM without nested virtualization": Bad(
        lambda: host(PlatformSpec(virtualization=False, hypervisor=True, product="KVM")),
        FindingCode.NO_VIRTUALIZATION, Level.ERROR, "/proc/cpuinfo", "host-passthrough",
    ),
    "a VM": Bad(
        lambda: host(PlatformSpec(hypervisor=True, product="Standard PC (Q35 + ICH9, 2009)"), "2xA10-no-iommu"),
        FindingCode.HOST_IS_VM, Level.WARNING, "product_name: Standard PC", "<iommu model='intel'>",
    ),
    "no KVM": Bad(
        lambda: host(PlatformSpec(kvm=False)),
        FindingCode.KVM_MISSING, Level.ERROR, "/dev/kvm: not there", "modprobe kvm_intel",
    ),
    "no KVM on AMD": Bad(
        lambda: host(PlatformSpec(kvm=False, cpu=Cpu.AMD)),
        FindingCode.KVM_MISSING, Level.ERROR, "/dev/kvm: not there", "modprobe kvm_amd",
    ),
    "no room for a BAR": Bad(
        lambda: host(PlatformSpec(bars_unassigned=(GPU,))),
        ReasonCode.BAR_UNASSIGNED, Level.ERROR, f"{FOLDER}/resource: 0x0000000000000000 0x00000007ffffffff",
        "Above 4G Decoding",
    ),
    "VT-d off in the firmware": Bad(
        lambda: host(simulated="2xA10-no-iommu"),
        FindingCode.IOMMU_OFF, Level.ERROR, "/sys/kernel/iommu_groups: empty", "(VT-d)",
    ),
    "AMD-Vi off in the firmware": Bad(
        lambda: host(PlatformSpec(cpu=Cpu.AMD), simulated="2xA10-no-iommu"),
        FindingCode.IOMMU_OFF, Level.ERROR, "/sys/firmware/acpi/tables: APIC FACP", "AMD-Vi",
    ),
    "VT-d not asked for": Bad(
        lambda: host(PlatformSpec(acpi=("DMAR",), cmdline="quiet"), simulated="2xA10-no-iommu"),
        FindingCode.IOMMU_OFF, Level.ERROR, "/proc/cmdline: none of intel_iommu", "add intel_iommu=on iommu=pt",
    ),
    "VT-d switched off": Bad(
        lambda: host(PlatformSpec(acpi=("DMAR",), cmdline="intel_iommu=off"), simulated="2xA10-no-iommu"),
        FindingCode.IOMMU_OFF, Level.ERROR, "intel_iommu=off", "remove intel_iommu=off from",
    ),
    "AMD-Vi switched off": Bad(
        lambda: host(PlatformSpec(cpu=Cpu.AMD, acpi=("IVRS",), cmdline="amd_iommu=off"), simulated="2xA10-no-iommu"),
        FindingCode.IOMMU_OFF, Level.ERROR, "amd_iommu=off", "remove amd_iommu=off from",
    ),
    "ACS override": Bad(
        lambda: host(PlatformSpec(cmdline="intel_iommu=on pcie_acs_override=downstream,multifunction")),
        FindingCode.ACS_OVERRIDE, Level.WARNING, "pcie_acs_override=downstream", "remove pcie_acs_override=downstream",
    ),
    "nomodeset": Bad(
        lambda: host(PlatformSpec(cpu=Cpu.AMD, cmdline="nomodeset"), simulated="8xMI300X", driver="native"),
        FindingCode.KERNEL_ARGUMENT, Level.WARNING, "nomodeset", "remove nomodeset from",
    ),
    "interrupts not remapped": Bad(
        lambda: host(PlatformSpec(interrupt_remapping=False)),
        FindingCode.INTERRUPTS_NOT_REMAPPED, Level.ERROR, "chip_name: IO-APIC", "use another host",
    ),
    "interrupt remapping switched off": Bad(
        lambda: host(PlatformSpec(interrupt_remapping=False, cmdline="intel_iommu=on intremap=off")),
        FindingCode.INTERRUPTS_NOT_REMAPPED, Level.ERROR, "intremap=off", "remove intremap=off from",
    ),
    "unsafe interrupts": Bad(
        lambda: host(PlatformSpec(unsafe_interrupts=True)),
        FindingCode.UNSAFE_INTERRUPTS, Level.WARNING, "allow_unsafe_interrupts: Y", "remove allow_unsafe_interrupts=1",
    ),
    "a shared group": Bad(
        lambda: host(simulated="2xRTX4090-one-group"),
        FindingCode.SHARED_GROUP, Level.WARNING, "/sys/kernel/iommu_groups/12/devices: 0000:00:0c.0", "ACS",
    ),
    "no vfio-pci": Bad(
        lambda: host(PlatformSpec(modules=("nvidia",), available=()), driver="native"),
        ReasonCode.VFIO_MISSING, Level.ERROR, "modules.dep: empty", "linux-modules-extra-6.8.0-31-generic",
    ),
    "no list of the kernel's modules": Bad(
        lambda: host(PlatformSpec(modules=("nvidia",), missing=(f"{MODULES}/modules.dep",)), driver="native"),
        FindingCode.NOT_READ, Level.UNKNOWN, f"{MODULES}/modules.dep: not there",
        "install the modules of kernel 6.8.0-31-generic",
    ),
    "vfio-pci is kept out by modprobe": Bad(
        lambda: host(with_file("/etc/modprobe.d/no.conf", "# no\ninstall vfio-pci \\\n /bin/false\n")),
        ReasonCode.VFIO_BLOCKED, Level.WARNING, "/etc/modprobe.d/no.conf: install vfio-pci /bin/false", "no.conf",
    ),
    "vfio-pci is kept out by the kernel": Bad(
        lambda: host(PlatformSpec(cmdline="intel_iommu=on module_blacklist=nouveau,vfio_pci", modules=("kvm",))),
        ReasonCode.VFIO_BLOCKED, Level.ERROR, "module_blacklist=nouveau,vfio_pci", "remove module_blacklist=",
    ),
    "a Grace GPU without its driver": Bad(
        lambda: host(PlatformSpec(cpu=Cpu.ARM), "2xGH200", driver="native"),
        ReasonCode.GRACE_DRIVER_MISSING, Level.ERROR, "modules.dep: lacks nvgrace_gpu_vfio_pci",
        "boot a kernel with nvgrace_gpu_vfio_pci",
    ),
    "a Grace GPU on vfio-pci beside its driver": Bad(
        lambda: host(PlatformSpec(cpu=Cpu.ARM, available=("nvgrace_gpu_vfio_pci",)), "2xGH200", driver="vfio-pci"),
        ReasonCode.GRACE_DRIVER_MISSING, Level.ERROR, "/driver: vfio-pci", "gpuvirt vfio unbind 0009:01:00.0, then",
    ),
    "nvidia was faster than vfio-pci": Bad(
        lambda: host(with_file("/etc/modprobe.d/v.conf", "options vfio-pci ids=10de:2236,1234:5\n"), driver="native"),
        FindingCode.IDS_NOT_BOUND, Level.WARNING, "/etc/modprobe.d/v.conf: ids=10de:2236", "softdep nvidia pre:",
    ),
    "ids on the command line": Bad(
        lambda: host(PlatformSpec(cmdline="intel_iommu=on vfio-pci.ids=10de:2236"), driver="native"),
        FindingCode.IDS_NOT_BOUND, Level.WARNING, "/proc/cmdline: vfio-pci.ids=10de:2236", "softdep nvidia",
    ),
    "a companion on the host's driver": Bad(
        lambda: acted(
            host(simulated="4xRTX2060"), lambda kernel: kernel.rebind(PciAddress("0000:04:00.1"), "snd_hda_intel")
        ),
        ReasonCode.GROUP_NOT_VIABLE, Level.ERROR, "0000:04:00.1/driver: snd_hda_intel",
        "gpuvirt vfio bind 0000:04:00.0",
    ),
    "a disk in the group": Bad(
        lambda: simulated(
            "about: x\nslots: [{at: '0000:05:00.0', board: A10, driver: vfio-pci, group: 7},"
            " {at: '0000:06:00.0', board: nvme, group: 7}]"
        ),
        ReasonCode.GROUP_NOT_VIABLE, Level.ERROR, "0000:06:00.0/driver: nvme", "move the GPU to another slot",
    ),
    "nouveau": Bad(
        lambda: host(driver="nouveau"),
        FindingCode.DRIVERS_FIGHT, Level.ERROR, f"{FOLDER}/driver: nouveau", "blacklist nouveau",
    ),
    "nouveau beside nvidia": Bad(
        lambda: host(PlatformSpec(modules=("nouveau", "nvidia", "vfio_pci", "vfio_iommu_type1"))),
        FindingCode.DRIVERS_FIGHT, Level.WARNING, "/sys/module: nouveau nvidia", "update-initramfs",
    ),
    "the console on a GPU": Bad(
        lambda: host(PlatformSpec(console=GPU)),
        ReasonCode.BOOT_CONSOLE, Level.WARNING, "fb0/name: EFI VGA", "initcall_blacklist=sysfb_init",
    ),
    "the console on a GPU, older kernel": Bad(
        lambda: host(PlatformSpec(console=GPU, release="5.14.0-427.el9.x86_64")),
        ReasonCode.BOOT_CONSOLE, Level.WARNING, f"{FOLDER}/boot_vga: 1", "video=efifb:off",
    ),
    "no reset": Bad(
        lambda: host(PlatformSpec(without_reset=(GPU,))),
        ReasonCode.NO_RESET, Level.WARNING, f"{FOLDER}/reset_method: not there", "card's firmware",
    ),
    "fell off the bus": Bad(
        lambda: acted(host(), lambda kernel: kernel.fall_off_bus(PciAddress(GPU))),
        ReasonCode.FELL_OFF_BUS, Level.ERROR, f"{FOLDER}/config", "power-cycle",
    ),
    "no node": Bad(
        lambda: acted(host(), lambda kernel: kernel.delete_node(IommuGroup(12))),
        ReasonCode.NODE_MISSING, Level.ERROR, "/dev/vfio/12", "udev",
    ),
    "no driver": Bad(
        lambda: host(driver="none"),
        ReasonCode.NO_DRIVER, Level.WARNING, f"{FOLDER}/driver", "gpuvirt vfio bind",
    ),
    "no vGPU made": Bad(
        lambda: host(simulated="4xT4"),
        ReasonCode.NO_VGPUS, Level.WARNING, "mdev_supported_types: GRID T4-16Q", "vgpu create 0000:86:00.0 T4-16Q",
    ),
    "no vendor-VFIO vGPU made": Bad(
        lambda: host(simulated="4xL40S"),
        ReasonCode.NO_VGPUS, Level.WARNING, "creatable_vgpu_types: NVIDIA L40S", "vgpu create 0000:da:00.0 L40S-12Q",
    ),
    "VFs off": Bad(
        lambda: simulated(TYPELESS.replace("VFS", "0")),
        FindingCode.VFS_OFF, Level.WARNING, "virtfn*: none", "gpuvirt vgpu create 0000:65:00.0 A10-",
    ),
    "no types": Bad(
        lambda: simulated(TYPELESS.replace("VFS", "2")),
        FindingCode.NO_VGPU_TYPES, Level.WARNING, "/sys/module/nvidia_vgpu_vfio: loaded", "nvidia-vgpu-mgr",
    ),
    "a vGPU manager that is older than the kernel's interface": Bad(
        lambda: simulated(TYPELESS.replace("VFS", "2").replace("form: {", "form: {nvidia_version: 535.161.05, ")),
        FindingCode.NO_VGPU_TYPES, Level.WARNING, "/sys/module/nvidia/version: 535.161.05", "vGPU 17 or later",
    ),
    "a GPU that the driver no longer supports": Bad(
        lambda: simulated(VOLTA),
        FindingCode.DRIVER_UNFIT, Level.ERROR, "/sys/module/nvidia/version: 595.71.05", "branch R580",
    ),
    "VFs, and no manager": Bad(
        lambda: simulated(TYPELESS.replace("VFS", "2").replace(", nvidia_vgpu_vfio", "")),
        FindingCode.NO_VGPU_TYPES, Level.WARNING, "/sys/module/nvidia_vgpu_vfio: not loaded", "vgpu-kvm",
    ),
    "VFs on a GPU for passthrough": Bad(
        lambda: simulated("about: x\nslots: [{at: '0000:65:00.0', board: A10, driver: vfio-pci, group: 12, vfs: 2}]"),
        ReasonCode.VFS_ENABLED, Level.WARNING, "virtfn0", "does not change VFs that vfio-pci has enabled",
    ),
    "a VM on the other node": Bad(
        lambda: acted(host(), pinned),
        FindingCode.CPUS_ON_OTHER_NODE, Level.WARNING, "/status: 16-31", "single-numa-node",
    ),
}  # fmt: skip

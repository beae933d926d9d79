"""Checks of what the firmware must give: virtualization, KVM, address space; and whether the host is a VM itself."""

import re
from collections.abc import Iterator

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute, FunctionSetup
from gpuvirt.model.doctor.bootloader import set_arguments
from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.findings import Finding, fine, problem, seen, unread
from gpuvirt.model.inventory.inventory import Gpu
from gpuvirt.model.reasons import FindingCode, Seen

VIRTUALIZATION = {"vmx": "VT-x", "svm": "AMD-V"}
ARM = "CPU implementer"
OUTER_IOMMU = (
    "on the outer host, in this machine's domain (libvirt):",
    "<features><ioapic driver='qemu'/></features>",
    "<devices><iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu></devices>",
)
MEMORY = 0x200
"""IORESOURCE_MEM (include/linux/ioport.h)."""
PCI_BARS = 6
"""Lines of a function's own BARs in `resource`; the expansion ROM and the BARs of VFs follow."""


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the flags of a processor, as `/proc/cpuinfo` of x86 lists them."""
    match = re.search(r"^flags[ \t]*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def is_x86(evidence: Evidence) -> bool:
    """Return whether the host's processors have flags as x86 has."""
    return bool(cpu_flags(evidence.setup.cpu.text or ""))


def is_amd(evidence: Evidence) -> bool:
    """Return whether the host's processors are AMD's, or Hygon's, which are made like them."""
    return bool(re.search(r"^vendor_id\s*:\s*(AuthenticAMD|HygonGenuine)", evidence.setup.cpu.text or "", re.MULTILINE))


def is_vm(evidence: Evidence) -> bool:
    """Return whether the host is a virtual machine itself."""
    return "hypervisor" in cpu_flags(evidence.setup.cpu.text or "")


def _told(cpu: Attribute, value: str) -> Attribute:
    return Attribute(cpu.path, value)


def virtualization(evidence: Evidence) -> Iterator[Finding]:
    """The processor can run virtual machines."""
    cpu = evidence.setup.cpu
    flags = cpu_flags(cpu.text or "")
    found = sorted(flags & VIRTUALIZATION.keys())
    if found:
        yield fine("the processor", f"has {VIRTUALIZATION[found[0]]}", _told(cpu, f"flags: ... {found[0]} ..."))
    elif cpu.text and ARM in cpu.text:
        yield fine("the processor", "is ARM's, whose virtualization /dev/kvm shows", _told(cpu, ARM))
    elif not flags:
        yield unread("the processor", "could not be read, or lists no flags", cpu)
    else:
        yield problem(
            FindingCode.NO_VIRTUALIZATION,
            "the processor",
            "shows no virtualization: neither vmx nor svm",
            seen(_told(cpu, "flags without vmx and svm")),
            why="no virtual machine runs with KVM without it",
            fix=("on the outer host, give this machine nested virtualization: <cpu mode='host-passthrough'/>",)
            if is_vm(evidence)
            else ("in the firmware's setup: switch on Intel Virtualization Technology (VT-x) or SVM Mode",),
        )


def nested_host(evidence: Evidence) -> Iterator[Finding]:
    """The host is no virtual machine itself."""
    setup = evidence.setup
    if not is_vm(evidence):
        return
    if setup.iommu_groups.known:
        groups = Seen(setup.iommu_groups.path, f"{len(setup.iommu_groups.known)} groups")
        yield fine("this host", "is a virtual machine itself, with a virtual IOMMU", setup.dmi, groups)
        return
    yield problem(
        FindingCode.HOST_IS_VM,
        "this host",
        "is a virtual machine itself, without a virtual IOMMU",
        seen(_told(setup.cpu, "flags: ... hypervisor ..."), setup.dmi),
        why="its GPUs can be passed on only where the outer host gives it a virtual IOMMU and nested virtualization",
        fix=OUTER_IOMMU,
    )


def kvm(evidence: Evidence) -> Iterator[Finding]:
    """KVM is there."""
    found = evidence.setup.kvm
    if isinstance(found.there, Unread) or (not found.there and evidence.setup.cpu.value is None):
        yield unread("KVM", "could not be looked for", found)
    elif found.there:
        yield fine("KVM", "is there", found)
    else:
        module = "kvm" if not is_x86(evidence) else "kvm_amd" if is_amd(evidence) else "kvm_intel"
        yield problem(
            FindingCode.KVM_MISSING,
            "KVM",
            "is not there",
            seen(found),
            why="KubeVirt and Kata start no machine on a node without /dev/kvm",
            fix=(f"modprobe {module}", f"echo {module} > /etc/modules-load.d/kvm.conf"),
        )


def bars(evidence: Evidence) -> Iterator[Finding]:
    """Every GPU's memory has its place in the address space."""
    placed: list[FunctionSetup] = []
    largest = 0
    for gpu, setup in evidence.looked_at():
        sizes = parse_bars(setup.resource.text or "")
        if sizes is None or setup.resource.text is None:
            yield unread(gpu.function.address, "has BARs that could not be read", setup.resource)
        elif missing := [number for number, size in sizes.items() if size is None]:
            yield _unassigned(evidence, gpu, setup, f"BAR {', '.join(map(str, missing))} without an address")
        elif not sizes and not gpu.function.fell_off_bus:
            yield _unassigned(evidence, gpu, setup, "no BAR at all")
        else:
            placed.append(setup)
            largest = max(largest, *(size for size in sizes.values() if size is not None), 0)
    if placed:
        yield fine(
            f"{len(placed)} GPUs", f"have their BARs placed, the largest of {_size(largest)}", placed[0].resource
        )


def parse_bars(resource: str) -> dict[int, int | None] | None:
    """Return the size of each BAR by its number, None for one without an address; None for what is no such list.

    A line is start, end, flags. A BAR that got no place keeps its size and flags, and begins at 0. Those of I/O ports
    are left out: nothing needs them, and large hosts have no room for them.
    """
    sizes: dict[int, int | None] = {}
    lines = resource.splitlines()
    for number, line in enumerate(lines[:PCI_BARS]):
        if not re.fullmatch(r"0x[0-9a-f]{1,16} 0x[0-9a-f]{1,16} 0x[0-9a-f]{1,16}", line):
            return None
        start, end, flags = (int(word, 16) for word in line.split())
        if flags & MEMORY:
            sizes[number] = end - start + 1 if start else None
    return sizes if lines else None


def _unassigned(evidence: Evidence, gpu: Gpu, setup: FunctionSetup, what: str) -> Finding:
    lines = (setup.resource.text or "").splitlines()
    shown = next((line for line in lines if line.startswith("0x0000000000000000 ") and not line.endswith(" 0x0")), None)
    return problem(
        FindingCode.BAR_UNASSIGNED,
        gpu.function.address,
        f"has {what}",
        seen(Attribute(setup.resource.path, shown or setup.resource.value)),
        why="the firmware found no room for the GPU's memory, so neither the host nor a machine can use it",
        fix=(
            "in the firmware's setup: switch on Above 4G Decoding (MMIO above 4 GB) and, where it is, Resizable BAR",
            "if that does not help, have the kernel place them:",
            *set_arguments(evidence.setup, "pci=realloc"),
        ),
    )


def _size(size: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if size >> shift:
            return f"{size >> shift} {unit}"
    return f"{size} bytes"

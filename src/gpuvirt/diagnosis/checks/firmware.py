"""Checks of the firmware's settings: virtualization, KVM, address space; and whether the host is itself a VM."""

import re
from collections.abc import Collection, Iterator

from msgspec.structs import replace

from gpuvirt.diagnosis.bootloader import set_arguments
from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, fine, of_reason, problem, seen, unread
from gpuvirt.facts.pci import Unread, parse_bars
from gpuvirt.facts.platform import Attribute, FunctionSetup
from gpuvirt.model.inventory.inventory import Gpu
from gpuvirt.model.reasons import FindingCode, Seen, count_of
from gpuvirt.model.reasons.refusals import bar_unassigned

VIRTUALIZATION = {"vmx": "VT-x", "svm": "AMD-V"}
ARM = "CPU implementer"
OUTER_IOMMU = (
    "on the outer host, in the libvirt domain of this VM:",
    "<features><ioapic driver='qemu'/></features>",
    "<devices><iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu></devices>",
)


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the flags of an x86 processor in `/proc/cpuinfo`."""
    match = re.search(r"^flags[ \t]*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def is_x86(evidence: Evidence) -> bool:
    """Return whether the host's processors list flags, as only x86 does."""
    return bool(cpu_flags(evidence.setup.cpu.text or ""))


def is_amd(evidence: Evidence) -> bool:
    """Return whether the host's processors are AMD's, or Hygon's, which have AMD's design."""
    return bool(re.search(r"^vendor_id\s*:\s*(AuthenticAMD|HygonGenuine)", evidence.setup.cpu.text or "", re.MULTILINE))


def is_vm(evidence: Evidence) -> bool:
    """Return whether the host is itself a VM."""
    return "hypervisor" in cpu_flags(evidence.setup.cpu.text or "")


def _excerpt(cpu: Attribute, value: str) -> Attribute:
    return Attribute(cpu.path, value)


def virtualization(evidence: Evidence) -> Iterator[Finding]:
    """The processor can run VMs."""
    cpu = evidence.setup.cpu
    flags = cpu_flags(cpu.text or "")
    found = sorted(flags & VIRTUALIZATION.keys())
    if found:
        yield fine("the processor", f"has {VIRTUALIZATION[found[0]]}", _excerpt(cpu, f"flags: ... {found[0]} ..."))
    elif cpu.text and ARM in cpu.text:
        yield fine(
            "the processor", "is an ARM processor; /dev/kvm shows whether it has virtualization", _excerpt(cpu, ARM)
        )
    elif not flags:
        yield unread("the processor", "lists no flags, or they could not be read", cpu)
    else:
        yield problem(
            FindingCode.NO_VIRTUALIZATION,
            "the processor",
            "has no virtualization: neither vmx nor svm",
            seen(_excerpt(cpu, "flags without vmx and svm")),
            why="KVM can't run VMs without it",
            fix=("on the outer host, give this VM nested virtualization: <cpu mode='host-passthrough'/>",)
            if is_vm(evidence)
            else ("in the firmware's setup: enable Intel Virtualization Technology (VT-x) or SVM Mode",),
        )


def nested_host(evidence: Evidence) -> Iterator[Finding]:
    """The host is not a VM, or has a virtual IOMMU."""
    setup = evidence.setup
    if not is_vm(evidence):
        return
    if setup.iommu_groups.known:
        groups = Seen(setup.iommu_groups.path, count_of(len(setup.iommu_groups.known), "group"))
        yield fine("this host", "is itself a VM, with a virtual IOMMU", setup.dmi, groups)
        return
    yield problem(
        FindingCode.HOST_IS_VM,
        "this host",
        "is itself a VM, without a virtual IOMMU",
        seen(_excerpt(setup.cpu, "flags: ... hypervisor ..."), setup.dmi),
        why="it can pass GPUs to VMs only with a virtual IOMMU and nested virtualization from the outer host",
        fix=OUTER_IOMMU,
    )


def kvm(evidence: Evidence) -> Iterator[Finding]:
    """`/dev/kvm` exists."""
    found = evidence.setup.kvm
    if isinstance(found.exists, Unread) or (not found.exists and evidence.setup.cpu.value is None):
        yield unread("KVM", "may or may not be available: /dev/kvm could not be checked", found)
    elif found.exists:
        yield fine("KVM", "is available", found)
    else:
        module = "kvm" if not is_x86(evidence) else "kvm_amd" if is_amd(evidence) else "kvm_intel"
        yield problem(
            FindingCode.KVM_MISSING,
            "KVM",
            "is not available",
            seen(found),
            why="KubeVirt and Kata start no VM on a node without /dev/kvm",
            fix=(f"modprobe {module}", f"echo {module} > /etc/modules-load.d/kvm.conf"),
        )


def bars(evidence: Evidence) -> Iterator[Finding]:
    """Every memory BAR of every GPU has an address."""
    placed: list[FunctionSetup] = []
    largest = 0
    for gpu, setup in evidence.gpu_setups():
        sizes = parse_bars(setup.resource.text or "")
        if sizes is None or setup.resource.text is None:
            yield unread(gpu.function.address, "has BARs that could not be read", setup.resource)
        elif missing := [number for number, size in sizes.items() if size is None]:
            yield _unassigned(evidence, gpu, setup, missing)
        elif not sizes and not gpu.function.fell_off_bus:
            yield _unassigned(evidence, gpu, setup, ())
        else:
            placed.append(setup)
            largest = max(largest, *(size for size in sizes.values() if size is not None), 0)
    if placed:
        message = f"with an address for each BAR, the largest of {_size(largest)}"
        yield fine(count_of(len(placed), "GPU"), message, placed[0].resource)


def _unassigned(evidence: Evidence, gpu: Gpu, setup: FunctionSetup, bars: Collection[int]) -> Finding:
    lines = (setup.resource.text or "").splitlines()
    shown = next((line for line in lines if line.startswith("0x0000000000000000 ") and not line.endswith(" 0x0")), None)
    reason = bar_unassigned(gpu.function.address, gpu.function.address, bars)
    return of_reason(
        replace(reason, places=seen(Attribute(setup.resource.path, shown or setup.resource.value)), fix=None),
        reason.code.level,
        "in the firmware's setup: enable Above 4G Decoding (MMIO above 4 GB) and, where available, Resizable BAR",
        "if that does not help, let the kernel assign the addresses:",
        *set_arguments(evidence.setup, "pci=realloc"),
        why="the firmware found no address space for the GPU's memory, so neither the host nor a VM can use it",
    )


def _size(size: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if size >> shift:
            return f"{size >> shift} {unit}"
    return f"{size} bytes"

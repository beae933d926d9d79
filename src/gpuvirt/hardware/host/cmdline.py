"""The kernel's command line without secrets: only arguments that concern devices keep their values."""

import re

LEFT_OUT = "(left-out)"

_OF_DEVICES = re.compile(
    r"(?:intel_iommu|amd_iommu|iommu|amd_iommu_intr|intremap|vfio|nvidia|nouveau|amdgpu|i915|xe|radeon|pci|pcie_[a-z_]+|kvm"
    r"|vfio_[a-z0-9_]+|nvidia_[a-z_]+|kvm_[a-z]+|pci_[a-z_]+|snd_hda_intel|modprobe|module_blacklist|rd\.driver"
    r"|initcall_blacklist|video|vga|efifb|simpledrm|console|fbcon|default_hugepagesz|hugepagesz|hugepages|hugetlb"
    r"|isolcpus|nohz_full|rcu_nocbs|irqaffinity|numa|numa_balancing|mem|memmap|mitigations|lockdown|preempt"
    r"|systemd\.unified_cgroup_hierarchy|cgroup_[a-z_]+|swiotlb|noapic|nox2apic|acpi|efi|init_on_alloc)"
    r"(?:\.[A-Za-z0-9_.]+)?"
)
"""Arguments whose values are kept: they configure the IOMMU, drivers, consoles and memory."""
_BARE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def without_strange_values(line: str) -> str:
    """Return the command line without the values of arguments that do not concern devices.

    Installers, disk encryption and cluster bootstraps pass addresses with passwords and tokens in such values. The
    arguments after `--` are for init.
    """
    before, dashes, _ = line.strip().partition(" -- ")
    kept = [_kept(argument) for argument in before.replace('"', " ").split()]
    return " ".join([*kept, *(["--", LEFT_OUT] if dashes else [])]) + "\n"


def _kept(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if not _BARE.fullmatch(name):
        return LEFT_OUT
    if not equals or (_OF_DEVICES.fullmatch(name.replace("-", "_")) and "//" not in value):
        return argument
    return f"{name}={LEFT_OUT}"

"""What a host is besides its devices, by its files: processor, firmware, kernel, modules, boot loader, runtimes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute, Framebuffer, FunctionSetup, Link, Listing, Presence
from gpuvirt.facts.runtimes import Runtime

Part = Attribute | Listing | Link | Presence


@dataclass(frozen=True, slots=True)
class Setup:
    """The host."""

    cpu: Attribute
    """`/proc/cpuinfo`, its first processor."""
    dmi: Attribute
    """The product's name, by the firmware."""
    acpi_tables: Listing
    cmdline: Attribute
    release: Attribute
    os_release: Attribute
    boot_files: tuple[Presence, ...]
    """What boot loaders and their tools leave on a host."""
    iommus: Listing
    iommu_groups: Listing
    ecaps: tuple[Attribute, ...]
    """Extended capabilities of each of Intel's IOMMUs."""
    irq_chips: tuple[Attribute, ...] | Unread | None
    """The first chip that an interrupt goes through, and the first that remaps: `IR-PCI-MSI`."""
    unsafe_interrupts: Attribute
    kvm: Presence
    modules: Listing
    """Those loaded, and those built in that have parameters."""
    builtin_modules: Listing
    available_modules: Listing
    vfio_parameters: tuple[Attribute, ...]
    modprobe: tuple[Attribute, ...]
    """Files that say how modules are loaded."""
    modprobe_folders: tuple[Listing, ...]
    framebuffers: tuple[Framebuffer, ...]
    runtimes: tuple[Runtime, ...]
    """Configurations of container runtimes."""
    functions: Mapping[PciAddress, FunctionSetup] = field(default_factory=dict)
    numa_cpus: Mapping[int, Attribute] = field(default_factory=dict)
    """The processors of each NUMA node that has a GPU."""
    allowed_cpus: Mapping[int, Attribute] = field(default_factory=dict)
    """The processors that each process which has a GPU may run on, by its pid."""


def parts(setup: Setup) -> Mapping[str, Part]:
    """Return each file, folder and link that was looked at, by its path; those of processes are left out."""
    named = (getattr(setup, one.name) for one in fields(setup) if one.name != "allowed_cpus")
    return {part.path: part for value in named for part in _parts(value)}


def _parts(value: object) -> Iterator[Part]:
    match value:
        case Attribute() | Listing() | Link() | Presence():
            yield value
        case Unread():
            yield Listing(value.path, value)
        case Framebuffer() | FunctionSetup():
            for one in fields(value):
                yield from _parts(getattr(value, one.name))
        case Runtime():
            yield from value.files
        case tuple():
            for one in value:
                yield from _parts(one)
        case Mapping():
            yield from _parts(tuple(value.values()))
        case _:
            return

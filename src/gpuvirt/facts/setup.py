"""The setup of a host besides its devices: processor, firmware, kernel, modules, boot loader, container runtimes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute, Framebuffer, FunctionSetup, Link, Listing, Presence
from gpuvirt.facts.runtimes import Runtime

Part = Attribute | Listing | Link | Presence


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of one host."""

    cpu: Attribute
    """The first processor of `/proc/cpuinfo`."""
    dmi: Attribute
    """The name of the product in the firmware."""
    acpi_tables: Listing
    cmdline: Attribute
    release: Attribute
    os_release: Attribute
    boot_files: tuple[Presence, ...]
    """Files that show which boot loader the host has."""
    iommus: Listing
    iommu_groups: Listing
    ecaps: tuple[Attribute, ...]
    """The extended capabilities of each Intel IOMMU."""
    irq_chips: tuple[Attribute, ...] | Unread | None
    """The first interrupt chip, and the first that remaps: `IR-PCI-MSI`."""
    unsafe_interrupts: Attribute
    kvm: Presence
    modules: Listing
    """The loaded modules, and the built-in ones that have parameters."""
    builtin_modules: Listing
    available_modules: Listing
    vfio_parameters: tuple[Attribute, ...]
    modprobe: tuple[Attribute, ...]
    """modprobe's configuration files."""
    modprobe_folders: tuple[Listing, ...]
    framebuffers: tuple[Framebuffer, ...]
    runtimes: tuple[Runtime, ...]
    """Configurations of container runtimes."""
    functions: Mapping[PciAddress, FunctionSetup] = field(default_factory=dict)
    numa_cpus: Mapping[int, Attribute] = field(default_factory=dict)
    """The processors of each NUMA node that has a GPU."""
    allowed_cpus: Mapping[int, Attribute] = field(default_factory=dict)
    """The processors on which each process that uses a GPU may run, by its pid."""


def parts(setup: Setup) -> Mapping[str, Part]:
    """Return each file, folder and link that was read, by its path; those of processes are left out."""
    values = (getattr(setup, field_.name) for field_ in fields(setup) if field_.name != "allowed_cpus")
    return {part.path: part for value in values for part in _parts(value)}


def _parts(value: object) -> Iterator[Part]:
    match value:
        case Attribute() | Listing() | Link() | Presence():
            yield value
        case Unread():
            yield Listing(value.path, value)
        case Framebuffer() | FunctionSetup():
            for field_ in fields(value):
                yield from _parts(getattr(value, field_.name))
        case Runtime():
            yield from value.files
        case tuple():
            for part in value:
                yield from _parts(part)
        case Mapping():
            yield from _parts(tuple(value.values()))
        case _:
            return

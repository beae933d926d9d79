"""What a host is besides its devices, by its files: processor, firmware, kernel, modules, boot loader, runtimes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.paths import HostPath

MOST_SHOWN = 100
"""Characters of a value that somebody is shown."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One file, and what it held: its text, None where there is none, Unread where that could not be told."""

    path: HostPath
    value: str | Unread | None = None

    @property
    def text(self) -> str | None:
        """What it held, None where it held nothing that we know."""
        return self.value if isinstance(self.value, str) else None

    @property
    def shown(self) -> str:
        """What was met, on one line."""
        if self.value is None:
            return "not there"
        return self.value.said if isinstance(self.value, Unread) else legible(self.value) or "empty"


@dataclass(frozen=True, slots=True)
class Listing:
    """One folder or list, and the names in it."""

    path: HostPath
    names: tuple[str, ...] | Unread | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """The names that were seen."""
        return self.names if isinstance(self.names, tuple) else ()

    @property
    def shown(self) -> str:
        """What was met, on one line."""
        if self.names is None:
            return "not there"
        return self.names.said if isinstance(self.names, Unread) else legible(" ".join(self.names)) or "empty"


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether something is there."""

    path: HostPath
    there: bool | Unread = False

    @property
    def shown(self) -> str:
        """What was met."""
        return self.there.said if isinstance(self.there, Unread) else "there" if self.there else "not there"


def legible(text: str) -> str:
    """Return a text on one line, printable, and not without end."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class FunctionSetup:
    """What firmware and kernel have made of one GPU."""

    resource: Attribute
    """Its BARs: a line each of start, end and flags."""
    boot_vga: Attribute
    reset_method: Attribute | None
    """None where it was not asked: a function without a driver may be waiting to be unbound."""
    reset: Presence
    """`reset` is there where the kernel knows a way; older kernels (before 5.15) have no list of ways."""


@dataclass(frozen=True, slots=True)
class Framebuffer:
    """A screen of the kernel's, and the function that shows it."""

    name: Attribute
    device: str | Unread | None
    """The last part of the link: an address, `simple-framebuffer.0`, `efi-framebuffer.0`."""


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
    """Through which chips interrupts go: `IR-PCI-MSI` where they are remapped."""
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
    runtimes: tuple[Attribute, ...]
    """Configurations of container runtimes."""
    functions: Mapping[PciAddress, FunctionSetup] = field(default_factory=dict)
    numa_cpus: Mapping[int, Attribute] = field(default_factory=dict)
    """The processors of each NUMA node that has a GPU."""
    allowed_cpus: Mapping[int, Attribute] = field(default_factory=dict)
    """The processors that each process which has a GPU may run on, by its pid."""

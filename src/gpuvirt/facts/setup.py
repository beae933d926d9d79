"""The setup of a host besides its devices: processor, firmware, kernel, modules, boot loader, runtimes, kubelet."""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute, Framebuffer, FunctionSetup, Listing, Presence, SymbolicLink
from gpuvirt.facts.runtimes import KataRuntime, Runtime

Part = Attribute | Listing | SymbolicLink | Presence


class KernelSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel of one host, its modules, and the boot loader that has its arguments."""

    cmdline: Attribute
    release: Attribute
    os_release: Attribute
    boot_files: tuple[Presence, ...]
    """Files that show which boot loader the host has."""
    modules: Listing
    """The loaded modules, and the built-in ones that have parameters."""
    builtin_modules: Listing
    available_modules: Listing
    modprobe: tuple[Attribute, ...]
    """modprobe's configuration files."""
    modprobe_folders: tuple[Listing, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The kernel's arguments; those after `--` are init's, and are left out."""
        words = (self.cmdline.text or "").split()
        return tuple(words[: words.index("--")] if "--" in words else words)

    def argument(self, name: str) -> str | None:
        """Return the last value of `name=` on the kernel's command line, "" for the bare word."""
        found = [word.partition("=")[2] for word in self.arguments if word.partition("=")[0] == name]
        return found[-1] if found else None


class Setup(KernelSetup, frozen=True, kw_only=True):
    """The setup of one host."""

    cpu: Attribute
    """The first processor of `/proc/cpuinfo`."""
    dmi: Attribute
    """The name of the product in the firmware."""
    acpi_tables: Listing
    iommus: Listing
    iommu_groups: Listing
    ecaps: tuple[Attribute, ...]
    """The extended capabilities of each Intel IOMMU."""
    irq_chips: tuple[Attribute, ...] | Unread | None
    """The first interrupt chip, and the first that remaps: `IR-PCI-MSI`."""
    unsafe_interrupts: Attribute
    kvm: Presence
    vfio_parameters: tuple[Attribute, ...]
    framebuffers: tuple[Framebuffer, ...]
    runtimes: tuple[Runtime, ...]
    """Configurations of container runtimes."""
    kata: tuple[KataRuntime, ...] = ()
    """Kata's runtimes that these configurations name."""
    kata_folders: tuple[Listing, ...] = ()
    """The folders of Kata's own configurations; none are read where a configuration names Kata."""
    cdi_folders: tuple[Listing, ...] = ()
    cdi_specs: tuple[Attribute, ...] = ()
    """The CDI specs of all programs; none are read where no configuration names Kata."""
    functions: Mapping[PciAddress, FunctionSetup] = msgspec.field(default_factory=dict)
    numa_cpus: Mapping[int, Attribute] = msgspec.field(default_factory=dict)
    """The processors of each NUMA node that has a GPU."""
    allowed_cpus: Mapping[int, Attribute] = msgspec.field(default_factory=dict)
    """The processors on which each process that uses a GPU may run, by its pid."""


def parts(setup: Setup) -> Mapping[str, Part]:
    """Return each file, folder and link that was read, by its path; those of processes are left out."""
    values = (getattr(setup, name) for name in setup.__struct_fields__ if name != "allowed_cpus")
    return {part.path: part for value in values for part in _parts(value)}


def _parts(value: object) -> Iterator[Part]:
    match value:
        case Attribute() | Listing() | SymbolicLink() | Presence():
            yield value
        case Unread():
            yield Listing(value.path, value)
        case Framebuffer() | FunctionSetup():
            for name in value.__struct_fields__:
                yield from _parts(getattr(value, name))
        case Runtime() | KataRuntime():
            yield from value.files
        case tuple():
            for part in value:
                yield from _parts(part)
        case Mapping():
            yield from _parts(tuple(value.values()))
        case _:
            return


class KubeletConfig(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The fields of the kubelet's configuration that decide on which NUMA nodes a VM's processors and memory are."""

    cpu_manager_policy: str = "none"
    memory_manager_policy: str = "None"
    topology_manager_policy: str = "none"
    topology_manager_scope: str = "container"


class KubeletFacts(msgspec.Struct, frozen=True):
    """The kubelet of a host, as its folder shows it. Paths are those of this process."""

    folder: str
    socket: str
    listens: bool | Unread
    """Whether a process listens at the kubelet's socket: one that was killed leaves the file."""
    config_file: str
    config: KubeletConfig | Unread | None
    counted_by: str
    """The source of `counted`: the kubelet's API, or its checkpoint."""
    counted: Mapping[str, frozenset[str]] | Unread | None
    """The healthy devices of each resource, as the kubelet reports them or has recorded them last; None if it has
    recorded none."""
    offers_without_gate: bool | Unread = False
    """Whether a device plugin of gpuvirt offers devices, and takes no part in the gates of its folder."""
    has_socket: bool | Unread = False
    """Whether the file of the socket exists."""
    gates: str = ""
    """The folder of these gates."""

    @property
    def ever_ran(self) -> bool:
        """Whether a kubelet runs on the host, or has left files there."""
        return self.has_socket is not False or self.config is not None or self.counted is not None

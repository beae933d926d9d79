"""PCI functions as the kernel shows them, and the type of attributes that could not be read."""

import re
from dataclasses import dataclass
from enum import StrEnum
from errno import errorcode

import msgspec

from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId
from gpuvirt.facts.notknown import NotKnown
from gpuvirt.paths import HostPath

NVIDIA = 0x10DE
AMD = 0x1002
INTEL = 0x8086

GRACE_DRIVER = "nvgrace_gpu_vfio_pci"
"""The VFIO driver that passes a Grace GPU's memory to a VM; with vfio-pci the VM gets the GPU without it."""
VFIO_DRIVERS = frozenset({"vfio-pci", GRACE_DRIVER, "xe_vfio_pci"})
"""The VFIO drivers of kernels before 6.1, which do not list VFIO devices; newer kernels have `vfio-dev/`."""

GRACE_IDS = frozenset(PciId(NVIDIA, device) for device in (0x2342, 0x2345, 0x2348, 0x2941, 0x31C2))
"""The functions that the driver is made for (the kernel's drivers/vfio/pci/nvgrace-gpu/main.c)."""

GROUP_FRIENDLY_DRIVERS = VFIO_DRIVERS | {"pci-stub", "pcieport", "mlx5_vfio_pci", "virtio_vfio_pci"}
"""Drivers that leave a function's DMA to the owner of its IOMMU group (`driver_managed_dma` in the kernel)."""

STUB_DRIVERS = frozenset({"pci-stub", "pci-pf-stub"})
"""Drivers that only reserve a function. `sriov-manage` binds a GPU to pci-pf-stub while it switches VFs."""

NOUVEAU = "nouveau"
"""The kernel's own driver for NVIDIA's GPUs, whose unbind can hang where a GPU shows a console."""

VENDOR_VFIO_DRIVER = "nvidia"
"""The driver that makes VFIO devices of VFs and stays their driver (vendor-VFIO vGPUs)."""

HARMLESS_ATTRIBUTES = frozenset(
    {"numa_node", "subsystem_vendor", "subsystem_device", "revision", "sriov_totalvfs", "resource"}
)
"""Attributes that do not decide whether a VM can get the device."""


@dataclass(frozen=True, slots=True)
class Unread(NotKnown):
    """A file that exists, but could not be read or understood. It is never treated as absent."""

    path: HostPath
    errno: int | None = None
    seen: str | None = None

    @property
    def detail(self) -> str:
        """The error, or the malformed value, as text."""
        return errorcode.get(self.errno, str(self.errno)) if self.errno is not None else f"found {self.seen!r}"


class FunctionKind(StrEnum):
    """The kind of a PCI function, by its class code (PCI Code and ID Assignment, 1.x)."""

    GPU = "gpu"
    AUDIO = "audio"
    USB = "usb"
    SERIAL = "serial"
    NVSWITCH = "nvswitch"
    BRIDGE = "bridge"
    OTHER = "other"


class ResetScope(StrEnum):
    """The functions that the kernel resets together."""

    FUNCTION = "function"
    """The function alone, by one of the methods in `reset_method`."""
    BUS = "bus"
    """All functions of its bus: its own methods have been disabled by hand."""
    SHARED_BUS = "shared-bus"
    """All functions of its bus: the kernel has no method for the function alone.

    A function that is alone on its bus has the method `bus`, unless the bus can't be reset.
    """
    NONE = "none"
    """None: the kernel has no method, and no bridge can reset the bus."""


class PciFunction(msgspec.Struct, frozen=True):
    """One PCI function. `None` means that an attribute does not exist, `Unread` that it could not be read."""

    address: PciAddress
    id: PciId
    class_code: int
    subsystem: PciId | None = None
    revision: int | None = None
    driver: str | Unread | None = None
    iommu_group: IommuGroup | Unread | None = None
    numa_node: int | None = None
    cdevs: tuple[str, ...] = ()
    """The function's iommufd character devices, as under `vfio-dev/`: `vfio0`."""
    physfn: PciAddress | None = None
    virtfns: tuple[PciAddress, ...] = ()
    sriov_total_vfs: int | None = None
    fell_off_bus: bool = False
    """Whether the configuration space reads as 0xffff although the kernel still lists the function."""
    bars_unassigned: tuple[int, ...] = ()
    """The numbers of a GPU's memory BARs that have no address; not read for other functions and for VFs."""
    console: str | None = None
    """The host's use of a GPU that is a display: `drives the console (fb0)`; None without one, and not read for other
    functions."""
    unread: tuple[Unread, ...] = ()
    reset: ResetScope | None = None
    """Read for functions on a VFIO driver, and for GPUs but VFs on any driver; None if it is not known."""

    @property
    def kind(self) -> FunctionKind:
        """The kind of the function."""
        return kind_of(self.class_code, self.id.vendor)

    @property
    def is_nvidias_vf(self) -> bool:
        """Whether the function is a virtual function of NVIDIA's, which is a device only with a vGPU."""
        return self.physfn is not None and self.id.vendor == NVIDIA

    @property
    def is_gpu_part(self) -> bool:
        """Whether the function is a VF of AMD's or Intel's: a part of a GPU that is bound as a function of its own."""
        return self.physfn is not None and self.id.vendor in {AMD, INTEL} and self.kind is FunctionKind.GPU

    @property
    def on_vfio(self) -> bool:
        """Whether the function is bound to a VFIO driver, vfio-pci or a variant of it, so that one VM gets it whole.

        Such a function has the folder `vfio-dev/`. A VF that carries a vendor-VFIO vGPU has it too, on its own driver.
        """
        if not isinstance(self.driver, str):
            return False
        return self.driver in VFIO_DRIVERS or (bool(self.cdevs) and self.driver != VENDOR_VFIO_DRIVER)

    @property
    def driver_name(self) -> str | None:
        """The driver for texts; None also where it could not be read."""
        return self.driver if isinstance(self.driver, str) else None

    @property
    def needs_grace_driver(self) -> bool:
        """Whether a VM gets the function's memory only by the driver for Grace GPUs."""
        return self.id in GRACE_IDS and self.physfn is None

    @property
    def is_idle(self) -> bool:
        """Whether no process can use the function: it has no driver, or one that only reserves it."""
        return self.driver is None or self.driver in STUB_DRIVERS

    @property
    def spoils_group(self) -> bool:
        """Whether the function's driver does its own DMA, so that no VM can open its IOMMU group."""
        return isinstance(self.driver, str) and self.driver not in GROUP_FRIENDLY_DRIVERS and not self.cdevs


PCI_BARS = 6
"""The BARs of a function; its expansion ROM and the BARs of its VFs follow (include/linux/pci.h)."""
MEMORY_BAR = 0x200
"""IORESOURCE_MEM (include/linux/ioport.h)."""


def parse_bars(resource: str) -> dict[int, int | None] | None:
    """Return the size of each memory BAR by its number, None for one without an address; None for another format.

    A line has start, end and flags. A BAR without an address keeps its size and flags, and starts at 0. BARs of I/O
    ports are left out: GPUs do not need them, and large hosts have no address space for them.
    """
    sizes: dict[int, int | None] = {}
    lines = resource.splitlines()
    for number, line in enumerate(lines[:PCI_BARS]):
        if not re.fullmatch(r"0x[0-9a-f]{1,16} 0x[0-9a-f]{1,16} 0x[0-9a-f]{1,16}", line):
            return None
        start, end, flags = (int(word, 16) for word in line.split())
        if flags & MEMORY_BAR:
            sizes[number] = end - start + 1 if start else None
    return sizes if lines else None


def kind_of(class_code: int, vendor: int) -> FunctionKind:
    """Return the kind of a function by its class code (24 bits) and vendor."""
    if class_code >> 16 == 0x03 or class_code >> 16 == 0x12:
        return FunctionKind.GPU if vendor in {NVIDIA, AMD, INTEL} else FunctionKind.OTHER
    if class_code >> 8 == 0x0680 and vendor == NVIDIA:
        return FunctionKind.NVSWITCH
    return _KINDS.get(class_code >> 8, FunctionKind.BRIDGE if class_code >> 16 == 0x06 else FunctionKind.OTHER)


_KINDS = {
    0x0403: FunctionKind.AUDIO,
    0x0C03: FunctionKind.USB,
    0x0C80: FunctionKind.SERIAL,
}

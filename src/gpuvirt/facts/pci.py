"""PCI functions as the kernel shows them, and what an attribute is that could not be read."""

from dataclasses import dataclass
from enum import StrEnum
from errno import errorcode

from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId
from gpuvirt.paths import HostPath

NVIDIA = 0x10DE
AMD = 0x1002
INTEL = 0x8086

VFIO_DRIVERS = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci", "xe_vfio_pci"})
"""Drivers that hand a GPU to a VM, for kernels before 6.1, which list no VFIO devices; newer ones say it themselves."""

GROUP_FRIENDLY_DRIVERS = VFIO_DRIVERS | {"pci-stub", "pcieport", "mlx5_vfio_pci", "virtio_vfio_pci"}
"""Drivers that leave a function's DMA to whoever owns its IOMMU group (`driver_managed_dma` in the kernel)."""

STUB_DRIVERS = frozenset({"pci-stub", "pci-pf-stub"})
"""Drivers that hold a function and serve nobody; `sriov-manage` puts a GPU on pci-pf-stub while it switches VFs."""

VENDOR_VFIO_DRIVER = "nvidia"
"""The driver that makes VFIO devices of VFs without giving the VFs away (vendor-VFIO vGPUs)."""

HARMLESS_ATTRIBUTES = frozenset({"numa_node", "subsystem_vendor", "subsystem_device", "revision", "sriov_totalvfs"})
"""Attributes that change nothing of whether a device can be given to a VM."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Something that is there, and that could not be read or understood: never the same as its absence."""

    path: HostPath
    errno: int | None = None
    seen: str | None = None

    @property
    def said(self) -> str:
        """What was met instead of a value, in words."""
        return errorcode.get(self.errno, str(self.errno)) if self.errno is not None else f"found {self.seen!r}"


class FunctionKind(StrEnum):
    """What a PCI function is to us, from its class code (PCI Code and ID Assignment, 1.x)."""

    GPU = "gpu"
    AUDIO = "audio"
    USB = "usb"
    SERIAL = "serial"
    NVSWITCH = "nvswitch"
    BRIDGE = "bridge"
    OTHER = "other"


class ResetScope(StrEnum):
    """What the kernel can reset a function with."""

    FUNCTION = "function"
    """The function alone, by one of the ways in `reset_method`."""
    BUS = "bus"
    """All functions of its bus at once: its own ways have been disabled by hand."""
    SHARED_BUS = "shared-bus"
    """All functions of its bus at once: the kernel knows no way of its own.

    A function that is alone on its bus has the way `bus`, unless the bus can't be reset; so alone it has nothing.
    """
    NONE = "none"
    """Nothing: no way is known, and no bridge can reset its bus."""


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One PCI function. `None` says the kernel has no such thing; `Unread` says that it could not be told."""

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
    """Configuration space answers 0xffff, though the kernel still lists the function."""
    unread: tuple[Unread, ...] = ()
    reset: ResetScope | None = None
    """Read of physical functions that a VFIO driver has; None where it is not known."""

    @property
    def kind(self) -> FunctionKind:
        """What the function is to us."""
        return kind_of(self.class_code, self.id.vendor)

    @property
    def on_vfio(self) -> bool:
        """Whether a VFIO driver has the function whole, for a VM: vfio-pci or any variant of it.

        The kernel says so by `vfio-dev/`. A VF that carries a vendor-VFIO vGPU has that folder and keeps its driver.
        """
        if not isinstance(self.driver, str):
            return False
        return self.driver in VFIO_DRIVERS or (bool(self.cdevs) and self.driver != VENDOR_VFIO_DRIVER)

    @property
    def is_idle(self) -> bool:
        """Whether nobody can use the function: it has no driver, or one that serves nobody."""
        return self.driver is None or self.driver in STUB_DRIVERS

    @property
    def spoils_group(self) -> bool:
        """Whether a driver that does its own DMA has the function, so that nobody can open its IOMMU group."""
        return isinstance(self.driver, str) and self.driver not in GROUP_FRIENDLY_DRIVERS and not self.cdevs


def kind_of(class_code: int, vendor: int) -> FunctionKind:
    """Return what a function of this class code (24 bits) and vendor is to us."""
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

"""The paths of the kernel that gpuvirt reads, writes and shows in messages: PCI functions, drivers, groups, mdevs.

The simulator has its own paths, so a wrong path here does not exist on a simulated host.
"""

from gpuvirt.paths import HostPath

PCI_DEVICES = HostPath("/sys/bus/pci/devices")
PCI_DRIVERS = HostPath("/sys/bus/pci/drivers")
DRIVERS_PROBE = HostPath("/sys/bus/pci/drivers_probe")
IOMMU_GROUPS = HostPath("/sys/kernel/iommu_groups")
MDEVS = HostPath("/sys/bus/mdev/devices")
MDEV_PARENTS = HostPath("/sys/class/mdev_bus")
VFIO_DEVICES = HostPath("/sys/class/vfio-dev")
"""The devices that have a node of their own: `vfio3`."""
VGPU_MANAGER = HostPath("/sys/module/nvidia_vgpu_vfio")
"""The kernel module that only NVIDIA's vGPU manager has."""
NVIDIA_VERSION = HostPath("/sys/module/nvidia/version")
IOMMUFD = HostPath("/dev/iommu")


def device_path(address: str, name: str = "") -> HostPath:
    """Return the folder of a PCI function, or the path of a file in it: `driver`, `sriov_numvfs`, `nvidia/...`."""
    return HostPath(f"{PCI_DEVICES}/{address}/{name}" if name else f"{PCI_DEVICES}/{address}")


def driver_path(driver: str, name: str) -> HostPath:
    """Return the path of a file of a PCI driver: `unbind`, `remove_id`."""
    return HostPath(f"{PCI_DRIVERS}/{driver}/{name}")


def members_path(group: int) -> HostPath:
    """Return the folder with the members of an IOMMU group."""
    return HostPath(f"{IOMMU_GROUPS}/{group}/devices")


def mdev_path(uuid: str, name: str = "") -> HostPath:
    """Return the folder of a mediated device, or the path of a file in it: `mdev_type`, `iommu_group`."""
    return HostPath(f"{MDEVS}/{uuid}/{name}" if name else f"{MDEVS}/{uuid}")

"""Paths of a host that an archive copies, and paths that are never read."""

import errno
import re
from fnmatch import fnmatch

import pytest

from gpuvirt.archive import Symlink
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.archives.hostcopy import CONFIG_BYTES, HEADER_BYTES, copy_host
from gpuvirt.hardware.host import runtimes
from gpuvirt.paths import HostPath
from gpuvirt_sim.files.blocking import WouldBlock
from gpuvirt_sim.files.tree import File, Link, constant
from gpuvirt_sim.hostspec import host_names
from tests.sim.simulated import Simulated

GPU, NETWORK, PORT = PciAddress("0000:65:00.0"), PciAddress("0000:17:00.0"), PciAddress("0000:64:02.0")
FOLDER = f"/sys/devices/pci0000:64/{PORT}/{GPU}"

NAMED = (
    "/sys/bus/pci/devices/*/nvidia/c*_vgpu_type*",
    *(f"/sys/bus/pci/devices/????:??:??.?/{name}" for name in ("vendor", "device", "class", "config", "revision")),
    *(f"/sys/bus/pci/devices/????:??:??.?/{name}" for name in ("subsystem_*", "numa_node", "sriov_totalvfs")),
    *(f"/sys/bus/pci/devices/????:??:??.?/{name}" for name in ("resource", "reset_method", "boot_vga")),
    "/sys/class/mdev_bus/*/mdev_supported_types/*/*",
    "/sys/class/egm/egm?/gpu_devices",
    *(f"/sys/class/iommu/*/intel-iommu/{name}" for name in ("version", "cap", "ecap")),
    "/proc/sys/kernel/random/boot_id",
    *("/proc/version", "/proc/modules", "/proc/cmdline", "/proc/driver/nvidia/version", "/sys/module/nvidia/version"),
    "/sys/fs/cgroup/cgroup.controllers",
    *("/proc/cpuinfo", "/proc/sys/kernel/osrelease", "/etc/os-release", "/sys/class/dmi/id/product_name"),
    *("/sys/kernel/irq/*/chip_name", "/sys/devices/system/node/node?/cpulist"),
    *("/sys/module/vfio_pci/parameters/*", "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"),
    *("/lib/modules/*/modules.builtin", "/lib/modules/*/modules.dep"),
    *("/etc/containerd/config.toml", "/var/lib/rancher/*/agent/etc/containerd/config.toml", "/etc/crio/crio.conf"),
)


@pytest.mark.parametrize("name", host_names())
def test_the_copy_writes_nothing_and_reads_only_listed_paths(simulated: Simulated, name: str) -> None:
    kernel = simulated(name)
    copy = copy_host(kernel)
    assert kernel.writes == []
    assert copy.unread == ()
    assert [path for path in kernel.reads if not any(fnmatch(path, named) for named in NAMED)] == []
    assert not [path for path in copy.members if path.endswith(("/uevent", "/driver_override", "/sriov_numvfs"))]


def test_the_copy_does_not_block_while_a_device_in_use_is_unbound(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.start_vm(IommuGroup(12))
    with pytest.raises(WouldBlock):
        kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/unbind"), GPU.encode())
    members = copy_host(kernel).members
    assert f"{FOLDER}/vendor" in members
    assert f"{FOLDER}/driver" not in members


def test_unrelated_devices_are_copied_by_identity_only(simulated: Simulated) -> None:
    members = copy_host(simulated("2xA10")).members
    place = f"/sys/devices/pci0000:17/{NETWORK}/"
    found = {path.removeprefix(place) for path in members if path.startswith(place)}
    assert found == {"vendor", "device", "class", "driver", "iommu_group"}
    assert f"/sys/devices/pci0000:64/{PORT}/config" in members, "the bridge above a GPU is copied in full"


def test_members_of_a_gpus_group_are_copied_in_full(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.pci.functions[NETWORK].group = IommuGroup(12)
    kernel.tree.link(
        HostPath(f"/sys/devices/pci0000:17/{NETWORK}/iommu_group"), HostPath("/sys/kernel/iommu_groups/12")
    )
    config = copy_host(kernel).members[HostPath(f"/sys/devices/pci0000:17/{NETWORK}/config")]
    assert isinstance(config, bytes)
    assert len(config) == HEADER_BYTES


def test_a_gpu_is_copied_in_full(simulated: Simulated) -> None:
    members = copy_host(simulated("2xA10")).members
    assert members[HostPath(f"/sys/bus/pci/devices/{GPU}")] == Symlink(f"../../..{FOLDER.removeprefix('/sys')}")
    assert members[HostPath(f"{FOLDER}/vendor")] == b"0x10de\n"
    assert members[HostPath(f"{FOLDER}/driver")] == Symlink("../../../../bus/pci/drivers/vfio-pci")
    config = members[HostPath(f"{FOLDER}/config")]
    assert isinstance(config, bytes)
    assert len(config) == CONFIG_BYTES
    assert members[HostPath("/dev/vfio/12")] == b""


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOENT])
def test_unreadable_and_vanished_paths_are_reported(simulated: Simulated, number: int) -> None:
    kernel = simulated("2xA10")
    path = HostPath(f"/sys/bus/pci/devices/{GPU}/numa_node")
    kernel.faults.fail(path, number)
    assert [(entry.path, entry.errno) for entry in copy_host(kernel).unread] == [(path, number)]


def test_a_card_unplugged_during_the_copy_is_reported(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.faults.before_read(HostPath(f"/sys/bus/pci/devices/{GPU}/device"), lambda: kernel.unplug(GPU))
    copy = copy_host(kernel)
    assert {entry.errno for entry in copy.unread} == {errno.ENOENT}
    assert all(GPU in entry.path for entry in copy.unread)


@pytest.mark.parametrize("folder", ["/sys/bus/pci/devices", "/sys/kernel/iommu_groups", "/dev/vfio", "/dev"])
def test_an_unreadable_folder_is_reported(simulated: Simulated, folder: str) -> None:
    kernel = simulated("2xA10")
    kernel.faults.fail(HostPath(folder), errno.EACCES)
    assert [entry.path for entry in copy_host(kernel).unread] == [folder]


@pytest.mark.parametrize("name", ["..\udcff", "\x1b[2J", "a b"])
def test_an_invalid_name_is_reported_and_not_followed(simulated: Simulated, name: str) -> None:
    kernel = simulated("2xA10")
    kernel.tree.place(HostPath(f"/sys/class/mdev_bus/{name}"), Link("../../devices/x"))
    copy = copy_host(kernel)
    assert [entry.detail for entry in copy.unread] == ["found 'a name that no device has'"]
    assert all(path.isprintable() for path in copy.members)


@pytest.mark.parametrize("target", ["/etc/shadow", "../../../../../../etc/shadow"])
def test_a_link_out_of_sys_is_reported_and_not_copied(simulated: Simulated, target: str) -> None:
    kernel = simulated("2xA10")
    kernel.tree.place(HostPath(f"{FOLDER}/driver"), Link(target))
    copy = copy_host(kernel)
    assert HostPath(f"{FOLDER}/driver") not in copy.members
    assert [entry.path for entry in copy.unread] == [f"/sys/bus/pci/devices/{GPU}/driver"]


# Secrets.

LINE = (
    "BOOT_IMAGE=/vmlinuz root=UUID=0f0e ro intel_iommu=on iommu=pt vfio-pci.ids=10de:2236 rd.driver.pre=vfio-pci"
    " talos.config=https://boot:hunter2@10.0.0.1/x ignition.config.url=http://x/?token=hunter2 rd.luks.key=hunter2"
    ' pcie_acs_override=downstream console=ttyS0 modprobe.blacklist=nouveau kvm.x=http://hunter2/ "a b=hunter2" --'
    " hunter2"
)


def test_the_copied_kernel_command_line_keeps_device_arguments() -> None:
    kept = runtimes.without_strange_values(LINE)
    assert "hunter2" not in kept
    for argument in ("intel_iommu=on", "iommu=pt", "vfio-pci.ids=10de:2236", "rd.driver.pre=vfio-pci", "ro"):
        assert argument in kept.split()
    for argument in ("pcie_acs_override=downstream", "console=ttyS0", "modprobe.blacklist=nouveau"):
        assert argument in kept.split()
    assert "talos.config=(left-out)" in kept
    assert "root=(left-out)" in kept
    assert kept.endswith(" -- (left-out)\n")


def test_modules_are_copied_without_memory_addresses(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    text = "vfio_pci 16384 2 - Live 0xffffffffc0a1b000\nvfio 45056 5 vfio_pci, Live 0xffffffffc0a0e000 (E)"
    kernel.tree.place(HostPath("/proc/modules"), constant(text))
    kernel.tree.place(HostPath("/proc/cmdline"), File(read=lambda: LINE))
    members = copy_host(kernel).members
    modules, line = members[HostPath("/proc/modules")], members[HostPath("/proc/cmdline")]
    assert isinstance(modules, bytes)
    assert isinstance(line, bytes)
    assert re.findall(rb"0x\w+", modules) == [b"0x0000000000000000"] * 2
    assert b"vfio_pci 16384 2 - Live" in modules
    assert b"hunter2" not in line

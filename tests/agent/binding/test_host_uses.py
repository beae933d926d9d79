"""Functions that the host itself uses: consoles, and disks in use, by any path from a disk to its PCI function."""

import errno
import os
from collections.abc import Callable

import pytest

from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.usage.hostuse import read_host_uses
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import DeviceNode, Link, Tree, constant
from gpuvirt_sim.hostspec import CardSpec, FunctionSpec, HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel

AT = "0000:3c:00.0"
NVME, USB, FIBRE, VGA = "010802", "0c0330", "0c0400", "030000"
QUIET = "22 1 8:1 / / rw - ext4 /dev/sda1 rw"
"""The host's root file system is on another disk."""


def host(class_code: str) -> SimKernel:
    board = CardSpec(functions=(FunctionSpec(id="144d:a808", class_code=class_code, native_driver="any"),))
    spec = HostSpec(about="one function", boards={"it": board}, slots=(SlotSpec(at=AT, board="it", group=7),))
    kernel = build_host(spec)
    kernel.tree.place(HostPath("/proc/1/mountinfo"), constant(QUIET))
    return kernel


def disk(kernel: SimKernel, name: str, *, below: str = "", number: str = "259:1", folder: str = "") -> None:
    """Add a disk behind the function, some folders below its sysfs folder, or in another folder."""
    (function,) = kernel.pci.functions.values()
    folder = f"{folder or function.folder}{below}/{name}"
    kernel.tree.place(HostPath(f"{folder}/dev"), constant(number))
    kernel.tree.make(HostPath(f"{folder}/holders"))
    kernel.tree.place(HostPath(f"/sys/class/block/{name}"), Link(folder))


def use(kernel: SimKernel) -> str | None:
    return read_host_uses(kernel, scan(kernel).functions.values()).get(next(iter(kernel.pci.functions)))


def mount(line: str) -> Callable[[Tree], None]:
    return lambda tree: tree.place(HostPath("/proc/1/mountinfo"), constant(f"{QUIET}\n{line}"))


FOLDER = next(iter(host(NVME).pci.functions.values())).folder
USES: dict[str, Callable[[Tree], object]] = {
    "by its number": mount("23 1 259:1 / /data rw - xfs /dev/root rw"),
    "by its name alone, as btrfs is": mount("23 1 0:25 /@ /data rw - btrfs /dev/nvme0n1 rw"),
    "by another disk of one btrfs": lambda tree: tree.make(HostPath("/sys/fs/btrfs/c0ffee/devices/nvme0n1")),
    "by bcachefs": lambda tree: tree.place(HostPath("/sys/fs/bcachefs/c0ffee/dev-0/block"), Link("/x/nvme0n1")),
    "as swap": lambda tree: tree.place(HostPath("/proc/swaps"), constant("Filename\n/dev/nvme0n1\tpartition\t1")),
    "by LVM": lambda tree: tree.make(HostPath(f"{FOLDER}/nvme0n1/holders/dm-0")),
    "perhaps by ZFS": lambda tree: tree.make(HostPath("/sys/module/zfs")),
}


@pytest.mark.parametrize("by", USES)
def test_a_function_with_a_disk_in_use_is_used_by_the_host(by: str) -> None:
    kernel = host(NVME)
    disk(kernel, "nvme0n1")
    assert use(kernel) is None
    USES[by](kernel.tree)
    found = use(kernel)
    assert found is not None
    assert "nvme0n1" in found


@pytest.mark.parametrize(
    ("class_code", "below"),
    [(USB, "/usb3/3-1/3-1:1.0/host0/target0:0:0/0:0:0:0/block"), (FIBRE, "/host3/rport-3:0-1/target3:0:0/block")],
)
def test_a_disk_behind_usb_or_fibre_channel_is_used_by_the_host(class_code: str, below: str) -> None:
    kernel = host(class_code)
    disk(kernel, "sdb", below=below, number="8:16")
    assert use(kernel) is None
    mount("23 1 8:16 / /backup rw - ext4 /dev/sdb rw")(kernel.tree)
    assert use(kernel) == "has the disk sdb, which is mounted"


def test_a_raw_disk_of_a_vm_is_used_by_the_host() -> None:
    kernel = host(NVME)
    disk(kernel, "nvme0n1")
    kernel.tree.place(HostPath("/dev/nvme0n1"), DeviceNode(os.makedev(259, 1)))
    process = kernel.start_process("qemu-system-x86", "/dev/nvme0n1")
    assert use(kernel) == "has the disk nvme0n1, which a process has open"
    kernel.end_vm(process)
    assert use(kernel) is None
    kernel.processes.hide()
    assert "use is unknown" in (use(kernel) or "")


def test_a_multipath_namespace_is_a_disk_of_its_function() -> None:
    """With nvme_core.multipath the disk is a virtual device, and only its path is below the function."""
    kernel = host(NVME)
    disk(kernel, "nvme3c1n2")
    for name, number in (("nvme3n2", "259:7"), ("nvme3n20", "259:8")):
        disk(kernel, name, number=number, folder="/sys/devices/virtual/nvme-subsystem/nvme-subsys3")
    mount("23 1 259:8 / /data rw - xfs /dev/nvme3n20 rw")(kernel.tree)
    assert use(kernel) is None, "another namespace, of another function"
    mount("23 1 259:7 / /data rw - xfs /dev/nvme3n2 rw")(kernel.tree)
    assert use(kernel) == "has the disk nvme3n2, which is mounted"


@pytest.mark.parametrize(
    "path", ["/sys/class/block", "/proc/1/mountinfo", "/sys/class/block/nvme0n1/dev", "/sys/fs/btrfs", "/proc/swaps"]
)
def test_a_function_with_an_unreadable_use_counts_as_used(path: str) -> None:
    kernel = host(NVME)
    disk(kernel, "nvme0n1")
    kernel.faults.fail(HostPath(path), errno.EACCES)
    assert use(kernel) is not None


@pytest.mark.parametrize(
    "path", [f"/sys/bus/pci/devices/{AT}/boot_vga", "/sys/class/graphics", "/sys/class/graphics/fb0/device"]
)
def test_a_display_with_an_unreadable_framebuffer_counts_as_the_console(path: str) -> None:
    kernel = host(VGA)
    (function,) = kernel.pci.functions.values()
    kernel.tree.place(HostPath(f"{function.folder}/boot_vga"), constant("1"))
    kernel.tree.place(HostPath("/sys/class/graphics/fb0/device"), Link("../../../devices/platform/other"))
    kernel.tree.make(HostPath("/sys/class/graphics/fbcon"))
    assert use(kernel) is None
    kernel.faults.fail(HostPath(path), errno.EIO)
    assert use(kernel) is not None

"""The real kernel over plain files, and the answers that the real and the simulated kernel share."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuvirt.errors import LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import Kernel, RealKernel, concerns_devices, parse
from gpuvirt.hardware.access.openfiles import VFIO_DEVICE
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.hardware.usage.processes import NAMESPACE, read_open_nodes
from gpuvirt.paths import HostPath, HostRoots
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.devices.vfio import group_number
from gpuvirt_sim.files.tree import DeviceNode, Link, constant
from gpuvirt_sim.hostspec import host_names
from gpuvirt_sim.kernel import SimKernel
from tests.sim.simulated import Simulated


@pytest.mark.parametrize("name", host_names())
def test_a_scan_of_exported_files_equals_a_scan_in_memory(simulated: Simulated, tmp_path: Path, name: str) -> None:
    kernel = simulated(name)
    export(kernel, tmp_path)
    assert scan(RealKernel(HostRoots.under(tmp_path))) == scan(kernel)


@pytest.fixture(params=["simulated", "real"])
def kernel(request: pytest.FixtureRequest, simulated: Simulated, tmp_path: Path) -> Kernel:
    host = simulated("2xA10")
    if request.param == "simulated":
        return host
    export(host, tmp_path)
    return RealKernel(HostRoots.under(tmp_path))


FOLDER = "/sys/bus/pci/devices/0000:65:00.0"


def test_modules_and_programs_are_read_below_the_system_root(tmp_path: Path) -> None:
    root, system = tmp_path / "host", tmp_path / "system"
    for folder in (root / "sys", root / "lib64", root / "lib", system / "lib"):
        folder.mkdir(parents=True)
        (folder / "where").write_text(str(folder.relative_to(tmp_path)))
    kernel = RealKernel(HostRoots.under(root, system))
    found = {path: kernel.read(HostPath(path)) for path in ("/sys/where", "/lib64/where", "/lib/where")}
    assert found == {"/sys/where": b"host/sys", "/lib64/where": b"host/lib64", "/lib/where": b"system/lib"}
    assert kernel.listdir(HostPath("/lib")) == ["where"]


def test_both_kernels_read_files_links_and_folders(kernel: Kernel) -> None:
    assert kernel.read(HostPath(f"{FOLDER}/vendor")) == b"0x10de\n"
    assert kernel.read(HostPath(f"{FOLDER}/config"), limit=2) == b"\xde\x10"
    assert kernel.readlink(HostPath(f"{FOLDER}/driver")) == "../../../../bus/pci/drivers/vfio-pci"
    assert "0000:65:00.0" in kernel.listdir(HostPath("/sys/bus/pci/devices"))


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda kernel: kernel.read(HostPath("/sys/none")), FileNotFoundError),
        (lambda kernel: kernel.read(HostPath("/sys/bus/pci")), IsADirectoryError),
        (lambda kernel: kernel.listdir(HostPath("/sys/none")), FileNotFoundError),
        (lambda kernel: kernel.listdir(HostPath(f"{FOLDER}/vendor")), NotADirectoryError),
        (lambda kernel: kernel.readlink(HostPath(f"{FOLDER}/vendor")), OSError),
        (lambda kernel: kernel.readlink(HostPath("/sys/none")), FileNotFoundError),
        (lambda kernel: kernel.device_number(HostPath("/dev/vfio/99")), FileNotFoundError),
        (lambda kernel: kernel.write(HostPath("/sys/none"), b"1"), FileNotFoundError),
        (lambda kernel: kernel.write(HostPath("/sys/bus/pci"), b"1"), IsADirectoryError),
    ],
)
def test_both_kernels_raise_the_same_errors(
    kernel: Kernel, ask: Callable[[Kernel], object], error: type[OSError]
) -> None:
    with pytest.raises(error):
        ask(kernel)


def test_both_kernels_refuse_a_lease_without_a_node(kernel: Kernel) -> None:
    with kernel.lease(IommuGroup(12)):
        pass
    with pytest.raises(LeaseUnavailableError), kernel.lease(IommuGroup(99)):
        pass


def test_a_loop_of_links_is_an_error(kernel: Kernel, tmp_path: Path) -> None:
    if isinstance(kernel, SimKernel):
        kernel.tree.place(HostPath("/sys/loop"), Link("loop"))
    else:
        (tmp_path / "sys/loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        kernel.read(HostPath("/sys/loop"))


def test_a_write_changes_the_file(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/x").write_text("before")
    RealKernel(HostRoots.under(tmp_path)).write(HostPath("/sys/x"), b"after")
    assert (tmp_path / "sys/x").read_text().startswith("after")


def test_an_error_of_the_kernel_has_its_path() -> None:
    """A descriptor has no path: the kernel's error alone would read `No space left on device (None)`."""
    host = RealKernel(HostRoots.under(Path("/")))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        host.write(HostPath("/dev/full"), b"1")
    with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
        host.read(HostPath("/proc/self/mem"))


def test_a_path_of_the_host_is_found_below_its_root() -> None:
    roots = HostRoots.under(Path("/host"))
    assert roots.local(HostPath("/dev/vfio/12")) == Path("/host/dev/vfio/12")
    assert roots.local(HostPath("/usr/share/misc/pci.ids")) == Path("/host/usr/share/misc/pci.ids")
    assert roots.local(HostPath("/sys")) == Path("/host/sys")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ESTALE])
def test_open_nodes_are_unread_if_a_process_cannot_be_read(simulated: Simulated, number: int) -> None:
    """A process of another user, or a process that a security module hides, may have any node open."""
    host = simulated("2xA10")
    process = host.start_vm(IommuGroup(12))
    host.faults.fail(HostPath(f"/proc/{process.pid}/fd"), number)
    found = read_open_nodes(host)
    assert isinstance(found, Unread)
    assert found.path == f"/proc/{process.pid}/fd"
    assert with_users(host, scan(host)).users is None


def test_open_nodes_are_unread_in_a_pid_namespace_below_the_hosts(simulated: Simulated) -> None:
    host = simulated("2xA10")
    assert read_open_nodes(host) == ()
    host.processes.hide()
    assert read_open_nodes(host) == Unread(NAMESPACE, seen="pid:[4026532298]")


def test_a_process_that_has_just_ended_has_no_open_nodes(simulated: Simulated) -> None:
    host = simulated("2xA10")
    process = host.start_vm(IommuGroup(12))
    host.faults.fail(HostPath(f"/proc/{process.pid}/fd"), errno.ENOENT)
    assert read_open_nodes(host) == ()


@pytest.mark.parametrize("devices", [True, False])
def test_the_user_of_a_group_is_found_without_the_groups_node(simulated: Simulated, *, devices: bool) -> None:
    host = simulated("2xA10")
    process = host.start_vm(IommuGroup(12), devices=devices)
    host.delete_node(IommuGroup(12))
    facts = with_users(host, scan(host))
    assert facts.users is not None
    assert [user.pid for user in facts.users[IommuGroup(12)]] == [process.pid]
    assert facts.users_of_lost_nodes == ()


def test_a_stale_node_with_the_number_of_another_group_names_no_process(simulated: Simulated) -> None:
    """sysfs has the device number of a group; a node in `/dev` may be of an earlier boot or created by hand."""
    host = simulated("2xA10")
    process = host.start_vm(IommuGroup(12))
    host.tree.place(HostPath("/dev/vfio/22"), DeviceNode(group_number(IommuGroup(12))))
    users = with_users(host, scan(host)).users
    assert users is not None
    assert {group: [user.pid for user in found] for group, found in users.items()} == {12: [process.pid]}


def test_users_are_unknown_while_a_device_number_cannot_be_read(simulated: Simulated) -> None:
    host = simulated("2xA10")
    host.faults.answer(HostPath("/sys/class/vfio/12/dev"), b"garbled")
    assert with_users(host, scan(host)).users is None
    host.faults.heal()
    host.faults.fail(HostPath("/sys/class/vfio"), errno.EACCES)
    assert with_users(host, scan(host)).users is None


def test_the_user_of_a_noiommu_group_is_found(simulated: Simulated) -> None:
    host = simulated("2xA10")
    number = os.makedev(511, 7)
    host.tree.place(HostPath("/sys/class/vfio/noiommu-5/dev"), constant("511:7"))
    host.tree.place(HostPath("/dev/vfio/noiommu-5"), DeviceNode(number))
    process = host.start_process("dpdk-testpmd", "/dev/vfio/noiommu-5")
    users = with_users(host, scan(host)).users
    assert users is not None
    assert [user.pid for user in users[IommuGroup(5)]] == [process.pid]


def test_a_vfio_device_passed_without_its_group_is_in_use(simulated: Simulated) -> None:
    """The file of a VFIO device names no device, so it counts for each device without an open node."""
    host = simulated("2xA10")
    process = host.start_process("crosvm", VFIO_DEVICE)
    assert [user.pid for user in with_users(host, scan(host)).users_of_lost_nodes] == [process.pid]


def test_a_host_without_processes_has_no_users(simulated: Simulated) -> None:
    assert with_users(simulated("2xA10"), scan(simulated("2xA10"))).users == {}


BIND = (
    b"bind@/devices/pci0000:64/0000:64:02.0/0000:65:00.0\0ACTION=bind\0"
    b"DEVPATH=/devices/pci0000:64/0000:64:02.0/0000:65:00.0\0SUBSYSTEM=pci\0DRIVER=vfio-pci\0PCI_SLOT_NAME=0000:65:00.0\0"
)


def test_a_uevent_is_parsed() -> None:
    assert parse(BIND)["PCI_SLOT_NAME"] == "0000:65:00.0"
    assert set(parse(BIND)) == {"ACTION", "DEVPATH", "SUBSYSTEM", "DRIVER", "PCI_SLOT_NAME"}
    assert concerns_devices(BIND)


@pytest.mark.parametrize(
    "message",
    [b"", b"\0", b"libudev\0\xfe\xed\xca\xfe", b"add@/devices/virtual/net/veth0\0SUBSYSTEM=net\0", b"\xff\xfe@\0=\0"],
)
def test_uevents_of_other_subsystems_are_ignored(message: bytes) -> None:
    assert not concerns_devices(message)


@pytest.fixture
def real() -> RealKernel:
    return RealKernel(HostRoots.under(Path("/")))


INITIAL_USER_NAMESPACE = 0xEFFFFFFD
"""The inode of the namespace on every kernel since 3.8; uevents go to network namespaces that it owns."""


def test_a_uevent_of_a_real_kernel_wakes_the_listener(real: RealKernel) -> None:
    """A write to a device's `uevent` file makes the kernel send a uevent."""
    trigger = next((path for path in Path("/sys/bus/pci/devices").glob("*/uevent") if os.access(path, os.W_OK)), None)
    if trigger is None or Path("/proc/self/ns/user").stat().st_ino != INITIAL_USER_NAMESPACE:
        pytest.skip("the kernel sends no uevent to here: run as root, on a host with PCI devices, in no user namespace")
    woken = threading.Event()
    stop = real.on_uevent(woken.set)
    try:
        trigger.write_text("change")
        assert woken.wait(100)
    finally:
        stop()

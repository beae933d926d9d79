"""Users of a device are unknown, and never none, where one file of the search for them can't be read."""

import errno
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.usage import hostuse
from gpuvirt.hardware.usage.nativeusers import read_native_users
from gpuvirt.hardware.usage.processes import INITIAL_NAMESPACE, NAMESPACE, read_open_nodes, shows_all
from gpuvirt.hardware.usage.users import cdevs_of, read_users, read_users_of
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import DeviceNode, constant
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, load_host
from gpuvirt_sim.kernel import SimKernel

GROUP, CDEVS = IommuGroup(12), {"vfio0": IommuGroup(12)}
T4 = PciAddress("0000:3b:00.0")
WATCHDOG, NUMBER = "/dev/watchdog", "/sys/dev/char/10:130"


@pytest.fixture
def kernel() -> SimKernel:
    slots = (SlotSpec(at="0000:65:00.0", board="A10", group=12, driver="vfio-pci"),)
    return build_host(HostSpec(about="an A10 on vfio-pci", iommufd=True, slots=slots))


def with_watchdog() -> SimKernel:
    """Return a host with T4, and a device that is no GPU's."""
    kernel = build_host(load_host("4xT4"))
    kernel.tree.place(HostPath("/sys/devices/virtual/misc/watchdog/dev"), constant("10:130"))
    kernel.tree.place(HostPath(WATCHDOG), DeviceNode(10 << 8 | 130))
    return kernel


def read(kernel: SimKernel) -> list[object]:
    return [read_users(kernel, CDEVS), read_users_of(kernel, frozenset({GROUP}), CDEVS).get(GROUP)]


def test_all_users_are_seen_while_every_file_can_be_read(kernel: SimKernel) -> None:
    assert not any(isinstance(found, Unread) for found in read(kernel))


@pytest.mark.parametrize(
    "path",
    ["/sys/class/vfio", "/sys/class/vfio/12/dev", "/sys/class/vfio-dev/vfio0/dev"],
)
def test_users_are_unknown_while_the_number_of_a_node_is_unread(kernel: SimKernel, path: str) -> None:
    kernel.faults.fail(HostPath(path), errno.EIO)
    assert all(isinstance(found, Unread) for found in read(kernel))


def test_the_number_of_another_groups_node_is_not_read(kernel: SimKernel) -> None:
    kernel.tree.place(HostPath("/sys/class/vfio/22/dev"), constant("511:22"))
    kernel.faults.fail(HostPath("/sys/class/vfio/22/dev"), errno.EIO)
    assert read_users_of(kernel, frozenset({GROUP}), CDEVS) == {GROUP: ()}


@pytest.mark.parametrize("group", [None, Unread(HostPath("/group"), errno=errno.EIO)])
def test_a_node_belongs_to_no_group_while_its_devices_group_is_unknown(kernel: SimKernel, group: Unread | None) -> None:
    (function,) = scan(kernel).functions.values()
    assert cdevs_of([function]) == CDEVS
    assert cdevs_of([replace(function, iommu_group=group)]) == {}


def test_a_user_whose_name_is_unread_counts(kernel: SimKernel) -> None:
    process = kernel.start_vm(GROUP)
    kernel.faults.fail(HostPath(f"/proc/{process.pid}/comm"), errno.EACCES)
    users = read_users_of(kernel, frozenset({GROUP}), CDEVS)[GROUP]
    assert users == (OpenDeviceUser(process.pid, "unknown", HostPath("/dev/vfio/12")),)


@pytest.mark.parametrize(
    ("namespace", "shows"), [(INITIAL_NAMESPACE, True), ("pid:[4026532201]", False), (None, False)]
)
def test_a_proc_shows_all_processes_only_if_its_namespace_is_known(
    tmp_path: Path, namespace: str | None, *, shows: bool
) -> None:
    (tmp_path / "1/ns").mkdir(parents=True)
    if namespace is not None:
        (tmp_path / "1/ns/pid").symlink_to(namespace)
    assert shows_all(tmp_path) is shows


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_users_are_unknown_while_processes_are_hidden(kernel: SimKernel, number: int) -> None:
    kernel.faults.fail(HostPath("/proc"), number)
    assert all(isinstance(found, Unread) for found in read(kernel))


def test_a_kernel_without_pid_namespaces_shows_all_processes(kernel: SimKernel) -> None:
    kernel.tree.remove(NAMESPACE)
    assert not any(isinstance(found, Unread) for found in read(kernel))


@pytest.mark.parametrize(
    "path", ["/sys/dev/char", "/sys/dev/block", NUMBER, f"/proc/driver/nvidia/gpus/{T4}/information"]
)
def test_users_of_a_native_driver_are_unknown_while_the_number_of_a_node_is_unread(path: str) -> None:
    kernel = with_watchdog()
    kernel.start_process("watchdogd", WATCHDOG)
    assert read_native_users(kernel, [T4]) == {}
    kernel.faults.fail(HostPath(path), errno.EIO)
    assert isinstance(read_native_users(kernel, [T4]), Unread)


def test_the_number_of_a_node_that_no_process_has_open_is_not_read() -> None:
    kernel = with_watchdog()
    kernel.faults.fail(HostPath(NUMBER), errno.EIO)
    assert read_native_users(kernel, [T4]) == {}


def test_users_are_unknown_while_a_group_has_an_odd_name(kernel: SimKernel) -> None:
    kernel.tree.place(HostPath("/sys/class/vfio/odd/dev"), constant("511:99"))
    assert all(isinstance(found, Unread) for found in read(kernel))


def test_an_unexpected_error_of_the_search_is_not_taken_for_no_users(kernel: SimKernel) -> None:
    kernel.faults.fail(HostPath("/proc"), errno.EIO)
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        read_open_nodes(kernel)


@pytest.mark.parametrize("path", ["/sys/fs/btrfs", "/sys/fs/btrfs/pool", "/sys/fs/btrfs/pool/devices"])
def test_the_disks_of_a_pool_are_unknown_while_its_folder_is_unread(kernel: SimKernel, path: str) -> None:
    kernel.tree.place(HostPath("/sys/fs/btrfs/pool/devices/nvme0n1"), constant(""))
    assert hostuse._pooled(kernel) == frozenset({"nvme0n1"})
    kernel.faults.fail(HostPath(path), errno.EIO)
    assert isinstance(hostuse._pooled(kernel), Unread)

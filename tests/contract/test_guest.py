"""Tests that need a real kernel: equal scans, blocked processes that no signal ends, uevents."""

import errno
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from gpuvirt.cli.evidence import EvidenceSources, diagnose
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind, PciFunction
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.reasons import FindingCode, ReasonCode
from gpuvirt.model.reasons.codes import Level
from gpuvirt.paths import HostPath, KubeletPaths
from tests.contract.guesthost import GuestHost, Guests
from tests.contract.hosts import LONG_S, Answer, MemoryHost, bind, exists, group_of, write

pytestmark = [pytest.mark.ring("kernel"), pytest.mark.xdist_group("guest")]

GPU, AUDIO = PciAddress("0000:01:00.0"), PciAddress("0000:01:00.1")
SRIOV = PciAddress("0000:05:00.0")
T4, OTHER_T4 = PciAddress("0000:07:01.0"), PciAddress("0000:07:02.0")
UNBIND = "/sys/bus/pci/drivers/vfio-pci/unbind"
LSPCI = re.compile(r"(?P<address>\S+) .*?\[(?P<class_code>\w{4})\]: .*\[(?P<id>\w{4}:\w{4})\](?: \(rev \w+\))?")


@pytest.fixture
def guest(guests: Guests) -> Iterator[GuestHost]:
    with guests.fresh() as guest:
        yield guest


def listed(host: GuestHost) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield address, class, id and driver of each function, as lspci prints them."""
    for block in host.guest.run("lspci", "-Dnnk").strip().split("\n0000:"):
        head, *details = block.splitlines()
        match = LSPCI.fullmatch(head if head.startswith("0000:") else f"0000:{head}")
        assert match, head
        drivers = [line.partition(": ")[2] for line in details if "Kernel driver in use" in line]
        yield match["address"], match["class_code"], match["id"], drivers[0] if drivers else None


def test_the_scan_finds_the_functions_that_lspci_prints(guest: GuestHost) -> None:
    bind(guest, GPU, "vfio-pci")
    found = scan(guest.kernel)
    ours = [
        (function.address, f"{function.class_code >> 8:04x}", str(function.id), function.driver)
        for function in found.functions.values()
    ]
    assert ours == list(listed(guest))
    assert not found.unread
    assert not found.malformed_entries


def cards(facts: Facts) -> Mapping[PciAddress, PciFunction]:
    """Return the functions behind the root ports: the others are of QEMU's board, which the simulated host lacks."""
    return {address: function for address, function in facts.functions.items() if not address.startswith("0000:00:")}


def shared(functions: Mapping[PciAddress, PciFunction]) -> set[frozenset[PciAddress]]:
    """Return the functions of each group; group numbers depend on the scan order, so they are not compared."""
    groups: defaultdict[object, set[PciAddress]] = defaultdict(set)
    for address, function in functions.items():
        groups[function.iommu_group].add(address)
    return {frozenset(group) for group in groups.values()}


def test_the_simulated_host_equals_the_guest(guest: GuestHost) -> None:
    """Not compared: boot ids, group numbers, and the functions of QEMU's own board on bus 0."""
    real, simulated = scan(guest.kernel), scan(MemoryHost().kernel)
    ours, theirs = cards(simulated), cards(real)
    assert list(ours) == list(theirs)
    for address, resource in theirs.items():
        other = ours[address]
        assert (resource.kind, resource.id, resource.class_code, resource.driver) == (
            other.kind,
            other.id,
            other.class_code,
            other.driver,
        )
        assert (resource.subsystem, resource.revision, resource.numa_node) == (
            other.subsystem,
            other.revision,
            other.numa_node,
        )
        assert resource.sriov_total_vfs == other.sriov_total_vfs
    assert shared(ours) == shared(theirs)
    assert real.vgpu_hosts == simulated.vgpu_hosts
    assert real.group_nodes == simulated.group_nodes == frozenset()
    assert real.platform.vfio_container == simulated.platform.vfio_container
    assert real.platform.iommufd == simulated.platform.iommufd


def test_the_inventories_of_guest_and_simulated_host_are_equal(guest: GuestHost) -> None:
    real, simulated = (build_inventory(scan(kernel)).gpus for kernel in (guest.kernel, MemoryHost().kernel))
    assert {address: (gpu.mode, gpu.siblings) for address, gpu in real.items()} == {
        address: (gpu.mode, gpu.siblings) for address, gpu in simulated.items()
    }


def test_sigkill_does_not_end_a_blocked_writer(guest: GuestHost) -> None:
    """FUSE lets a blocked caller of the mounted simulator be killed. Here only the device's user can end the wait."""
    bind(guest, GPU, "vfio-pci")
    bind(guest, AUDIO, "vfio-pci")
    vm = guest.start_vm(group_of(guest, GPU))
    writer = guest.start_writer(UNBIND, GPU)
    assert vm.asked_back(LONG_S)
    writer.kill()
    assert writer.answer(guest.patience_s) is None
    state = guest.kernel.read(HostPath(f"/proc/{writer.pid}/stat")).rpartition(b")")[2].split()[0]
    assert state == b"D"
    assert b"vfio" in guest.kernel.read(HostPath(f"/proc/{writer.pid}/wchan"))
    vm.end()
    ended = writer.answer(LONG_S)
    assert ended is not None
    assert ended != Answer(), "the writer was killed before it printed a result"
    assert not exists(guest, f"/sys/bus/pci/devices/{GPU}/driver"), "the write of the killed process took effect"


def test_processes_that_use_a_group_are_found(guest: GuestHost) -> None:
    bind(guest, GPU, "vfio-pci")
    bind(guest, AUDIO, "vfio-pci")
    group = group_of(guest, GPU)
    assert with_users(guest.kernel, scan(guest.kernel)).users == {}
    vm = guest.start_vm(group)
    users = with_users(guest.kernel, scan(guest.kernel)).users
    assert users is not None
    assert [(user.node, user.command[:6]) for user in users[group]] == [(f"/dev/vfio/{group}", "python")]
    vm.end()


def test_uevents_arrive(guest: GuestHost) -> None:
    woken = threading.Event()
    stop = guest.kernel.on_uevent(woken.set)
    for driver, before in pairwise(("nvidia", "vfio-pci", "nvidia")):
        woken.clear()
        bind(guest, GPU, before)
        assert woken.wait(LONG_S), f"from {driver} to {before}"
    woken.clear()
    assert write(guest, f"/sys/class/mdev_bus/{T4}/mdev_supported_types/nvidia-222/create", MDEV) == 0
    assert woken.wait(LONG_S)
    stop()


MDEV = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"


def test_gpus_behind_the_same_bridge_can_only_be_used_together(guest: GuestHost) -> None:
    bind(guest, T4, "vfio-pci")
    group = group_of(guest, T4)
    assert group == group_of(guest, OTHER_T4)
    with pytest.raises(PermissionError):
        guest.start_vm(group)
    bind(guest, OTHER_T4, "vfio-pci")
    guest.start_vm(group).end()
    assert write(guest, UNBIND, OTHER_T4) == 0
    guest.start_vm(group).end()


def test_virtual_functions_are_recognized(guest: GuestHost) -> None:
    assert write(guest, f"/sys/bus/pci/devices/{SRIOV}/sriov_numvfs", "2") == 0
    functions = scan(guest.kernel).functions
    vfs = functions[SRIOV].virtfns
    assert len(vfs) == 2
    for vf in vfs:
        assert functions[vf].id == functions[SRIOV].id
        # QEMU 7.2 creates VFs when they are enabled, with the class of the emulated device, an NVMe disk.
        assert functions[vf].kind is FunctionKind.OTHER
        assert guest.kernel.readlink(HostPath(f"/sys/bus/pci/devices/{vf}/physfn")).endswith(f"/{SRIOV}")
    assert len({functions[address].iommu_group for address in (SRIOV, *vfs)}) == 3
    assert write(guest, f"/sys/bus/pci/devices/{SRIOV}/sriov_numvfs", "0") == 0
    assert scan(guest.kernel).functions[SRIOV].virtfns == ()


def test_an_mdev_parent_that_is_no_gpu_is_malformed_and_answers_eusers(guest: GuestHost) -> None:
    """The kernel counts the mdevs of a driver that does not: EUSERS, while drivers themselves answer ENOSPC."""
    guest.guest.run("insmod", "/mnt/share/mdpy.ko")
    try:
        create = "/sys/class/mdev_bus/mdpy/mdev_supported_types/mdpy-vga/create"
        assert [write(guest, create, f"{MDEV[:-1]}{number}") for number in range(5)] == [0, 0, 0, 0, errno.EUSERS]
        found = scan(guest.kernel)
        assert len(found.malformed_entries) == 5
        assert not any(host.live for host in found.vgpu_hosts.values())
        for number in range(4):
            assert write(guest, f"/sys/bus/mdev/devices/{MDEV[:-1]}{number}/remove", "1") == 0
    finally:
        guest.guest.run("rmmod", "mdpy")


def test_doctor_findings_match_the_guest(guest: GuestHost, tmp_path: Path) -> None:
    """The guest has an IOMMU that remaps interrupts, no KVM, and a GPU whose audio function is not on VFIO."""
    bind(guest, GPU, "vfio-pci")
    around = EvidenceSources(
        kubelet=KubeletPaths(tmp_path), settings=Settings(), ids=PciIds((pciids.shipped(),)), clock=RealClock()
    )
    results = diagnose(guest.kernel, around).results
    found = {(result.check, finding.level, finding.code) for result in results for finding in result.findings}
    assert {finding for finding in found if finding[1] is Level.ERROR} == {
        ("kvm", Level.ERROR, FindingCode.KVM_MISSING),
        ("group_viability", Level.ERROR, ReasonCode.GROUP_NOT_VIABLE),
    }
    for check in ("virtualization", "bars", "iommu", "interrupt_remapping", "vfio_modules", "reset_methods"):
        assert (check, Level.OK, None) in found, [finding for finding in found if finding[0] == check]
    shared = [
        finding.subject for result in results for finding in result.findings if finding.code is FindingCode.SHARED_GROUP
    ]
    assert shared == [T4]
    assert not [finding for finding in found if finding[1] is Level.UNKNOWN]

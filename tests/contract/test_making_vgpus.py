"""Back ends create and remove vGPUs, and VFs are enabled and disabled, with the same errnos on each host."""

import errno
import os

import pytest
from lab.kernel.notools import NO_TOOLS

from gpuvirt.errors import VfsUnchangedError, VgpuUnavailableError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Framework, LiveVgpu
from gpuvirt.hardware.functions import sriov
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.paths import HostPath
from tests.contract.hosts import LONG_S, Answer, Host, bind, exists, group_of, until_free, write
from tests.contract.proofs import disable_vfs, enable_vfs, remove

PARENT = PciAddress("0000:07:01.0")
SMALL, LARGE = VgpuType("GRID T4-1B"), VgpuType("GRID T4-2B")
UUID = VgpuId("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")
MDEV = backend_of(Framework.MDEV)
SRIOV = PciAddress("0000:05:00.0")
"""A GPU that can have four VFs."""
NUMVFS = f"/sys/bus/pci/devices/{SRIOV}/sriov_numvfs"


def uuid(number: int) -> VgpuId:
    return VgpuId(f"{UUID[:-2]}{number:02}")


def live(host: Host) -> tuple[LiveVgpu, ...]:
    return scan(host.kernel).vgpu_hosts[PARENT].live


def test_a_created_vgpu_is_found_and_removed_under_a_lease(host: Host) -> None:
    MDEV.create(host.kernel, PARENT, LARGE, UUID)
    (made,) = live(host)
    assert (made.id, made.type, made.parent, made.type_id) == (UUID, LARGE, PARENT, "nvidia-223")
    group = group_of(host, UUID)
    assert made.group == group
    with host.kernel.lease(group):
        remove(MDEV, host.kernel, made)
    assert live(host) == ()


def test_creating_fails_on_a_full_gpu_for_another_size_and_for_a_used_uuid(host: Host) -> None:
    for number in range(12):
        MDEV.create(host.kernel, PARENT, LARGE, uuid(number))
    for type_, name, expected in (
        (LARGE, uuid(99), errno.ENOSPC),
        (SMALL, uuid(99), errno.ENOSPC),
        (LARGE, uuid(3), errno.EEXIST),
    ):
        with pytest.raises(OSError, match=os.strerror(expected)) as failed:
            MDEV.create(host.kernel, PARENT, type_, name)
        assert failed.value.errno == expected
    assert len(live(host)) == 12


def test_an_unknown_type_is_reported_with_the_available_types(host: Host) -> None:
    with pytest.raises(VgpuUnavailableError, match=r"07:01.0 does not offer .* A10-4Q now; .* GRID T4-1B, GRID T4-2B"):
        MDEV.create(host.kernel, PARENT, VgpuType("NVIDIA A10-4Q"), UUID)
    bind(host, PARENT, "vfio-pci")
    with pytest.raises(VgpuUnavailableError, match="has no type"):
        MDEV.create(host.kernel, PARENT, LARGE, UUID)


def test_a_removed_or_replaced_vgpu_is_not_removed(host: Host) -> None:
    MDEV.create(host.kernel, PARENT, LARGE, UUID)
    (first,) = live(host)
    remove(MDEV, host.kernel, first)
    with pytest.raises(VgpuUnavailableError, match="points to nothing"):
        remove(MDEV, host.kernel, first)
    MDEV.create(host.kernel, PARENT, SMALL, UUID)
    with pytest.raises(VgpuUnavailableError, match="points to nvidia-222; expected nvidia-223"):
        remove(MDEV, host.kernel, first)
    assert [vgpu.type for vgpu in live(host)] == [SMALL]


def test_a_vgpu_in_use_cannot_be_leased_and_its_vm_gets_no_vfio_request(host: Host) -> None:
    MDEV.create(host.kernel, PARENT, LARGE, UUID)
    group = group_of(host, UUID)
    vm = host.start_vm(group)
    with pytest.raises(Exception, match="in another process"), host.kernel.lease(group):
        pytest.fail("leased, though it is in use")
    assert not vm.asked_back()
    vm.end()
    until_free(host, group)


def vfs(host: Host) -> tuple[PciAddress, ...]:
    return scan(host.kernel).functions[SRIOV].virtfns


def test_vfs_are_enabled_and_disabled_by_sysfs_without_sriov_manage(host: Host) -> None:
    assert (sriov.read_total(host.kernel, SRIOV), sriov.count_vfs(host.kernel, SRIOV)) == (4, 0)
    enable_vfs(host.kernel, NO_TOOLS, SRIOV)
    functions, found = scan(host.kernel).functions, vfs(host)
    assert (len(found), sriov.count_vfs(host.kernel, SRIOV)) == (4, 4)
    links = [host.kernel.readlink(HostPath(f"/sys/bus/pci/devices/{vf}/physfn")) for vf in found]
    assert {link.rpartition("/")[2] for link in links} == {SRIOV}
    assert len({functions[vf].iommu_group for vf in (SRIOV, *found)}) == 5, (
        "each function has an IOMMU group of its own"
    )
    disable_vfs(host.kernel, NO_TOOLS, SRIOV)
    assert (vfs(host), sriov.count_vfs(host.kernel, SRIOV)) == ((), 0)
    assert not any(exists(host, f"/sys/bus/pci/devices/{vf}") for vf in found)
    enable_vfs(host.kernel, NO_TOOLS, SRIOV, 2)
    assert vfs(host) == found[:2]


@pytest.mark.parametrize(
    ("before", "text", "expected", "after"),
    [
        ("0", "2", 0, 2),
        ("0", "0x2\n", 0, 2),
        ("0", "0", 0, 0),
        ("2", "2", 0, 2),
        ("2", "3", errno.EBUSY, 2),
        ("2", "0", 0, 0),
        ("0", "5", errno.ERANGE, 0),
        ("0", "-1", errno.EINVAL, 0),
        ("0", "70000", errno.EINVAL, 0),
        ("0", "two", errno.EINVAL, 0),
    ],
)
def test_errnos_of_writes_to_sriov_numvfs(host: Host, before: str, text: str, expected: int, after: int) -> None:
    assert write(host, NUMVFS, before) == 0
    assert write(host, NUMVFS, text) == expected
    assert sriov.count_vfs(host.kernel, SRIOV) == after
    assert int(host.kernel.read(HostPath(NUMVFS))) == after


def test_enabling_vfs_needs_a_driver_that_supports_sriov(host: Host) -> None:
    assert write(host, f"/sys/bus/pci/devices/{SRIOV}/driver/unbind", SRIOV) == 0
    assert write(host, NUMVFS, "2") == errno.ENOENT
    bind(host, SRIOV, "vfio-pci")
    assert write(host, NUMVFS, "2") == errno.ENOENT


def test_unbinding_the_pf_driver_removes_its_vfs(host: Host) -> None:
    assert write(host, NUMVFS, "2") == 0
    assert write(host, f"/sys/bus/pci/devices/{SRIOV}/driver/unbind", SRIOV) == 0
    assert vfs(host) == ()


def test_disabling_a_vf_in_use_blocks_and_sends_a_vfio_request(host: Host) -> None:
    assert write(host, NUMVFS, "2") == 0
    first = vfs(host)[0]
    bind(host, first, "vfio-pci")
    vm = host.start_vm(group_of(host, first))
    job = host.start_write(NUMVFS, "0")
    assert vm.asked_back(LONG_S), "gpuvirt must never start this write"
    assert job.answer(host.patience_s) is None
    vm.end()
    assert job.answer(LONG_S) == Answer()
    assert vfs(host) == ()


def test_vfs_cannot_be_enabled_without_sriov(host: Host) -> None:
    with pytest.raises(VfsUnchangedError, match="it has no SR-IOV"):
        enable_vfs(host.kernel, NO_TOOLS, PARENT)

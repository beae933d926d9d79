"""Kernels with a node for each VFIO device (VFIO_DEVICE_CDEV, from 6.6 on): exclusive opens, and leases.

Each line of the second table of lab/kernel/README.md is a test here. The mounted simulator is left out: VFIO's ioctls
don't pass through FUSE.
"""

import errno
import os
import posixpath
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import passthrough
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from tests.contract.hosts import LONG_S, Answer, CdevHost, bind, cdev_of, exists, group_of, write

GPU, AUDIO = PciAddress("0000:01:00.0"), PciAddress("0000:01:00.1")
DEVICE = f"/sys/bus/pci/devices/{GPU}"
DRIVER = "/sys/bus/pci/drivers/vfio-pci"
UNBIND = f"{DRIVER}/unbind"
NODES = "/dev/vfio/devices"
CLASS = "/sys/class/vfio-dev"


@pytest.fixture
def host(cdevs: CdevHost) -> CdevHost:
    """A kernel with device nodes and without group nodes."""
    return cdevs


def ready(host: CdevHost) -> tuple[str, str]:
    """Bind a GPU and its audio function to vfio-pci, and return the names of their nodes."""
    bind(host, GPU, "vfio-pci")
    bind(host, AUDIO, "vfio-pci")
    return cdev_of(host, GPU), cdev_of(host, AUDIO)


def linked(host: CdevHost, link: str) -> str:
    """Return the path that a link of sysfs points to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(link), host.kernel.readlink(HostPath(link))))


def failure(host: CdevHost, *devices: str) -> int | None:
    """Return the errno of opening and binding devices."""
    with pytest.raises(OSError, match=r".") as failed:
        host.open_devices(*devices)
    return failed.value.errno


def reasons(facts: Facts) -> Mapping[str, set[ReasonCode]]:
    """Return the reasons for which devices are not offered."""
    inventory = build_inventory(facts)
    names = Naming(PciIds((pciids.shipped(),)))
    found: defaultdict[str, set[ReasonCode]] = defaultdict(set)
    for finding in passthrough(inventory, names, Settings()):
        if isinstance(finding, Reason):
            found[finding.subject].add(finding.code)
    return found


def test_a_vfio_device_node_opens_many_times_and_binds_once(host: CdevHost) -> None:
    ready(host)
    first = host.open_devices(GPU)
    assert failure(host, GPU) == errno.EINVAL
    host.open_devices(GPU, bind=False).end()
    first.end()
    host.open_devices(GPU).end()


def test_a_second_process_cannot_bind_a_device_of_the_same_group(host: CdevHost) -> None:
    ready(host)
    first = host.open_devices(GPU)
    assert failure(host, AUDIO) == errno.EPERM
    first.end()
    host.open_devices(GPU, AUDIO).end()


def test_a_native_driver_and_a_vm_exclude_each_other_in_a_group(host: CdevHost) -> None:
    bind(host, GPU, "vfio-pci")
    assert failure(host, GPU) == errno.EPERM
    assert write(host, "/sys/bus/pci/drivers/snd_hda_intel/unbind", AUDIO) == 0
    vm = host.open_devices(GPU)
    assert write(host, "/sys/bus/pci/drivers_probe", AUDIO) == errno.EINVAL
    assert write(host, "/sys/bus/pci/drivers/snd_hda_intel/bind", AUDIO) == errno.EBUSY
    vm.end()
    assert write(host, "/sys/bus/pci/drivers_probe", AUDIO) == 0


def test_unbind_of_a_device_in_use_sends_a_vfio_request_and_blocks_until_release(host: CdevHost) -> None:
    node, other = ready(host)
    vm = host.open_devices(GPU, AUDIO)
    job = host.start_write(UNBIND, GPU)
    assert vm.asked_back(LONG_S), "VFIO requested the GPU from the VM"
    assert job.answer(host.patience_s) is None
    assert not exists(host, f"{DEVICE}/driver")
    assert not exists(host, f"{DEVICE}/vfio-dev")
    assert not exists(host, f"{NODES}/{node}"), "no process can open the device any more"
    assert exists(host, f"{NODES}/{other}")
    seen = with_users(host.kernel, scan(host.kernel))
    assert {user.node for user in seen.users_of_lost_nodes} == {f"{NODES}/{node} (deleted)"}
    assert reasons(seen)[GPU] == {ReasonCode.UNBIND_PENDING}
    vm.end()
    assert job.answer(LONG_S) == Answer()


def test_unbind_of_an_open_unbound_device_blocks_and_sends_no_vfio_request(host: CdevHost) -> None:
    ready(host)
    process = host.open_devices(GPU, bind=False)
    job = host.start_write(UNBIND, GPU)
    assert job.answer(host.patience_s) is None
    assert not process.asked_back()
    process.end()
    assert job.answer(LONG_S) == Answer()


def test_processes_are_found_by_the_device_node(host: CdevHost) -> None:
    node, _ = ready(host)
    vm = host.open_devices(GPU)
    users = with_users(host.kernel, scan(host.kernel)).users
    assert users is not None
    assert [user.node for user in users[group_of(host, GPU)]] == [f"{NODES}/{node}"]
    vm.end()


def test_sysfs_leads_from_a_device_node_to_the_function(host: CdevHost) -> None:
    """Kata reads both links: runtime-rs the link `device`, the runtime in Go the link by the node's number."""
    node, _ = ready(host)
    function = linked(host, DEVICE)
    device = linked(host, f"{CLASS}/{node}")
    assert device == f"{function}/vfio-dev/{node}"
    assert posixpath.basename(host.kernel.readlink(HostPath(f"{CLASS}/{node}/device"))) == GPU
    assert linked(host, f"{device}/device") == function
    number = host.kernel.device_number(HostPath(f"{NODES}/{node}"))
    numbered = f"{os.major(number)}:{os.minor(number)}"
    assert host.kernel.read(HostPath(f"{CLASS}/{node}/dev")).decode().strip() == numbered
    assert linked(host, f"/sys/dev/char/{numbered}") == device
    assert write(host, UNBIND, GPU) == 0
    assert not exists(host, f"{CLASS}/{node}")
    assert not exists(host, f"/sys/dev/char/{numbered}")


def test_a_group_without_a_node_cannot_be_leased(host: CdevHost) -> None:
    ready(host)
    with pytest.raises(LeaseUnavailableError, match="No such file"), host.kernel.lease(group_of(host, GPU)):
        pass


def test_a_lease_excludes_all_other_users(host: CdevHost) -> None:
    names = ready(host)
    with host.kernel.lease_devices(names):
        assert failure(host, GPU) == errno.EINVAL
        with pytest.raises(DeviceBusyError), host.kernel.lease_devices(names):
            pass
    host.open_devices(GPU, AUDIO).end()


def test_a_device_in_use_cannot_be_leased_and_its_vm_gets_no_vfio_request(host: CdevHost) -> None:
    names = ready(host)
    vm = host.open_devices(GPU, AUDIO)
    with pytest.raises(DeviceBusyError), host.kernel.lease_devices(names):
        pass
    assert not vm.asked_back()
    vm.end()


def test_the_use_of_a_device_beside_a_native_driver_is_unknown(host: CdevHost) -> None:
    bind(host, GPU, "vfio-pci")
    with pytest.raises(LeaseUnavailableError), host.kernel.lease_devices([cdev_of(host, GPU)]):
        pass


def test_unbind_under_a_lease_does_not_block(host: CdevHost) -> None:
    names = ready(host)
    with host.kernel.lease_devices(names):
        assert write(host, UNBIND, GPU) == 0
        assert failure(host, AUDIO) == errno.EINVAL, "the lease still holds the other device"
        assert write(host, UNBIND, AUDIO) == 0
        assert write(host, f"{DEVICE}/driver_override", "\n") == 0
        assert write(host, "/sys/bus/pci/drivers_probe", GPU) == 0
    assert host.kernel.readlink(HostPath(f"{DEVICE}/driver")).endswith("/nvidia")


def test_a_lease_keeps_native_drivers_off_until_the_whole_group_is_free(host: CdevHost) -> None:
    names = ready(host)
    with host.kernel.lease_devices(names):
        assert write(host, UNBIND, GPU) == 0
        assert write(host, f"{DEVICE}/driver_override", "\n") == 0
        assert write(host, "/sys/bus/pci/drivers_probe", GPU) == errno.EINVAL
    assert write(host, "/sys/bus/pci/drivers_probe", GPU) == 0


def test_an_open_unbound_device_can_be_leased_and_unbind_blocks(host: CdevHost) -> None:
    """A starting VM is in this state, so gpuvirt also searches the open files of processes."""
    names = ready(host)
    process = host.open_devices(GPU, bind=False)
    with host.kernel.lease_devices(names):
        job = host.start_write(UNBIND, GPU)
        assert job.answer(host.patience_s) is None
        process.end()
        assert job.answer(LONG_S) == Answer()


UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
TYPE = "/sys/class/mdev_bus/0000:07:01.0/mdev_supported_types/nvidia-222"


@pytest.fixture
def mdev(host: CdevHost) -> Iterator[str]:
    """The name of an mdev's node."""
    assert write(host, f"{TYPE}/create", UUID) == 0
    yield cdev_of(host, UUID)
    if exists(host, f"/sys/bus/mdev/devices/{UUID}"):
        assert write(host, f"/sys/bus/mdev/devices/{UUID}/remove", "1") == 0


def test_an_mdev_has_no_group_node(host: CdevHost, mdev: str) -> None:
    assert not exists(host, f"/sys/bus/mdev/devices/{UUID}/iommu_group")
    assert exists(host, f"{NODES}/{mdev}")
    found = scan(host.kernel)
    assert [(vgpu.id, vgpu.group) for owner in found.vgpu_hosts.values() for vgpu in owner.live] == [(UUID, None)]
    assert not found.unread


def test_a_removed_mdev_in_use_vanishes_from_sysfs_and_keeps_its_capacity(host: CdevHost, mdev: str) -> None:
    left = HostPath(f"{TYPE}/available_instances")
    before = int(host.kernel.read(left))
    vm = host.open_devices(UUID)
    with pytest.raises(DeviceBusyError), host.kernel.lease_devices([mdev]):
        pass
    job = host.start_write(f"/sys/bus/mdev/devices/{UUID}/remove", "1")
    assert job.answer(host.patience_s) is None
    assert not exists(host, f"/sys/bus/mdev/devices/{UUID}")
    assert not exists(host, "/dev/vfio"), "the folders vanish with the last node"
    assert int(host.kernel.read(left)) == before
    vm.end()
    assert job.answer(LONG_S) == Answer()
    assert int(host.kernel.read(left)) == before + 1


def test_an_mdev_is_removed_under_a_lease(host: CdevHost, mdev: str) -> None:
    with host.kernel.lease_devices([mdev]):
        assert write(host, f"/sys/bus/mdev/devices/{UUID}/remove", "1") == 0
    assert not exists(host, f"/sys/bus/mdev/devices/{UUID}")


def test_with_both_node_kinds_a_bound_device_makes_its_group_busy(both: CdevHost) -> None:
    ready(both)
    vm = both.open_devices(GPU)
    with pytest.raises(DeviceBusyError), both.kernel.lease(group_of(both, GPU)):
        pass
    with pytest.raises(OSError, match=r".") as failed:
        both.start_vm(group_of(both, GPU))
    assert failed.value.errno == errno.EBUSY
    assert not vm.asked_back()
    vm.end()


def test_with_both_node_kinds_an_open_group_blocks_binding_devices(both: CdevHost) -> None:
    names = ready(both)
    with both.kernel.lease(group_of(both, GPU)):
        assert failure(both, GPU) == errno.EBUSY
        with pytest.raises(DeviceBusyError), both.kernel.lease_devices(names):
            pass
        assert write(both, UNBIND, GPU) == 0


def test_with_both_node_kinds_an_open_unbound_device_does_not_make_its_group_busy(both: CdevHost) -> None:
    ready(both)
    process = both.open_devices(GPU, bind=False)
    with both.kernel.lease(group_of(both, GPU)):
        job = both.start_write(UNBIND, GPU)
        assert job.answer(both.patience_s) is None
        process.end()
        assert job.answer(LONG_S) == Answer()

"""Devices in use: the measurements in the table of lab/kernel/README.md, line by line."""

import errno

import pytest

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.paths import HostPath
from tests.contract.hosts import LONG_S, Answer, Host, bind, exists, group_of, until_free, write

GPU, AUDIO = PciAddress("0000:01:00.0"), PciAddress("0000:01:00.1")
OTHER = PciAddress("0000:03:00.0")
DEVICE = f"/sys/bus/pci/devices/{GPU}"
UNBIND = "/sys/bus/pci/drivers/vfio-pci/unbind"


@pytest.fixture
def group(host: Host) -> IommuGroup:
    """A GPU with its audio function, on vfio-pci."""
    bind(host, GPU, "vfio-pci")
    bind(host, AUDIO, "vfio-pci")
    return group_of(host, GPU)


def test_a_group_opens_once(host: Host, group: IommuGroup) -> None:
    with host.kernel.lease(group), pytest.raises(DeviceBusyError), host.kernel.lease(group):
        pass
    until_free(host, group)


def test_a_group_whose_devices_have_native_drivers_has_no_node(host: Host) -> None:
    with pytest.raises(LeaseUnavailableError, match="No such file"), host.kernel.lease(group_of(host, OTHER)):
        pass


def test_unbind_succeeds_under_our_own_lease(host: Host, group: IommuGroup) -> None:
    with host.kernel.lease(group):
        assert write(host, UNBIND, GPU) == 0
    assert not exists(host, f"{DEVICE}/driver")


def test_unbind_succeeds_while_a_group_is_open_without_open_devices(host: Host, group: IommuGroup) -> None:
    vm = host.start_vm(group, devices=False)
    assert write(host, UNBIND, GPU) == 0
    assert not vm.asked_back()
    vm.end()


def test_the_group_node_vanishes_with_the_last_vfio_function(host: Host, group: IommuGroup) -> None:
    for function in (GPU, AUDIO):
        assert exists(host, f"/dev/vfio/{group}")
        assert write(host, UNBIND, function) == 0
    assert not exists(host, f"/dev/vfio/{group}")


def test_unbind_of_a_device_in_use_sends_a_vfio_request_and_blocks_until_release(host: Host, group: IommuGroup) -> None:
    vm = host.start_vm(group)
    job = host.start_write(UNBIND, GPU)
    assert vm.asked_back(LONG_S), "VFIO requested the GPU from the VM"
    assert job.answer(host.patience_s) is None
    assert not exists(host, f"{DEVICE}/driver"), "the driver link is gone before the device is released"
    assert not exists(host, f"/sys/bus/pci/drivers/vfio-pci/{GPU}")
    assert exists(host, f"/dev/vfio/{group}")
    vm.end()
    assert job.answer(LONG_S) == Answer()
    assert not exists(host, f"{DEVICE}/driver")
    assert exists(host, f"/dev/vfio/{group}"), "the audio function is still in the group"


NO_LONGER = (6, 12)
"""From then on only a reset waits with the unbind."""


@pytest.mark.parametrize("attribute", ["driver_override", "uevent"])
def test_during_a_blocked_unbind_reads_of_these_paths_block(host: Host, group: IommuGroup, attribute: str) -> None:
    vm = host.start_vm(group)
    unbind = host.start_write(UNBIND, GPU)
    assert vm.asked_back(LONG_S)
    read = host.start_read(f"{DEVICE}/{attribute}")
    if host.series < NO_LONGER:
        assert read.answer(host.patience_s) is None
    vm.end()
    answer = read.answer(LONG_S)
    assert answer is not None
    assert answer.errno == 0
    assert unbind.answer(LONG_S) == Answer()


@pytest.mark.parametrize("attribute", ["driver_override", "reset"])
def test_during_a_blocked_unbind_writes_to_these_paths_block(host: Host, group: IommuGroup, attribute: str) -> None:
    vm = host.start_vm(group)
    unbind = host.start_write(UNBIND, GPU)
    assert vm.asked_back(LONG_S)
    written = host.start_write(f"{DEVICE}/{attribute}", "1")
    if host.series < NO_LONGER or attribute == "reset":
        assert written.answer(host.patience_s) is None
    vm.end()
    assert unbind.answer(LONG_S) == Answer()
    assert written.answer(LONG_S) is not None


def test_during_a_blocked_unbind_all_other_paths_answer(host: Host, group: IommuGroup) -> None:
    vm = host.start_vm(group)
    job = host.start_write(UNBIND, GPU)
    assert vm.asked_back(LONG_S)
    assert host.kernel.read(HostPath(f"{DEVICE}/vendor")) == b"0x10de\n"
    assert host.kernel.read(HostPath(f"{DEVICE}/config"))[:2] == b"\xde\x10"
    bind(host, OTHER, "vfio-pci")
    assert write(host, "/sys/bus/pci/drivers_probe", AUDIO) == 0
    with pytest.raises(DeviceBusyError), host.kernel.lease(group):
        pass
    vm.end()
    assert job.answer(LONG_S) == Answer()


def test_a_vm_cannot_open_a_group_with_a_native_driver(host: Host) -> None:
    bind(host, GPU, "vfio-pci")
    bind(host, AUDIO, "snd_hda_intel")
    with pytest.raises(PermissionError):
        host.start_vm(group_of(host, GPU))
    bind(host, AUDIO, "vfio-pci")
    host.start_vm(group_of(host, GPU)).end()


def test_a_second_vm_on_a_busy_group_fails_and_the_first_vm_is_unaffected(host: Host, group: IommuGroup) -> None:
    first = host.start_vm(group)
    with pytest.raises(OSError, match=r".") as failure:
        host.start_vm(group)
    assert failure.value.errno == errno.EBUSY
    assert not first.asked_back()
    first.end()


PARENT = "0000:07:01.0"
CREATE = f"/sys/class/mdev_bus/{PARENT}/mdev_supported_types/nvidia-222/create"
LEFT = HostPath(f"/sys/class/mdev_bus/{PARENT}/mdev_supported_types/nvidia-222/available_instances")
UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
ANOTHER = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1002"
REMOVE = f"/sys/bus/mdev/devices/{UUID}/remove"


@pytest.fixture
def mdev(host: Host) -> IommuGroup:
    """The group of an mdev."""
    assert write(host, CREATE, UUID) == 0
    return group_of(host, UUID)


def test_an_mdev_under_our_own_lease_is_removed(host: Host, mdev: IommuGroup) -> None:
    with host.kernel.lease(mdev):
        assert write(host, REMOVE, "1") == 0
    assert not exists(host, f"/sys/bus/mdev/devices/{UUID}")


def test_a_removed_mdev_in_use_vanishes_from_sysfs_and_keeps_its_capacity(host: Host, mdev: IommuGroup) -> None:
    left = int(host.kernel.read(LEFT))
    vm = host.start_vm(mdev)
    job = host.start_write(REMOVE, "1")
    assert job.answer(host.patience_s) is None
    assert not exists(host, f"/sys/bus/mdev/devices/{UUID}")
    assert int(host.kernel.read(LEFT)) == left
    assert write(host, CREATE, ANOTHER) == 0
    assert exists(host, f"/sys/bus/mdev/devices/{ANOTHER}")
    vm.end()
    assert job.answer(LONG_S) == Answer()
    assert int(host.kernel.read(LEFT)) == left

"""The simulated kernel against the measurements on a real one: devices in use, line by line.

Kernel 6.1, vfio-pci. The same statements are what a real kernel in a lab must confirm.
"""

from collections.abc import Callable

import pytest

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.paths import HostPath
from gpuvirt.sim.blocking import WouldBlock
from gpuvirt.sim.kernel import SimKernel

GPU, AUDIO = PciAddress("0000:04:00.0"), PciAddress("0000:04:00.1")
GROUP = IommuGroup(27)
UNBIND = HostPath("/sys/bus/pci/drivers/vfio-pci/unbind")
DEVICE = f"/sys/bus/pci/devices/{GPU}"


@pytest.fixture
def kernel(machine: Callable[[str], SimKernel]) -> SimKernel:
    return machine("4xRTX2060")


def test_a_group_opens_once(kernel: SimKernel) -> None:
    with kernel.lease(GROUP), pytest.raises(DeviceBusyError), kernel.lease(GROUP):
        pass
    with kernel.lease(GROUP):
        pass


def test_a_group_without_a_node_cannot_be_leased(kernel: SimKernel) -> None:
    kernel.delete_node(GROUP)
    with pytest.raises(LeaseUnavailableError, match="No such file"), kernel.lease(GROUP):
        pass


def test_unbind_succeeds_while_only_our_own_group_is_open(kernel: SimKernel) -> None:
    with kernel.lease(GROUP):
        kernel.write(UNBIND, GPU.encode())
    assert not kernel.tree.exists(HostPath(f"{DEVICE}/driver"))
    assert kernel.vfio.requests == []


def test_the_node_goes_with_the_last_function_of_the_group(kernel: SimKernel) -> None:
    for number in range(4):
        assert kernel.tree.exists(HostPath("/dev/vfio/27"))
        kernel.write(UNBIND, f"0000:04:00.{number}".encode())
    assert not kernel.tree.exists(HostPath("/dev/vfio/27"))


def test_unbind_of_a_device_in_use_asks_its_user_and_never_returns(kernel: SimKernel) -> None:
    kernel.start_machine(GROUP)
    with pytest.raises(WouldBlock):
        kernel.write(UNBIND, GPU.encode())
    assert kernel.vfio.requests == [GPU], "the machine has lost its GPU"
    assert not kernel.tree.exists(HostPath(f"{DEVICE}/driver"))
    assert kernel.tree.exists(HostPath("/dev/vfio/27"))


@pytest.mark.parametrize("attribute", ["driver_override", "uevent"])
def test_meanwhile_reading_these_hangs(kernel: SimKernel, attribute: str) -> None:
    kernel.start_machine(GROUP)
    with pytest.raises(WouldBlock):
        kernel.write(UNBIND, GPU.encode())
    with pytest.raises(WouldBlock):
        kernel.read(HostPath(f"{DEVICE}/{attribute}"))


@pytest.mark.parametrize("attribute", ["driver_override", "reset"])
def test_meanwhile_writing_these_hangs(kernel: SimKernel, attribute: str) -> None:
    kernel.start_machine(GROUP)
    with pytest.raises(WouldBlock):
        kernel.write(UNBIND, GPU.encode())
    with pytest.raises(WouldBlock):
        kernel.write(HostPath(f"{DEVICE}/{attribute}"), b"1")


def test_meanwhile_all_else_is_fine(kernel: SimKernel) -> None:
    kernel.start_machine(GROUP)
    with pytest.raises(WouldBlock):
        kernel.write(UNBIND, GPU.encode())
    assert kernel.read(HostPath(f"{DEVICE}/vendor")) == b"0x10de\n"
    assert kernel.read(HostPath(f"{DEVICE}/config"))[:2] == b"\xde\x10"
    kernel.rebind(PciAddress("0000:3b:00.0"), "nvidia")
    with pytest.raises(DeviceBusyError), kernel.lease(GROUP):
        pass


def test_it_is_unbound_when_its_user_lets_go(kernel: SimKernel) -> None:
    process = kernel.start_machine(GROUP)
    with pytest.raises(WouldBlock):
        kernel.write(UNBIND, GPU.encode())
    kernel.end_machine(process)
    assert kernel.pci.functions[GPU].driver is None
    assert kernel.read(HostPath(f"{DEVICE}/driver_override")) == b"vfio-pci\n"
    assert kernel.tree.exists(HostPath("/dev/vfio/27")), "its audio function is still there"


def test_a_machine_cannot_start_on_a_group_with_a_native_driver_in_it(kernel: SimKernel) -> None:
    kernel.rebind(AUDIO, "snd_hda_intel")
    with pytest.raises(PermissionError):
        kernel.start_machine(GROUP)
    kernel.rebind(AUDIO, "vfio-pci")
    kernel.start_machine(GROUP)


def test_a_machine_on_a_busy_group_fails_and_takes_nothing_from_the_first(kernel: SimKernel) -> None:
    first = kernel.start_machine(GROUP)
    with pytest.raises(OSError, match="busy"):
        kernel.start_machine(GROUP)
    assert kernel.vfio.groups[GROUP].user == first.pid


def test_an_mdev_that_only_we_have_open_is_removed(machine: Callable[[str], SimKernel]) -> None:
    kernel = machine("4xT4")
    device = next(iter(kernel.mdev.devices.values()))
    with kernel.lease(device.group):
        kernel.write(HostPath(f"/sys/bus/mdev/devices/{device.uuid}/remove"), b"1")
    assert device.uuid not in kernel.mdev.devices


def test_an_mdev_in_use_vanishes_at_once_and_keeps_its_capacity(machine: Callable[[str], SimKernel]) -> None:
    kernel = machine("4xT4")
    device = next(iter(kernel.mdev.devices.values()))
    left = HostPath(f"/sys/class/mdev_bus/{device.slot}/mdev_supported_types/nvidia-233/available_instances")
    process = kernel.start_machine(device.group)
    with pytest.raises(WouldBlock):
        kernel.write(HostPath(f"/sys/bus/mdev/devices/{device.uuid}/remove"), b"1")
    assert device.uuid not in kernel.listdir(HostPath("/sys/bus/mdev/devices"))
    assert kernel.read(left) == b"0\n"
    kernel.end_machine(process)
    assert kernel.read(left) == b"1\n"

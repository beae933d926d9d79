"""The simulated kernel against the measurements on a real one: what each write is answered with."""

import errno
from collections.abc import Callable

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.paths import HostPath
from gpuvirt.sim.kernel import SimKernel

GPU = PciAddress("0000:65:00.0")
T4 = "0000:86:00.0"
CREATE = f"/sys/class/mdev_bus/{T4}/mdev_supported_types/nvidia-233/create"
UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"

Machine = Callable[[str], SimKernel]


def answer(kernel: SimKernel, path: str, text: str) -> int:
    try:
        kernel.write(HostPath(path), text.encode())
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("/sys/bus/pci/drivers/vfio-pci/bind", GPU, errno.EBUSY),
        ("/sys/bus/pci/drivers/vfio-pci/bind", "0000:99:00.0", errno.ENODEV),
        ("/sys/bus/pci/drivers_probe", "0000:99:00.0", errno.ENODEV),
        ("/sys/bus/pci/drivers_probe", GPU, 0),
        ("/sys/bus/pci/drivers/nvidia/unbind", GPU, errno.ENODEV),
        (f"/sys/bus/pci/devices/{GPU}/driver/unbind", GPU, 0),
        (f"/sys/bus/pci/devices/{GPU}/vendor", "x", errno.EACCES),
        ("/sys/bus/pci/devices", "x", errno.EISDIR),
        ("/sys/nothing", "x", errno.ENOENT),
        (f"/sys/bus/pci/devices/{GPU}/vendor/x", "x", errno.ENOTDIR),
    ],
)
def test_pci(machine: Machine, path: str, text: str, expected: int) -> None:
    assert answer(machine("2xA10"), path, text) == expected


def test_unbinding_through_a_device_that_has_no_driver(machine: Machine) -> None:
    kernel = machine("2xA10")
    kernel.rebind(GPU, None)
    assert answer(kernel, f"/sys/bus/pci/devices/{GPU}/driver/unbind", GPU) == errno.ENOENT


def test_binding_takes_an_override_and_a_probe(machine: Machine) -> None:
    kernel = machine("2xA10")
    kernel.rebind(GPU, None)
    override = f"/sys/bus/pci/devices/{GPU}/driver_override"
    assert kernel.read(HostPath(override)) == b"(null)\n"
    assert answer(kernel, "/sys/bus/pci/drivers/vfio-pci/bind", GPU) == errno.ENODEV
    assert answer(kernel, override, "vfio-pci\n") == 0
    assert answer(kernel, "/sys/bus/pci/drivers_probe", GPU) == 0
    assert kernel.readlink(HostPath(f"/sys/bus/pci/devices/{GPU}/driver")).endswith("/vfio-pci")
    assert answer(kernel, override, "\n") == 0
    assert kernel.read(HostPath(override)) == b"(null)\n"


def test_vfio_pci_without_an_iommu(machine: Machine) -> None:
    kernel = machine("2xA10-no-iommu")
    assert answer(kernel, f"/sys/bus/pci/devices/{GPU}/driver_override", "vfio-pci") == 0
    assert answer(kernel, "/sys/bus/pci/drivers_probe", GPU) == errno.EINVAL


def test_removed_from_the_bus_and_found_again(machine: Machine) -> None:
    kernel = machine("2xA10")
    assert answer(kernel, f"/sys/bus/pci/devices/{GPU}/remove", "1") == 0
    assert GPU not in kernel.listdir(HostPath("/sys/bus/pci/devices"))
    assert answer(kernel, "/sys/bus/pci/rescan", "1") == 0
    assert kernel.readlink(HostPath(f"/sys/bus/pci/devices/{GPU}/iommu_group")).endswith("/12")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (UUID, 0),
        (UUID + "\n", 0),
        (UUID + "x", 0),
        ("00000000-0000-0000-0000-000000000000", 0),
        ("", 0),
        (UUID.replace("-", ""), errno.EINVAL),
        (f"{{{UUID}}}", errno.EINVAL),
        ("hello", errno.EINVAL),
        (UUID + "xx", errno.EINVAL),
    ],
)
def test_creating_an_mdev(machine: Machine, text: str, expected: int) -> None:
    assert answer(machine("4xT4"), CREATE, text) == expected


def test_an_mdev_twice_or_too_many(machine: Machine) -> None:
    kernel = machine("4xT4")
    assert answer(kernel, CREATE, UUID) == 0
    assert answer(kernel, CREATE, UUID.upper()) == errno.EEXIST
    other_type = CREATE.replace("nvidia-233", "nvidia-230")
    assert answer(kernel, other_type, UUID) == errno.EEXIST
    assert answer(kernel, other_type, UUID[:-1] + "9") == errno.ENOSPC, "sizes don't mix"
    assert answer(kernel, CREATE, UUID[:-1] + "2") == 0
    assert answer(kernel, CREATE, UUID[:-1] + "3") == errno.ENOSPC
    with pytest.raises(PermissionError):
        kernel.read(HostPath(CREATE))


def test_removing_an_mdev(machine: Machine) -> None:
    kernel = machine("4xT4")
    kernel.write(HostPath(CREATE), UUID.encode())
    remove = f"/sys/bus/mdev/devices/{UUID}/remove"
    assert answer(kernel, remove, "0") == 0
    assert UUID in kernel.mdev.devices
    assert answer(kernel, remove, "1") == 0
    assert answer(kernel, remove, "1") == errno.ENOENT


def test_a_vf_takes_one_type_at_a_time(machine: Machine) -> None:
    kernel = machine("4xL40S")
    current = "/sys/bus/pci/devices/0000:da:00.4/nvidia/current_vgpu_type"
    assert answer(kernel, current, "1156") == 0
    assert answer(kernel, current, "1156") == errno.EINVAL
    assert answer(kernel, current, "hello") == errno.EINVAL
    assert answer(kernel, current.replace("00.4", "00.5"), "1158") == errno.EPERM, "sizes don't mix"
    creatable = HostPath("/sys/bus/pci/devices/0000:da:00.5/nvidia/creatable_vgpu_types")
    assert kernel.read(creatable) == b"ID    : vGPU Name\n1156  : NVIDIA L40S-12Q\n"
    assert answer(kernel, current, "0") == 0
    assert kernel.read(HostPath(current)) == b"0\n"


def test_writes_wake_those_who_watch(machine: Machine) -> None:
    kernel = machine("2xA10")
    woken: list[bool] = []
    stop = kernel.on_uevent(lambda: woken.append(True))
    kernel.rebind(GPU, "nvidia")
    assert woken
    woken.clear()
    stop()
    kernel.rebind(GPU, "vfio-pci")
    assert not woken

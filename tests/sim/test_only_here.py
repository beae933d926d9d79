"""Features of the simulated kernel alone, so that no other kernel is compared with it: vendor VFIO, and no IOMMU."""

import errno

from gpuvirt.facts.ids import PciAddress
from gpuvirt.paths import HostPath
from gpuvirt_sim.kernel import SimKernel
from tests.sim.simulated import Simulated

GPU = PciAddress("0000:65:00.0")


def answer(kernel: SimKernel, path: str, text: str) -> int:
    try:
        kernel.write(HostPath(path), text.encode())
    except OSError as error:
        return error.errno or -1
    return 0


def test_vfio_pci_without_an_iommu(simulated: Simulated) -> None:
    kernel = simulated("2xA10-no-iommu")
    kernel.rebind(GPU, None)
    assert answer(kernel, f"/sys/bus/pci/devices/{GPU}/driver_override", "vfio-pci") == 0
    assert answer(kernel, "/sys/bus/pci/drivers_probe", GPU) == 0, "as observed on kernel 6.1 without an IOMMU"
    assert answer(kernel, "/sys/bus/pci/drivers/vfio-pci/bind", GPU) == errno.EINVAL
    assert "driver" not in kernel.listdir(HostPath(f"/sys/bus/pci/devices/{GPU}"))


def test_a_vf_takes_one_type_at_a_time(simulated: Simulated) -> None:
    kernel = simulated("4xL40S")
    current = "/sys/bus/pci/devices/0000:da:00.4/nvidia/current_vgpu_type"
    assert answer(kernel, current, "1156") == 0
    assert answer(kernel, current, "1156") == errno.EINVAL
    assert answer(kernel, current, "hello") == errno.EINVAL
    assert answer(kernel, current.replace("00.4", "00.5"), "1158") == errno.EPERM, "sizes don't mix"
    creatable = HostPath("/sys/bus/pci/devices/0000:da:00.5/nvidia/creatable_vgpu_types")
    assert kernel.read(creatable) == b"ID    : vGPU Name\n1156  : NVIDIA L40S-12Q\n"
    assert answer(kernel, current, "0") == 0
    assert kernel.read(HostPath(current)) == b"0\n"


def test_writes_wake_watchers(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    woken: list[bool] = []
    stop = kernel.on_uevent(lambda: woken.append(True))
    kernel.rebind(GPU, "nvidia")
    assert woken
    woken.clear()
    stop()
    kernel.rebind(GPU, "vfio-pci")
    assert not woken

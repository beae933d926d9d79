"""The information of NVIDIA's driver about GPUs in /proc: UUIDs, product names, and values that it does not show."""

import errno

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import DriverInformation
from gpuvirt.hardware.functions.deviceids import read_device_ids
from gpuvirt.hardware.scan import scan
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.kernel import SimKernel
from tests.sim.simulated import Simulated

VGPU, WHOLE = PciAddress("0000:02:00.0"), PciAddress("0000:02:01.0")
FILE = HostPath(f"/proc/driver/nvidia/gpus/{VGPU}/information")


def information(kernel: SimKernel, gpu: PciAddress = VGPU) -> DriverInformation | Unread | None:
    return read_device_ids(kernel, scan(kernel).functions.values()).information.get(gpu)


def test_a_vms_driver_names_the_vgpu_type(simulated: Simulated) -> None:
    assert information(simulated("vm-V100-8Q")) == DriverInformation(gpu_uuid(VGPU), "GRID V100-8Q", 0)


def test_a_driver_names_the_product_of_a_whole_card(simulated: Simulated) -> None:
    found = information(simulated("vm-2xV100"), WHOLE)
    assert found == DriverInformation(gpu_uuid(WHOLE), "Tesla V100-PCIE-16GB", 1)


def test_a_gpu_on_a_vfio_driver_has_no_information(simulated: Simulated) -> None:
    kernel = simulated("4xL40S")
    kernel.tree.place(HostPath("/proc/driver/nvidia/gpus/x"), constant(""))
    on_vfio = [address for address, function in scan(kernel).functions.items() if function.on_vfio]
    assert all(information(kernel, address) is None for address in on_vfio)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "Model: \t\t Unknown\nIRQ:   \t\t 16\nGPU UUID: \t GPU-????????-????-????-????-????????????\n",
            DriverInformation(None, None),
        ),
        ("", DriverInformation(None, None)),
        ("Model:\nGPU UUID:\n", DriverInformation(None, None)),
        ("Model: Tesla T4  \nDevice Minor: \t 12\n", DriverInformation(None, "Tesla T4", 12)),
        (
            "GPU UUID: \t GPU-8A5C1D93-75b0-5502-bafc-fef8d1839ded\nModel: \t NVIDIA A40-8Q",
            DriverInformation("GPU-8A5C1D93-75b0-5502-bafc-fef8d1839ded", "NVIDIA A40-8Q"),
        ),
    ],
    ids=["not initialised", "empty", "without values", "without a UUID", "in another order"],
)
def test_values_that_the_driver_does_not_show_are_missing(
    simulated: Simulated, text: str, found: DriverInformation
) -> None:
    kernel = simulated("vm-V100-8Q")
    kernel.tree.place(FILE, constant(text))
    assert information(kernel) == found


def test_a_file_that_cannot_be_read_is_unread(simulated: Simulated) -> None:
    kernel = simulated("vm-V100-8Q")
    kernel.faults.fail(FILE, errno.EIO)
    assert information(kernel) == Unread(FILE, errno=errno.EIO)

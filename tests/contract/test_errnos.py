"""The errno of each write to a PCI function or an mdev."""

import errno

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.paths import HostPath
from tests.contract.hosts import LONG_S, Answer, Host, bind, exists, group_of, write

GPU = PciAddress("0000:03:00.0")
"""Alone in its slot, on its native driver."""
TWIN, AUDIO = PciAddress("0000:01:00.0"), PciAddress("0000:01:00.1")
IDLE = PciAddress("0000:04:00.0")
"""No driver has it, and none would take it."""
NOWHERE = "0000:99:00.0"
BUS = "/sys/bus/pci"
DEVICE = f"{BUS}/devices/{GPU}"
OVERRIDE = f"{DEVICE}/driver_override"


def driver(host: Host, address: PciAddress) -> str | None:
    """Return the name of a function's driver."""
    folder = f"{BUS}/devices/{address}"
    return (
        host.kernel.readlink(HostPath(f"{folder}/driver")).rpartition("/")[2]
        if exists(host, f"{folder}/driver")
        else None
    )


def read(host: Host, path: str) -> bytes:
    return host.kernel.read(HostPath(path))


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (f"{BUS}/drivers/nvidia/bind", GPU, errno.EBUSY),
        (f"{BUS}/drivers/nvidia/bind", NOWHERE, errno.ENODEV),
        (f"{BUS}/drivers/nvidia/bind", IDLE, errno.ENODEV),
        pytest.param(f"{BUS}/drivers/vfio-pci/bind", GPU, errno.ENODEV, id="not wanted there, wherever it is"),
        (f"{BUS}/drivers_probe", NOWHERE, errno.ENODEV),
        (f"{BUS}/drivers_probe", GPU, 0),
        (f"{BUS}/drivers_probe", IDLE, 0),
        (f"{BUS}/drivers/vfio-pci/unbind", GPU, errno.ENODEV),
        (f"{BUS}/drivers/nvidia/unbind", NOWHERE, errno.ENODEV),
        (f"{BUS}/drivers/nvidia/unbind", f"{GPU}\n", 0),
        (f"{BUS}/drivers/nvidia/unbind", f"{GPU}\n\n", errno.ENODEV),
        (f"{BUS}/drivers/nvidia/unbind", f" {GPU}", errno.ENODEV),
        (f"{BUS}/drivers/nvidia/unbind", "", 0),
        (f"{DEVICE}/driver/unbind", GPU, 0),
        (f"{BUS}/devices/{IDLE}/driver/unbind", IDLE, errno.ENOENT),
        (f"{DEVICE}/vendor", "x", errno.EACCES),
        (f"{DEVICE}/reset", "1", 0),
        (f"{DEVICE}/reset", "0", errno.EINVAL),
        (f"{DEVICE}/reset", "x", errno.EINVAL),
        pytest.param(f"{BUS}/devices/{TWIN}/reset", "1", errno.ENOTTY, id="a reset would hit its sibling"),
        (f"{DEVICE}/remove", "0", 0),
        (f"{DEVICE}/remove", "x", errno.EINVAL),
        (f"{BUS}/rescan", "0", 0),
        (f"{BUS}/rescan", "x", errno.EINVAL),
        (OVERRIDE, "x" * 4096, errno.EINVAL),
        (f"{BUS}/devices", "x", errno.EISDIR),
        ("/sys/nothing", "x", errno.ENOENT),
        (f"{DEVICE}/vendor/x", "x", errno.ENOTDIR),
    ],
)
def test_pci_writes(host: Host, path: str, text: str, expected: int) -> None:
    assert write(host, path, text) == expected


def test_binding_takes_an_override_and_a_probe(host: Host) -> None:
    assert read(host, OVERRIDE) == b"(null)\n"
    assert write(host, OVERRIDE, "vfio-pci\n") == 0
    assert write(host, f"{BUS}/drivers/vfio-pci/bind", GPU) == errno.EBUSY
    assert write(host, f"{DEVICE}/driver/unbind", GPU) == 0
    assert write(host, f"{BUS}/drivers/nvidia/bind", GPU) == errno.ENODEV
    assert write(host, f"{BUS}/drivers_probe", GPU) == 0
    assert driver(host, GPU) == "vfio-pci"
    assert write(host, OVERRIDE, "") == 0
    assert read(host, OVERRIDE) == b"vfio-pci\n", "an empty write changes nothing"
    assert write(host, OVERRIDE, "\n") == 0
    assert read(host, OVERRIDE) == b"(null)\n"
    assert driver(host, GPU) == "vfio-pci", "a bound function stays bound"


def test_vfio_devices_have_names_without_device_nodes(host: Host) -> None:
    bind(host, IDLE, "vfio-pci")
    names = host.kernel.listdir(HostPath(f"{BUS}/devices/{IDLE}/vfio-dev"))
    assert [name.rstrip("0123456789") for name in names] == ["vfio"]
    assert exists(host, "/dev/vfio/devices") == (host.series >= (6, 12)), "Debian's 6.1 has no VFIO_DEVICE_CDEV"
    assert write(host, f"{BUS}/drivers/vfio-pci/unbind", IDLE) == 0
    assert not exists(host, f"{BUS}/devices/{IDLE}/vfio-dev")


def test_binding_takes_an_override_or_a_bind(host: Host) -> None:
    assert write(host, f"{BUS}/devices/{IDLE}/driver_override", "vfio-pci") == 0
    assert write(host, f"{BUS}/drivers/vfio-pci/bind", IDLE) == 0
    assert driver(host, IDLE) == "vfio-pci"


def test_a_driver_override_with_an_unknown_driver_binds_nothing(host: Host) -> None:
    assert write(host, f"{BUS}/devices/{IDLE}/driver_override", "hello") == 0
    assert write(host, f"{BUS}/drivers_probe", IDLE) == 0
    assert driver(host, IDLE) is None


def test_uevent_of_a_function(host: Host) -> None:
    assert read(host, f"{DEVICE}/uevent").decode() == (
        "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\nPCI_SUBSYS_ID=10DE:16C1\nPCI_SLOT_NAME=0000:03:00.0\n"
        "MODALIAS=pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\n"
    )


def test_a_function_is_removed_and_rescanned(host: Host) -> None:
    group = group_of(host, GPU)
    bind(host, GPU, "vfio-pci")
    assert write(host, f"{DEVICE}/remove", "2") == 0
    assert not exists(host, DEVICE)
    assert not exists(host, f"/dev/vfio/{group}")
    assert write(host, f"{BUS}/rescan", "1") == 0
    assert group_of(host, GPU) == group
    assert read(host, OVERRIDE) == b"(null)\n", "the kernel treats a rescanned function as new"
    assert driver(host, GPU) == "nvidia"


def test_a_native_driver_cannot_bind_a_function_of_a_group_in_use_by_a_vm(host: Host) -> None:
    bind(host, TWIN, "vfio-pci")
    assert write(host, f"{BUS}/drivers/snd_hda_intel/unbind", AUDIO) == 0
    vm = host.start_vm(group_of(host, TWIN))
    assert write(host, f"{BUS}/drivers_probe", AUDIO) == errno.EINVAL
    assert write(host, f"{BUS}/drivers/snd_hda_intel/bind", AUDIO) == errno.EBUSY
    assert driver(host, AUDIO) is None
    vm.end()
    assert write(host, f"{BUS}/drivers_probe", AUDIO) == 0
    assert driver(host, AUDIO) == "snd_hda_intel"


def test_a_rescanned_function_of_a_group_in_use_by_a_vm_gets_no_driver(host: Host) -> None:
    bind(host, TWIN, "vfio-pci")
    assert write(host, f"{BUS}/devices/{AUDIO}/remove", "1") == 0
    vm = host.start_vm(group_of(host, TWIN))
    assert write(host, f"{BUS}/rescan", "1") == 0
    assert group_of(host, AUDIO) == group_of(host, TWIN)
    assert driver(host, AUDIO) is None
    vm.end()


def test_a_native_driver_can_bind_a_function_of_a_leased_group(host: Host) -> None:
    bind(host, TWIN, "vfio-pci")
    assert write(host, f"{BUS}/drivers/snd_hda_intel/unbind", AUDIO) == 0
    with host.kernel.lease(group_of(host, TWIN)):
        assert write(host, f"{BUS}/drivers/snd_hda_intel/bind", AUDIO) == 0


PARENT = PciAddress("0000:07:01.0")
TYPES = f"/sys/class/mdev_bus/{PARENT}/mdev_supported_types"
CREATE, CREATE_LARGE = f"{TYPES}/nvidia-222/create", f"{TYPES}/nvidia-223/create"
MDEVS = "/sys/bus/mdev/devices"
UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"


def capacity(host: Host, type_id: str) -> int:
    return int(read(host, f"{TYPES}/{type_id}/available_instances"))


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
        (UUID + "\n\n", errno.EINVAL),
        (" " + UUID, errno.EINVAL),
    ],
)
def test_creating_an_mdev(host: Host, text: str, expected: int) -> None:
    assert write(host, CREATE, text) == expected
    assert exists(host, f"{MDEVS}/{text[:36]}") == (expected == 0 and text != "")


def test_attributes_of_an_mdev_type(host: Host) -> None:
    folder = f"{TYPES}/nvidia-222"
    assert read(host, f"{folder}/name") == b"GRID T4-1B\n"
    assert read(host, f"{folder}/device_api") == b"vfio-pci\n"
    assert read(host, f"{folder}/description") == b"framebuffer=1B, max_instance=24\n"
    assert write(host, CREATE, UUID) == 0
    assert list(host.kernel.listdir(HostPath(f"{folder}/devices"))) == [UUID]


def test_creating_a_duplicate_or_excess_mdev_fails(host: Host) -> None:
    assert (capacity(host, "nvidia-222"), capacity(host, "nvidia-223")) == (24, 12)
    assert write(host, CREATE_LARGE, UUID) == 0
    assert write(host, CREATE_LARGE, UUID.upper()) == errno.EEXIST
    assert write(host, CREATE, UUID) == errno.EEXIST
    assert (capacity(host, "nvidia-222"), capacity(host, "nvidia-223")) == (0, 11), "vGPU sizes don't mix"
    assert write(host, CREATE, UUID[:-2] + "99") == errno.ENOSPC
    for number in range(11):
        assert write(host, CREATE_LARGE, f"{UUID[:-2]}{number + 2:02}") == 0
    assert write(host, CREATE_LARGE, UUID[:-2] + "99") == errno.ENOSPC
    assert not exists(host, f"{MDEVS}/{UUID[:-2]}99")
    with pytest.raises(PermissionError):
        read(host, CREATE)


def test_removing_an_mdev(host: Host) -> None:
    assert write(host, CREATE, UUID) == 0
    group, remove = group_of(host, UUID), f"{MDEVS}/{UUID}/remove"
    assert exists(host, f"/dev/vfio/{group}")
    assert write(host, remove, "0") == 0
    assert write(host, remove, "x") == errno.EINVAL
    assert exists(host, f"{MDEVS}/{UUID}")
    assert write(host, remove, "2") == 0
    assert write(host, remove, "1") == errno.ENOENT
    assert not exists(host, f"/dev/vfio/{group}")
    assert not exists(host, f"/sys/kernel/iommu_groups/{group}")
    assert capacity(host, "nvidia-222") == 24


def test_unbinding_a_gpu_removes_its_mdev_types_and_mdevs(host: Host) -> None:
    assert write(host, CREATE, UUID) == 0
    bind(host, PARENT, "vfio-pci")
    assert not exists(host, f"/sys/class/mdev_bus/{PARENT}")
    assert not exists(host, f"{BUS}/devices/{PARENT}/mdev_supported_types")
    assert not exists(host, f"{MDEVS}/{UUID}")
    bind(host, PARENT, "nvidia")
    assert capacity(host, "nvidia-222") == 24


def test_unbinding_a_driver_blocks_until_its_mdevs_are_released(host: Host) -> None:
    assert write(host, CREATE, UUID) == 0
    vm = host.start_vm(group_of(host, UUID))
    job = host.start_write(f"{BUS}/drivers/nvidia/unbind", PARENT)
    assert job.answer(host.patience_s) is None
    vm.end()
    assert job.answer(LONG_S) == Answer()
    assert driver(host, PARENT) is None
    assert not exists(host, f"{MDEVS}/{UUID}")

"""The device nodes of native drivers of the simulated kernel: their places, and who loses them."""

import errno
import os

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.access.openfiles import OpenFile
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.nativenodes import UnbindInUse
from gpuvirt_sim.files.blocking import WouldBlock
from gpuvirt_sim.hostspec import CardSpec, FunctionSpec, HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from tests.sim.simulated import Simulated

AMD, AMD_AUDIO = PciAddress("0000:03:00.0"), PciAddress("0000:03:00.1")
TURING = [PciAddress(f"0000:65:00.{number}") for number in range(4)]
DRIVERS = HostPath("/sys/bus/pci/drivers")
DEVICES = "/sys/bus/pci/devices"


def a_turing_card() -> SimKernel:
    return build_host(HostSpec(about="an RTX 2060", slots=(SlotSpec(at=TURING[0], board="RTX2060", group=12),)))


def unbind(kernel: SimKernel, address: PciAddress) -> None:
    kernel.write(HostPath(f"{DRIVERS}/{kernel.pci.functions[address].driver}/unbind"), address.encode())


def probe(kernel: SimKernel, address: PciAddress) -> None:
    kernel.write(HostPath("/sys/bus/pci/drivers_probe"), address.encode())


def dev_files(kernel: SimKernel, address: PciAddress) -> set[str]:
    """Return the `dev` files below a function, as paths below the function, with their content."""
    folder = kernel.pci.functions[address].folder
    return {
        f"{path.removeprefix(f'{folder}/')} {kernel.read(path).decode().strip()}"
        for path, _ in kernel.tree.walk()
        if path.startswith(f"{folder}/") and path.endswith("/dev")
    }


def test_a_graphics_card_has_nodes_of_its_render_and_display_parts(simulated: Simulated) -> None:
    kernel = simulated("2xW7900")

    assert dev_files(kernel, AMD) == {
        "drm/card0/dev 226:0",
        "drm/renderD128/dev 226:128",
        "drm/card0/card0-DP-1/drm_dp_aux0/dev 508:0",
        "drm/card0/card0-DP-1/i2c-0/i2c-dev/i2c-0/dev 89:0",
    }
    assert kernel.device_number(HostPath("/dev/dri/renderD128")) == os.makedev(226, 128)
    assert kernel.nodes_of(AMD) == ("/dev/dri/renderD128", "/dev/dri/card0", "/dev/drm_dp_aux0", "/dev/i2c-0")
    assert kernel.tree.exists(HostPath(f"{DEVICES}/{AMD}/hwmon/hwmon0/name"))


def test_the_second_card_has_numbers_of_its_own(simulated: Simulated) -> None:
    kernel = simulated("2xW7900")

    assert kernel.nodes_of(PciAddress("0000:83:00.0"))[:2] == ("/dev/dri/renderD129", "/dev/dri/card1")
    assert dev_files(kernel, PciAddress("0000:83:00.1")) == {
        "sound/card1/controlC1/dev 116:32",
        "sound/card1/pcmC1D3p/dev 116:51",
        "sound/card1/hwC1D0/dev 116:36",
        "sound/card1/input1/event1/dev 13:65",
    }


def test_the_partitions_of_an_accelerator_have_nodes_below_platform_devices() -> None:
    kernel = build_host(HostSpec(about="an MI300X", slots=(SlotSpec(at=AMD, board="MI300X", group=1),)))

    assert kernel.nodes_of(AMD)[:2] == ("/dev/dri/renderD128", "/dev/dri/card0")
    assert kernel.nodes_of(AMD)[2:] == tuple(f"/dev/dri/renderD{number}" for number in range(129, 136))
    assert dev_files(kernel, AMD) == {"drm/card0/dev 226:0", "drm/renderD128/dev 226:128"}
    assert kernel.read(HostPath("/sys/devices/platform/amdgpu_xcp_2/drm/renderD131/dev")) == b"226:131\n"
    unbind(kernel, AMD)
    assert not kernel.tree.exists(HostPath("/sys/devices/platform/amdgpu_xcp_2"))


def test_each_sibling_function_has_nodes_of_its_own() -> None:
    kernel = a_turing_card()

    assert kernel.nodes_of(TURING[0]) == ("/dev/nvidia0",)
    assert dev_files(kernel, TURING[1]) == {
        "sound/card0/controlC0/dev 116:0",
        "sound/card0/pcmC0D3p/dev 116:19",
        "sound/card0/hwC0D0/dev 116:4",
        "sound/card0/input0/event0/dev 13:64",
    }
    assert dev_files(kernel, TURING[2]) == {"usb1/dev 189:0", "usb2/dev 189:128"}
    assert dev_files(kernel, TURING[3]) == {"i2c-0/i2c-dev/i2c-0/dev 89:0"}


@pytest.mark.parametrize(
    ("driver", "nodes"),
    [
        ("ast", ("/dev/dri/card0",)),
        ("i915", ("/dev/dri/renderD128", "/dev/dri/card0", "/dev/drm_dp_aux0", "/dev/i2c-0")),
        ("nouveau", ("/dev/dri/renderD128", "/dev/dri/card0", "/dev/drm_dp_aux0", "/dev/i2c-0")),
        ("xe", ("/dev/dri/renderD128", "/dev/dri/card0", "/dev/drm_dp_aux0", "/dev/i2c-0")),
        ("habanalabs", ("/dev/accel/accel0",)),
        ("mlx5_core", ()),
    ],
)
def test_each_driver_has_its_kinds_of_nodes(driver: str, nodes: tuple[str, ...]) -> None:
    board = CardSpec(functions=(FunctionSpec(id="8086:56a0", class_code="030000", native_driver=driver),))
    slots = (SlotSpec(at=AMD, board="card", group=1),)

    assert build_host(HostSpec(about=driver, boards={"card": board}, slots=slots)).nodes_of(AMD) == nodes


def test_nodes_disappear_with_the_driver_and_come_again_with_it(simulated: Simulated) -> None:
    kernel = simulated("2xW7900")
    nodes = kernel.nodes_of(AMD)

    unbind(kernel, AMD)

    assert dev_files(kernel, AMD) == set()
    assert not any(kernel.tree.exists(HostPath(node)) for node in nodes)
    assert not kernel.tree.exists(HostPath("/sys/class/drm/card0"))
    assert kernel.native_nodes.unbound_in_use == []
    probe(kernel, AMD)
    assert kernel.nodes_of(AMD) == nodes


def test_unbinding_a_graphics_driver_takes_the_device_from_its_processes(simulated: Simulated) -> None:
    kernel = simulated("2xW7900")
    job = kernel.open_native(AMD, "python3")
    assert kernel.native_users(AMD) == (job,)

    unbind(kernel, AMD)

    assert kernel.pci.functions[AMD].driver is None
    assert kernel.native_nodes.unbound_in_use == [UnbindInUse(AMD, "amdgpu", "/dev/dri/renderD128", job)]
    lost = OpenFile(job.pid, HostPath("/dev/dri/renderD128 (deleted)"), os.makedev(226, 128))
    assert list(kernel.open_files()) == [lost]


def test_a_node_that_a_process_lost_is_no_node_of_a_driver_that_is_bound_again(simulated: Simulated) -> None:
    kernel = simulated("2xW7900")
    job = kernel.open_native(AMD)
    unbind(kernel, AMD)
    probe(kernel, AMD)

    assert kernel.nodes_of(AMD)[0] == "/dev/dri/renderD130"
    assert kernel.native_users(AMD) == ()

    kernel.end_vm(job)
    unbind(kernel, AMD)
    probe(kernel, AMD)
    assert kernel.nodes_of(AMD)[0] == "/dev/dri/renderD128"


def test_a_sound_driver_is_not_unbound_until_its_files_are_closed() -> None:
    kernel = a_turing_card()
    player = kernel.open_native(TURING[1], "wireplumber")

    with pytest.raises(WouldBlock, match="in use"):
        unbind(kernel, TURING[1])

    assert [found.process for found in kernel.native_nodes.unbound_in_use] == [player]
    kernel.end_vm(player)
    assert kernel.pci.functions[TURING[1]].driver is None


def test_a_usb_driver_is_unbound_under_its_users() -> None:
    kernel = a_turing_card()
    reader = kernel.open_native(TURING[2], "pcscd", "/dev/bus/usb/002/001")

    unbind(kernel, TURING[2])

    assert kernel.pci.functions[TURING[2]].driver is None
    assert [found.process for found in kernel.native_nodes.unbound_in_use] == [reader]


def test_a_function_without_nodes_cannot_be_opened(simulated: Simulated) -> None:
    kernel = simulated("8xMI300X")

    with pytest.raises(OSError, match="No such file") as raised:
        kernel.open_native(PciAddress("0000:05:00.0"))
    assert raised.value.errno == errno.ENOENT


def test_a_gpu_that_nvidias_driver_has_locked_cannot_be_opened() -> None:
    kernel = a_turing_card()
    assert kernel.nvidia.lock(TURING[0])

    with pytest.raises(OSError, match="No such device") as raised:
        kernel.open_native(TURING[0])
    assert raised.value.errno == errno.ENODEV

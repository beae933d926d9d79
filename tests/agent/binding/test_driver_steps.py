"""Each step of a return to the native driver refuses where its effect is missing or can't be read."""

import errno
from functools import partial

import pytest

from gpuvirt.agent.change.driverphase import _expect_native, clear_override, give_back, load
from gpuvirt.agent.change.steps import proving
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.sysfs import device_path, driver_path
from gpuvirt.hardware.access.tools import ToolError
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.steps import ClearOverride, LoadModule, Return
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools

GPU = PciAddress("0000:65:00.0")
FOLDER = f"/sys/bus/pci/devices/{GPU}"


def host(driver: str) -> SimKernel:
    return build_host(HostSpec(about="an A10", slots=(SlotSpec(at=GPU, board="A10", group=12, driver=driver),)))


def unread(kernel: SimKernel, name: str) -> SimKernel:
    kernel.faults.fail(HostPath(f"{FOLDER}/{name}"), errno.EIO)
    return kernel


def test_a_module_that_modprobe_cannot_load_stops_the_change() -> None:
    kernel = host("vfio-pci")
    with pytest.raises(ToolError):
        load(kernel, SimTools(kernel, ()), LoadModule("nvidia"))
    with pytest.raises(ToolError):
        load(kernel, SimTools(kernel, ()), LoadModule("nvidia", may_need_device=True))


def test_a_module_that_registers_no_such_driver_stops_the_change() -> None:
    kernel = host("vfio-pci")
    with pytest.raises(RefusedError) as refused:
        load(kernel, SimTools(kernel), LoadModule("nvidia", provides=("another",)))
    assert refused.value.reason.code is ReasonCode.STEP_FAILED


@pytest.mark.parametrize("required", [True, False])
def test_an_unread_override_stops_the_change(required: bool) -> None:
    with pytest.raises(RefusedError) as refused:
        clear_override(
            unread(host("vfio-pci"), "driver_override"), ClearOverride(GPU, frozenset({"vfio-pci"}), required=required)
        )
    assert refused.value.reason.code is ReasonCode.UNREAD


def test_an_override_of_another_program_stops_only_a_required_step() -> None:
    kernel = host("vfio-pci")
    kernel.pci.functions[GPU].override = "pci-stub"
    clear_override(kernel, ClearOverride(GPU, frozenset(), required=False))
    with pytest.raises(RefusedError) as refused:
        clear_override(kernel, ClearOverride(GPU, frozenset()))
    assert refused.value.reason.code is ReasonCode.DRIVER_PINNED
    override = f"echo > {device_path(GPU, 'driver_override')}"
    assert str(refused.value.reason.fix).startswith(f"rm -f /etc/driverctl.d/*{GPU}; {override};")  # unbinds nothing
    kernel.pci.functions[GPU].override = None
    clear_override(kernel, ClearOverride(GPU, frozenset()))
    assert kernel.writes == []


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        (unread(host("native"), "driver"), ReasonCode.UNREAD),
        (unread(host("vfio-pci"), "vfio-dev"), ReasonCode.UNREAD),
        (host("vfio-pci"), ReasonCode.STEP_FAILED),
        (host("none"), ReasonCode.STEP_FAILED),
    ],
)
def test_a_gpu_that_is_on_no_native_driver_after_its_return_is_a_failure(kernel: SimKernel, code: ReasonCode) -> None:
    with pytest.raises(RefusedError) as refused:
        _expect_native(kernel, Return(GPU, ("nvidia",)))
    assert refused.value.reason.code is code


def test_a_gpu_that_a_driver_does_not_bind_by_its_name_is_probed() -> None:
    kernel = host("none")
    kernel.faults.refuse(HostPath(driver_path("nvidia", "bind")), errno.EIO)
    proof = partial(proving.driverless, kernel, scan(kernel).functions, GPU, "bind it", unbound_here=True)
    give_back(kernel, SimTools(kernel), Return(GPU, ("nvidia",)), proof)
    assert kernel.pci.functions[GPU].driver == "nvidia"


def test_a_sibling_function_may_stay_without_a_driver() -> None:
    _expect_native(host("none"), Return(GPU, ("nvidia",), required=False))
    _expect_native(host("native"), Return(GPU, ("nvidia",)))


def test_a_function_without_the_attribute_has_no_override() -> None:
    kernel = host("vfio-pci")
    kernel.faults.fail(HostPath(f"{FOLDER}/driver_override"), errno.ENOENT)
    clear_override(kernel, ClearOverride(GPU, frozenset()))

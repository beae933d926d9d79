"""A step is refused where its proof is missing, where its effect is missing, or where either can't be read."""

import errno
from pathlib import Path

import pytest

from gpuvirt.agent.change.driverphase import execute
from gpuvirt.agent.change.gate import gatepass
from gpuvirt.agent.change.gate.gaterecord import IllegalMoveError
from gpuvirt.agent.change.steps import proving
from gpuvirt.agent.change.steps.changes import by_hand
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.sysfs import device_path, driver_path
from gpuvirt.hardware.access.proof import ProofKind
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.plan import DriverPlan, StepScope
from gpuvirt.model.change.steps import Unbind
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import File, Folder
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import UNGATED, change_drivers, change_host_in, driver_state
from tests.agent.change.hostunit import PASSTHROUGH, W7900, W7900_AUDIO, on_native_drivers
from tests.agent.node.gateholders import locked

GPU, GROUP = PciAddress("0000:65:00.0"), IommuGroup(12)


def host(driver: str) -> SimKernel:
    return build_host(HostSpec(about="an A10", slots=(SlotSpec(at=GPU, board="A10", group=GROUP, driver=driver),)))


def code_of(refused: pytest.ExceptionInfo[RefusedError]) -> ReasonCode:
    return refused.value.reason.code


def unbinds(kernel: SimKernel) -> list[tuple[HostPath, bytes]]:
    return [(path, content) for path, content in kernel.writes if path.endswith("/unbind")]


# --- unbinds


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EIO, ReasonCode.UNREAD), (errno.ENOENT, ReasonCode.NO_IOMMU_GROUP)]
)
def test_a_vfio_function_of_an_unknown_group_keeps_its_driver(number: int, code: ReasonCode, tmp_path: Path) -> None:
    """Without its group it can't be leased, and a walk for native users does not find a VM."""
    kernel = host("vfio-pci")
    kernel.start_vm(GROUP)
    kernel.faults.fail(HostPath(device_path(GPU, "iommu_group")), number)
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    functions = driver_state(change_host).inventory.facts.functions
    plan, change = DriverPlan(UnitId(GPU), (Unbind(GPU, "vfio-pci"),)), by_hand(GPU, None)
    with change.under_way(UNGATED), pytest.raises(RefusedError) as refused:
        execute(kernel, change_host.tools, functions, plan, lambda _: None, change)
    assert code_of(refused) is code
    assert (unbinds(kernel), kernel.vfio.requests) == ([], [])


def test_a_gpu_in_a_vm_keeps_its_driver_while_its_group_cannot_be_read(tmp_path: Path) -> None:
    kernel = host("vfio-pci")
    kernel.start_vm(GROUP)
    change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
    unit = driver_state(change_host).inventory.gpus[GPU].unit
    kernel.faults.fail(HostPath(device_path(GPU, "iommu_group")), errno.EIO)
    assert change_drivers(change_host, unit, {GPU: DesiredDriver.NATIVE})
    assert (kernel.pci.functions[GPU].driver, kernel.vfio.requests) == ("vfio-pci", [])


def test_an_unbind_without_effect_stops_the_change_before_the_next_unbind(tmp_path: Path) -> None:
    unit = on_native_drivers("2xW7900", W7900, tmp_path)
    unit.kernel.tree.place(HostPath(driver_path("amdgpu", "unbind")), File(write=lambda _: None))
    (reason,) = unit.apply(PASSTHROUGH).reasons
    assert reason.code is ReasonCode.STEP_FAILED
    assert "expected: no driver" in reason.text
    assert not any(content.decode() == W7900_AUDIO for _, content in unbinds(unit.kernel))


def test_no_module_is_loaded_while_another_process_changes_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gatepass, "MODULES_S", 0.0)
    unit = on_native_drivers("2xW7900", W7900, tmp_path)
    unit.change_host.locks.mkdir()
    with locked(unit.change_host.locks / gatepass.MODULES):
        assert [reason.code for reason in unit.apply(PASSTHROUGH).reasons] == [ReasonCode.UNIT_BUSY]
        assert unit.tools.loaded == []
    assert unit.apply(PASSTHROUGH).reasons == ()


def test_a_change_that_has_passed_no_gate_takes_no_step() -> None:
    change = by_hand(GPU, None)
    with pytest.raises(IllegalMoveError, match="has not passed the gates"):
        change.claim(StepScope.of([GPU]))
    with pytest.raises(IllegalMoveError, match="has not passed the gates"), change.step(StepScope.of([GPU]), "x"):
        pass


# --- proofs


def forced(kernel: SimKernel, driver: str) -> ReasonCode | None:
    try:
        assert proving.forced(kernel, GPU, driver, "unbind it").kind is ProofKind.FORCED
    except RefusedError as error:
        return error.reason.code
    return None


def test_force_serves_a_native_driver_alone() -> None:
    assert forced(host("native"), "nvidia") is None
    assert forced(host("native"), "nouveau") is ReasonCode.STEP_FAILED, "it has another driver by now"


def test_no_force_serves_a_function_with_a_vfio_device_of_its_native_driver() -> None:
    """A VF that carries a vGPU of vendor VFIO is a VFIO device, although its driver is the vendor's."""
    kernel = host("native")
    kernel.tree.place(HostPath(f"{kernel.pci.functions[GPU].folder}/vfio-dev/vfio7"), Folder())
    assert forced(kernel, "nvidia") is ReasonCode.STEP_FAILED


def test_no_force_serves_a_vfio_driver_of_a_kernel_without_vfio_dev() -> None:
    """Before Linux 6.1."""
    kernel = host("native")
    kernel.vfio.vfio_dev = False
    kernel.rebind(GPU, "vfio-pci")
    assert forced(kernel, "vfio-pci") is ReasonCode.STEP_FAILED


def test_no_force_serves_where_the_vfio_devices_cannot_be_read() -> None:
    kernel = host("native")
    kernel.faults.fail(HostPath(device_path(GPU, "vfio-dev")), errno.EIO)
    assert forced(kernel, "nvidia") is ReasonCode.UNREAD


def test_a_driver_that_cannot_be_read_is_not_the_expected_one() -> None:
    kernel = host("native")
    kernel.faults.fail(HostPath(device_path(GPU, "driver")), errno.EIO)
    for driver in (None, "nvidia"):
        with pytest.raises(RefusedError) as refused:
            proving.expect_driver(kernel, GPU, driver, "probe it")
        assert code_of(refused) is ReasonCode.UNREAD


def test_nvidias_driver_answers_for_no_gpu_of_another_driver() -> None:
    assert proving.driver_answers(host("native"), GPU, "switch its mode").kind is ProofKind.DRIVER
    with pytest.raises(RefusedError) as refused:
        proving.driver_answers(host("vfio-pci"), GPU, "switch its mode")
    assert code_of(refused) is ReasonCode.STEP_FAILED


def test_a_lock_that_nvidias_driver_refuses_is_not_a_missing_lock() -> None:
    """A driver without the lock is walked; a driver that has it knows why it refuses."""
    kernel = host("native")
    kernel.faults.refuse(proving.unbind_lock(GPU), errno.EIO)
    with pytest.raises(RefusedError) as refused, proving.locked(kernel, GPU):
        pytest.fail("the driver counts as one without a lock")
    assert code_of(refused) is ReasonCode.STEP_FAILED

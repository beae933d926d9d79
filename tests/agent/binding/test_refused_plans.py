"""Each state of a function, or of its neighbours, in which a plan refuses to change its driver."""

import errno
from pathlib import Path
from typing import Protocol

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.driverplanning import plan_units, why_not_unused
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import CardSpec, FunctionSpec, HostSpec, SlotSpec, load_host
from tests.agent.binding.plannedhost import PlannedHost
from tests.agent.change.changes import driver_state, inputs

LEFT, RIGHT = PciAddress("0000:65:00.0"), PciAddress("0000:66:00.0")
PF, VF = PciAddress("0000:25:00.0"), PciAddress("0000:25:00.4")
PASSTHROUGH, NATIVE = DesiredDriver.PASSTHROUGH, DesiredDriver.NATIVE


class Build(Protocol):
    """Builds a host with these slots."""

    def __call__(self, *slots: SlotSpec) -> PlannedHost: ...


@pytest.fixture
def host(tmp_path: Path) -> Build:
    """Return the function that builds a host with these slots."""
    return lambda *slots: PlannedHost(build_host(HostSpec(about="a host", slots=slots)), tmp_path)


def a10(address: PciAddress, driver: str = "native") -> SlotSpec:
    return SlotSpec(at=address, board="A10", group=12, numa=0, driver=driver)


def test_two_gpus_of_a_group_do_not_get_different_drivers(host: Build) -> None:
    pair = host(a10(LEFT), a10(RIGHT))
    (plan,) = plan_units(driver_state(pair.change_host), {LEFT: PASSTHROUGH, RIGHT: NATIVE})
    assert ({reason.code for reason in plan.refusals}, plan.steps) == ({ReasonCode.GROUP_NOT_VIABLE}, ())


def test_a_gpu_does_not_leave_a_group_whose_other_gpu_stays_for_vms(host: Build) -> None:
    pair = host(a10(LEFT, "vfio-pci"), a10(RIGHT, "vfio-pci"))
    assert pair.refused(NATIVE, LEFT) == {ReasonCode.GROUP_NOT_VIABLE}
    (plan,) = plan_units(driver_state(pair.change_host), {LEFT: NATIVE, RIGHT: NATIVE})
    assert plan.refusals == ()


@pytest.mark.parametrize("name", ["driver", "iommu_group"])
def test_a_gpu_with_an_unreadable_attribute_is_not_bound(host: Build, name: str) -> None:
    found = host(a10(LEFT))
    found.kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{LEFT}/{name}"), errno.EIO)
    assert ReasonCode.UNREAD in found.refused(PASSTHROUGH, LEFT)


@pytest.mark.parametrize(("driver", "desired"), [("native", PASSTHROUGH), ("vfio-pci", NATIVE)])
def test_a_gpu_that_has_fallen_off_the_bus_is_not_bound(host: Build, driver: str, desired: DesiredDriver) -> None:
    found = host(a10(LEFT, driver))
    found.kernel.fall_off_bus(LEFT)
    assert found.refused(desired, LEFT) == {ReasonCode.FELL_OFF_BUS}


def test_a_gpu_without_a_driver_whose_group_a_vm_has_is_not_bound(host: Build) -> None:
    """A VM may still have the GPU itself open: the kernel takes away the driver first, and then waits for the VM."""
    pair = host(a10(LEFT, "vfio-pci"), a10(RIGHT, "vfio-pci"))
    pair.kernel.rebind(RIGHT, None)
    process = pair.kernel.start_vm(IommuGroup(12))
    assert pair.refused(PASSTHROUGH, RIGHT) == {ReasonCode.UNBIND_PENDING}
    pair.kernel.end_vm(process)
    assert pair.move(PASSTHROUGH, RIGHT) == ()


def test_a_gpu_whose_vfs_are_enabled_keeps_its_native_driver(host: Build) -> None:
    found = host(SlotSpec(at=PF, board="L40S", group=12, vfs=2))
    (reason,) = found.move(PASSTHROUGH, PF)
    assert reason.code is ReasonCode.VFS_ENABLED
    assert f"gpuvirt vfio bind --remove-vgpus {PF}" in str(reason.fix)
    assert found.refused(PASSTHROUGH, PF) == {ReasonCode.VFS_ENABLED}


def test_a_gpu_on_vfio_whose_vfs_are_enabled_is_not_returned(host: Build) -> None:
    """The kernel removes the VFs when their PF is unbound, even those of a VM."""
    found = host(SlotSpec(at=PF, board="L40S", group=12, vfs=2))
    found.kernel.rebind(PF, None)
    found.kernel.rebind(PF, "vfio-pci")
    assert found.kernel.pci.functions[PF].virtfns
    (reason,) = found.move(NATIVE, PF)
    assert reason.code is ReasonCode.VFS_ENABLED
    assert "gpuvirt vfio bind" not in str(reason.fix), "it is bound, so that the command changes nothing"
    assert found.refused(NATIVE, PF) == {ReasonCode.VFS_ENABLED}


def test_a_function_that_no_driver_has_moves_though_the_group_of_another_is_in_use(host: Build) -> None:
    """pci-stub only reserves a function, so a VM can have the rest of its group."""
    pair = host(a10(LEFT, "vfio-pci"), a10(RIGHT, "pci-stub"))
    pair.kernel.start_vm(IommuGroup(12))
    (plan,) = plan_units(driver_state(pair.change_host), {RIGHT: PASSTHROUGH})
    assert plan.refusals == ()


def test_a_pods_gpu_without_a_driver_gets_no_native_driver(host: Build) -> None:
    found = host(a10(LEFT, "none"))
    pods = {LEFT: ("pod a/b",)}
    assert found.refused(NATIVE, LEFT, inputs(pods)) == {ReasonCode.ALLOCATED_TO_POD}
    assert found.move(NATIVE, LEFT) == ()


def test_a_gpu_does_not_leave_a_group_of_which_a_pod_has_another_function(host: Build) -> None:
    """The lease of the group takes every function of it."""
    board = CardSpec(functions=(FunctionSpec(id="8086:a348", class_code="040300", native_driver="snd_hda_intel"),))
    slots = (a10(LEFT, "vfio-pci"), SlotSpec(at=RIGHT, board="audio", group=12, numa=0, driver="vfio-pci"))
    kernel = build_host(HostSpec(about="a GPU beside an audio device", boards={"audio": board}, slots=slots))
    found = host()
    found.kernel, found.change_host = kernel, replace(found.change_host, kernel=kernel)
    state = driver_state(found.change_host, inputs({RIGHT: ("pod a/b",)}))
    (plan,) = plan_units(state, {LEFT: NATIVE})
    assert [(reason.code, reason.subject) for reason in plan.refusals] == [(ReasonCode.ALLOCATED_TO_POD, RIGHT)]
    (plan,) = plan_units(driver_state(found.change_host), {LEFT: NATIVE})
    assert plan.refusals == ()


def test_a_gpu_leaves_a_group_whose_other_gpu_is_on_its_native_driver_already(host: Build) -> None:
    pair = host(a10(LEFT, "vfio-pci"), a10(RIGHT))
    (plan,) = plan_units(driver_state(pair.change_host), {LEFT: NATIVE})
    assert plan.refusals == ()


def test_a_gpu_without_a_driver_needs_no_accounts_to_become_a_vms(host: Build) -> None:
    """No driver serves it, so no container has it; a VM that still has it shows as a user of its group."""
    found = host(a10(LEFT, "none"), a10(RIGHT))
    state = driver_state(found.change_host, inputs(Unknown()))
    (plan,) = plan_units(state, {LEFT: PASSTHROUGH, RIGHT: PASSTHROUGH})
    assert [(reason.code, reason.subject) for reason in plan.refusals] == [(ReasonCode.ALLOCATIONS_UNKNOWN, RIGHT)]


def test_a_gpu_keeps_its_driver_while_an_allocation_cannot_be_mapped(host: Build) -> None:
    found = host(a10(LEFT))
    unmapped = Allocation(ResourceName("tencent.com/vcuda-core"), DeviceId("7"), "pod a/b")
    known = inputs(ask=lambda _: PodAllocations(unmapped=(unmapped,)))
    (plan,) = plan_units(driver_state(found.change_host, known), {LEFT: PASSTHROUGH})
    assert [reason.code for reason in plan.refusals] == [ReasonCode.ALLOCATION_UNMAPPED]


def test_a_gpu_without_a_driver_whose_vfs_are_enabled_gets_its_native_driver(host: Build) -> None:
    found = host(SlotSpec(at=PF, board="L40S", group=12, vfs=2))
    found.kernel.rebind(PF, None)
    (plan,) = plan_units(driver_state(found.change_host), {PF: NATIVE})
    assert plan.refusals == ()


def unused(found: PlannedHost) -> set[ReasonCode]:
    return {reason.code for reason in why_not_unused(driver_state(found.change_host, inputs()))}


def test_each_possible_use_of_nvidias_gpus_by_a_vm_is_named(host: Build, tmp_path: Path) -> None:
    found = host(a10(LEFT, "vfio-pci"))
    assert unused(found) == set()
    process = found.kernel.start_vm(IommuGroup(12))
    assert unused(found) == {ReasonCode.IN_USE}
    found.kernel.end_vm(process)
    found.kernel.faults.fail(HostPath("/proc"), errno.EACCES)
    assert ReasonCode.PROCESSES_NOT_VISIBLE in unused(found)
    on_native_driver = host(a10(LEFT))
    on_native_driver.kernel.faults.fail(HostPath("/proc"), errno.EACCES)
    assert unused(on_native_driver) == set(), "a VM uses no GPU that is not on VFIO and has no vGPUs"
    without_vgpus = host(SlotSpec(at=LEFT, board="T4", group=12))
    assert unused(without_vgpus) == set(), "its driver can create vGPUs, and none exists"
    with_vgpus = PlannedHost(build_host(load_host("4xT4")), tmp_path)
    assert unused(with_vgpus) == {ReasonCode.CARRIES_VGPUS}

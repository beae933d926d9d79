"""A simulated vCenter is read, and its VMs are suspended, started, shut down and given other vGPUs."""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuvirt.model.workers.hypervisor import (
    Accepted,
    Action,
    Call,
    OutcomeUnknown,
    Power,
    Refused,
    VmKey,
    VmProof,
    VmsUnknown,
    WorkerVm,
)
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor
from tests.hypervisors.simulated import Center, center, connected, key, until, vms
from tests.web.certificates import Authority

pytestmark = pytest.mark.ring("vsphere")


@pytest.fixture(name="center")
def _center(tmp_path: Path, authority: Authority) -> Iterator[Center]:
    with center(tmp_path, authority) as running:
        yield running


@pytest.fixture
async def hypervisor(center: Center) -> AsyncIterator[ChildHypervisor]:
    async with connected(center.credentials) as opened:
        yield opened


async def test_all_vms_are_read(hypervisor: ChildHypervisor) -> None:
    found = await vms(hypervisor)
    assert [*found] == [f"worker{number}" for number in range(5)]
    assert found["worker0"] == WorkerVm(
        key(0), "worker0", "4217aaaa-0000-0000-0000-000000000000", Power.ON, ("grid_v100-4q",), False
    )
    assert (found["worker4"].power, found["worker4"].vgpu_types) == (Power.SUSPENDED, ("grid_v100-16q",))


def test_threads_command_one_simulator(center: Center) -> None:
    """A test asks for the power of VMs beside the thread that plays their kubelets."""
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(lambda: [center.vsphere.state for _ in range(300)]) for _ in range(4)]
        assert all(len(answers.result(timeout=60)) == 300 for answers in asked)


async def test_an_answer_of_several_pages_is_read_whole(tmp_path: Path, authority: Authority) -> None:
    with center(tmp_path, authority, "-workers=250") as large:
        async with connected(large.credentials) as hypervisor:
            for _ in range(2):
                found = await vms(hypervisor)
                assert len(found) == 250
                assert {vm.vgpu_types for vm in found.values()} == {("grid_v100-4q",), ("grid_v100-16q",)}


async def test_the_day_becomes_night(center: Center, hypervisor: ChildHypervisor) -> None:
    start = Call(VmProof(key(4)), Action.START)
    refused = await hypervisor.call(start)
    assert isinstance(refused, Refused)
    assert refused.code == "NoGraphicsCapacity"
    assert "InsufficientGraphicsResourcesFault" in refused.text
    for number in range(4):
        assert await hypervisor.call(Call(VmProof(key(number)), Action.SUSPEND)) == Accepted()
    await until(hypervisor, lambda found: all(found[f"worker{n}"].power is Power.SUSPENDED for n in range(4)))
    assert await hypervisor.call(start) == Accepted()
    found = await until(hypervisor, lambda found: found["worker4"].power is Power.ON)
    assert not any(vm.is_changing for vm in found.values())
    assert center.vsphere.state.calls == [
        "PowerOn worker4",
        *(f"Suspend worker{n}" for n in range(4)),
        "PowerOn worker4",
    ]


async def test_a_vm_is_changing_while_its_task_runs(center: Center, hypervisor: ChildHypervisor) -> None:
    await vms(hypervisor)
    center.vsphere.command(taskDelays={"Suspend": 8000})
    assert await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND)) == Accepted(), (
        "the call does not wait for the task"
    )
    found = await vms(hypervisor)
    assert [name for name, vm in found.items() if vm.is_changing] == ["worker0"]
    assert found["worker0"].power is Power.ON, "it has its vGPU until the task has ended"
    found = await until(hypervisor, lambda found: found["worker0"].power is Power.SUSPENDED)
    await until(hypervisor, lambda found: not found["worker0"].is_changing)


async def test_a_guest_is_asked_to_shut_down(center: Center, hypervisor: ChildHypervisor) -> None:
    assert await hypervisor.call(Call(VmProof(key(1)), Action.SHUT_DOWN)) == Accepted()
    await until(hypervisor, lambda found: found["worker1"].power is Power.OFF)
    center.vsphere.change("worker2", tools="guestToolsNotRunning")
    refused = await hypervisor.call(Call(VmProof(key(2)), Action.SHUT_DOWN))
    assert isinstance(refused, Refused)
    assert refused.code == "GuestToolsMissing"


async def test_power_is_taken_away(center: Center, hypervisor: ChildHypervisor) -> None:
    assert await hypervisor.call(Call(VmProof(key(3)), Action.POWER_OFF)) == Accepted()
    assert center.vsphere.state.calls == ["PowerOff worker3"]
    await until(hypervisor, lambda found: found["worker3"].power is Power.OFF)


@pytest.mark.parametrize(
    ("number", "action"), [(0, Action.START), (4, Action.SUSPEND), (4, Action.SHUT_DOWN), (0, Action.SET_VGPU_TYPE)]
)
async def test_a_vm_in_another_state_refuses(hypervisor: ChildHypervisor, number: int, action: Action) -> None:
    vgpu_type = "grid_v100-16q" if action is Action.SET_VGPU_TYPE else ""
    refused = await hypervisor.call(Call(VmProof(key(number)), action, vgpu_type))
    assert isinstance(refused, Refused)
    assert refused.code == "WrongPowerState"
    assert f"the VM is {'poweredOn' if number == 0 else 'suspended'}" in refused.text


async def test_a_vm_that_is_off_gets_another_vgpu(hypervisor: ChildHypervisor) -> None:
    await hypervisor.call(Call(VmProof(key(0)), Action.POWER_OFF))
    assert (await vms(hypervisor))["worker0"].vgpu_types == ("grid_v100-4q",)
    assert await hypervisor.call(Call(VmProof(key(0)), Action.SET_VGPU_TYPE, "grid_v100-16q")) == Accepted()
    found = await until(hypervisor, lambda found: found["worker0"].vgpu_types == ("grid_v100-16q",))
    assert found["worker0"].power is Power.OFF
    refused = await hypervisor.call(Call(VmProof(key(0)), Action.SET_VGPU_TYPE, "grid_h100-80c"))
    assert isinstance(refused, Refused)
    assert refused.code == "HypervisorRefused"
    assert "InvalidDeviceBacking" in refused.text


async def test_a_vm_that_does_not_exist_is_named(hypervisor: ChildHypervisor) -> None:
    refused = await hypervisor.call(Call(VmProof(VmKey("00000000-0000-0000-0000-000000000000")), Action.START))
    assert isinstance(refused, Refused)
    assert refused.code == "VmNotFound"


async def test_the_power_of_a_vm_whose_host_is_lost_is_unknown(center: Center, hypervisor: ChildHypervisor) -> None:
    center.vsphere.change("worker4", connection="disconnected")
    found = (await vms(hypervisor))["worker4"]
    assert (found.power, found.is_changing) == (Power.UNKNOWN, True)


async def test_what_can_be_done_is_said_before_anything_happens(center: Center, hypervisor: ChildHypervisor) -> None:
    before = center.vsphere.state
    missing = VmKey("00000000-0000-0000-0000-000000000000")
    found = await hypervisor.check([key(0), key(4), missing])
    assert not isinstance(found, VmsUnknown)
    assert [*found] == [key(0), key(4)]
    running, suspended = found[key(0)], found[key(4)]
    assert running.suspend.is_possible is True
    assert running.shut_down.is_possible is True
    assert running.start.is_possible is True
    assert running.set_vgpu_type.is_possible is True
    assert (suspended.shut_down.is_possible, suspended.shut_down.code) == (None, "GuestToolsMissing")
    assert "migration with grid_v100-4q: yes" in running.remarks
    assert center.vsphere.state == before


async def test_a_type_that_its_host_can_not_suspend(hypervisor: ChildHypervisor) -> None:
    await hypervisor.call(Call(VmProof(key(0)), Action.POWER_OFF))
    assert await hypervisor.call(Call(VmProof(key(0)), Action.SET_VGPU_TYPE, "grid_v100-4c")) == Accepted()
    found = await hypervisor.check([key(0)])
    assert not isinstance(found, VmsUnknown)
    suspend = found[key(0)].suspend
    assert (suspend.is_possible, suspend.code) == (False, "SuspendNotSupported")
    assert "grid_v100-4c" in suspend.text


async def test_a_restart_of_the_vcenter_keeps_its_state(tmp_path: Path, authority: Authority) -> None:
    with center(tmp_path, authority) as first:
        async with connected(first.credentials) as hypervisor:
            await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND))
            before = await until(hypervisor, lambda found: found["worker0"].power is Power.SUSPENDED)
    port = first.vsphere.port
    async with connected(first.credentials) as hypervisor:
        down = await hypervisor.read()
        assert isinstance(down, VmsUnknown)
        assert down.code == "HypervisorUnreachable"
        refused = await hypervisor.call(Call(VmProof(key(0)), Action.START))
        assert isinstance(refused, Refused), "without a connection, nothing can have been sent"
        with center(tmp_path, authority, port=port):
            assert {name: vm.power for name, vm in (await vms(hypervisor)).items()} == {
                name: vm.power for name, vm in before.items()
            }


async def test_one_call_in_ten_fails_and_is_not_known(center: Center, hypervisor: ChildHypervisor) -> None:
    await vms(hypervisor)
    center.vsphere.command(fault={"method": "SuspendVM_Task", "every": 10, "most": 0, "kind": "system"})
    failed = await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND))
    assert isinstance(failed, OutcomeUnknown)
    assert failed.code == "HypervisorCallFailed"
    assert (await vms(hypervisor))["worker0"].power is Power.ON, "so it is read"
    assert await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND)) == Accepted(), "and made again"


async def test_what_the_user_may_not_do_is_refused(center: Center, hypervisor: ChildHypervisor) -> None:
    center.vsphere.command(fault={"method": "SuspendVM_Task", "every": 1, "most": 0, "kind": "noPermission"})
    refused = await hypervisor.call(Call(VmProof(key(0)), Action.SUSPEND))
    assert isinstance(refused, Refused)
    assert refused.code == "HypervisorForbidden"

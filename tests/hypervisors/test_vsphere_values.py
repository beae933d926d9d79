"""The properties of a VM that a vCenter shows or leaves out: none that is missing counts as off, or as possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.hypervisors.backend import BackEndError
from gpuvirt.hypervisors.messages import Problem
from gpuvirt.hypervisors.vsphere.backend import abilities
from gpuvirt.hypervisors.vsphere.properties import FoundObject
from gpuvirt.hypervisors.vsphere.reading import worker_vm
from gpuvirt.model.schedules.hypervisor import Power, VmKey, WorkerVm

WHOLE: dict[str, object] = {
    "name": "worker0",
    "config.uuid": "4217AAAA-0000",
    "config.instanceUuid": "5017bbbb-0000",
    "runtime.powerState": "poweredOff",
    "runtime.connectionState": "connected",
}


def found(*, missing: tuple[str, ...] = (), **values: object) -> FoundObject:
    """Return a VM with other values than the whole one has; None is no value."""
    changed = WHOLE | {name.replace("_", "."): value for name, value in values.items()}
    return FoundObject(
        "vim.VirtualMachine:vm-1", {name: value for name, value in changed.items() if value is not None}, missing
    )


def test_a_vm_that_is_shown_whole() -> None:
    assert worker_vm(found(), ("grid_v100-4q",), set()) == WorkerVm(
        VmKey("5017bbbb-0000"), "worker0", "4217aaaa-0000", Power.OFF, ("grid_v100-4q",)
    )


def test_a_vm_without_power_state_makes_the_reading_unknown() -> None:
    with pytest.raises(BackEndError) as raised:
        worker_vm(found(runtime_powerState=None), (), set())
    assert raised.value.problem is Problem.INCOMPLETE
    assert "runtime.powerState" in raised.value.text


def test_a_vm_that_may_not_be_read_makes_the_reading_unknown() -> None:
    with pytest.raises(BackEndError, match="NoPermission"):
        worker_vm(found(missing=("config.instanceUuid (NoPermission)",), config_instanceUuid=None), (), set())


def test_a_vm_without_a_configuration_is_left_out() -> None:
    assert worker_vm(found(config_instanceUuid=None), (), set()) is None


@given(st.sampled_from(["disconnected", "orphaned", "inaccessible", "invalid", None]))
def test_the_last_state_of_a_lost_vm_is_not_its_state(connection: str | None) -> None:
    vm = worker_vm(found(runtime_connectionState=connection), (), set())
    assert vm is not None
    assert (vm.power, vm.is_changing) == (Power.UNKNOWN, True)


def test_a_state_that_is_new_is_unknown() -> None:
    vm = worker_vm(found(runtime_powerState="hibernated"), (), set())
    assert vm is not None
    assert (vm.power, vm.is_changing) == (Power.UNKNOWN, True)


def test_a_value_of_another_type_makes_the_reading_unknown() -> None:
    with pytest.raises(BackEndError):
        worker_vm(found(runtime_powerState=1), (), set())


def test_a_vm_without_vgpus_needs_no_host_that_offers_them() -> None:
    can = abilities(VmKey("1"), found(), None)
    assert can.suspend.is_possible is True
    assert can.start.is_possible is True
    assert (can.set_vgpu_type.is_possible, can.set_vgpu_type.code) == (False, Problem.NOT_ONE_VGPU)
    assert can.shut_down.is_possible is None

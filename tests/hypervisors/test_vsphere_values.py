"""The properties of a VM that a vCenter shows or leaves out: none that is missing counts as off, or as possible."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyVmomi import vim, vmodl

from gpuvirt.model.workers.hypervisor import Action, Call, Power, VmKey, VmProof, WorkerVm
from gpuvirt_schedules.hypervisors.messages import BackEndError, Problem
from gpuvirt_schedules.hypervisors.vsphere.backend import FoundObject, VSphere, abilities, worker_vm
from gpuvirt_schedules.hypervisors.vsphere.session import VsphereSession

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


@pytest.mark.parametrize("name", ["runtime.powerState", "config.instanceUuid"])
def test_a_value_of_another_type_makes_the_reading_unknown(name: str) -> None:
    with pytest.raises(BackEndError, match=f"{name} is a int"):
        worker_vm(FoundObject("vim.VirtualMachine:vm-1", WHOLE | {name: 1}, ()), (), set())


def test_a_vm_without_vgpus_needs_no_host_that_offers_them() -> None:
    can = abilities(VmKey("1"), found(), None)
    assert can.suspend.is_possible is True
    assert can.start.is_possible is True
    assert (can.set_vgpu_type.is_possible, can.set_vgpu_type.code) == (False, Problem.NOT_ONE_VGPU)
    assert can.shut_down.is_possible is None


def client(monkeypatch: pytest.MonkeyPatch, connected: Callable[[VsphereSession], object]) -> VSphere:
    """Return a client with another way to a vCenter."""
    monkeypatch.setattr(VsphereSession, "_connected", connected)
    return VSphere("vcenter", "CA", "user", "password")


def api(*values: SimpleNamespace, lacks: Exception | None = None, view: object = None) -> SimpleNamespace:
    """Return a vCenter's API that shows one VM with these properties, and without those of `lacks`."""
    vm = vim.VirtualMachine("vm-1")
    missing = [SimpleNamespace(path="name", fault=lacks)] if lacks is not None else []
    page = SimpleNamespace(objects=[SimpleNamespace(obj=vm, propSet=values, missingSet=missing)], token=None)
    return SimpleNamespace(
        propertyCollector=SimpleNamespace(RetrievePropertiesEx=lambda *_: page),
        searchIndex=SimpleNamespace(FindByUuid=lambda *_: vm),
        sessionManager=None,
        viewManager=view,
        rootFolder=None,
    )


def view(error: Exception | None) -> SimpleNamespace:
    """Return a vCenter's manager of views, which may fail."""

    def create(*_: object) -> object:
        if error is not None:
            raise error
        return vim.view.ContainerView("view-1")

    return SimpleNamespace(CreateContainerView=create)


@pytest.mark.parametrize(
    ("content", "problem", "text"),
    [
        (api(view=view(None), lacks=vim.fault.NotAuthenticated()), Problem.SESSION_LOST, "NotAuthenticated"),
        (api(view=view(vmodl.fault.ManagedObjectNotFound())), Problem.INCOMPLETE, "an object ended"),
        (api(), Problem.INCOMPLETE, "no view manager"),
    ],
    ids=["the session has ended", "an object has ended", "no view manager"],
)
def test_an_answer_that_lacks_something_is_no_reading(
    monkeypatch: pytest.MonkeyPatch, content: SimpleNamespace, problem: Problem, text: str
) -> None:
    with pytest.raises(BackEndError, match=text) as raised:
        client(monkeypatch, lambda _: content).read()
    assert raised.value.problem is problem


@pytest.mark.parametrize("count", [0, 2])
def test_a_vm_without_exactly_one_vgpu_keeps_its_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    backing = vim.vm.device.VirtualPCIPassthrough.VmiopBackingInfo(vgpu="grid_v100-4q")
    devices = [vim.vm.device.VirtualPCIPassthrough(backing=backing) for _ in range(count)]
    content = api(SimpleNamespace(name="config.hardware.device", val=devices))
    with pytest.raises(BackEndError, match=f"{count} vGPUs") as raised:
        client(monkeypatch, lambda _: content).make(Call(VmProof(VmKey("1")), Action.SET_VGPU_TYPE, "grid_v100-16q"))
    assert (raised.value.problem, raised.value.is_certain) == (Problem.NOT_ONE_VGPU, True)


def test_wrong_credentials_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vCenter locks a user after five failures; several requests may wait for the first login."""
    logins = list[VsphereSession]()

    def connected(session: VsphereSession) -> None:
        logins.append(session)
        raise vim.fault.InvalidLogin

    vsphere = client(monkeypatch, connected)
    for _ in range(2):
        with pytest.raises(BackEndError) as raised:
            vsphere.read()
        assert raised.value.problem is Problem.WRONG_CREDENTIALS
    assert len(logins) == 1


@pytest.mark.parametrize(("problem", "is_certain"), [(Problem.INCOMPLETE, False), (Problem.REFUSED, True)])
def test_only_what_an_ended_session_has_refused_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, *, is_certain: bool
) -> None:
    monkeypatch.setattr(VsphereSession, "_connected", lambda _: api())
    session, asked = VsphereSession("vcenter", "CA", "user", "password"), list[object]()

    def ask(content: object) -> None:
        asked.append(content)
        raise BackEndError(problem, "words", is_certain=is_certain)

    with pytest.raises(BackEndError):
        session.run(ask)
    assert len(asked) == 1

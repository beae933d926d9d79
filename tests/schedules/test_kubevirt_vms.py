"""The back end of KubeVirt against a stand-in with delays: calls, lost answers, conflicts, and admins' changes."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.hypervisor import (
    Accepted,
    Action,
    Answer,
    Call,
    OutcomeUnknown,
    Power,
    Refused,
    VmKey,
    VmProof,
    VmsUnknown,
    WorkerVm,
)
from gpuvirt.model.workers.spec import Leave
from gpuvirt_schedules.controller.kubevirt.connection import KubeVirtVms
from tests.kube.scriptedapi import Call as Request
from tests.kube.scriptedapi import Reply
from tests.schedules.servedkubevirt import KEY, SAVED, VMIS, Guest, ServedKubeVirt, connected
from tests.schedules.workerround import CORDONED, SCHEDULE, calls, decided, observed, worker
from tests.web.certificates import Authority, Pair

STRATEGIES = ("Manual", "Always", "RerunOnFailure", "Once", "running")
POWERS = (Power.ON, Power.OFF)
DERIVED = "ea808a30-c945-5eb9-867b-30e4631c0ba0"


class Event(StrEnum):
    """The fault of one write, or none."""

    NONE = "none"
    LOST_REQUEST = "lost request"
    LOST_ANSWER = "lost answer"
    CONFLICT = "conflict"
    DELETED = "deleted"


@dataclass(slots=True)
class World:
    """The stand-in, and what happens to the next writes."""

    kubevirt: ServedKubeVirt
    events: list[Event]

    def answer(self, request: Request) -> Reply:
        if request.method == "GET" or not self.events:
            return self.kubevirt.answer(request)
        event = self.events.pop(0)
        if event is Event.LOST_REQUEST:
            raise OSError
        if event is Event.CONFLICT:
            self.kubevirt.touch(self.kubevirt.guests["worker"])
        if event is Event.DELETED:
            del self.kubevirt.guests["worker"]
        reply = self.kubevirt.answer(request)
        if event is Event.LOST_ANSWER:
            raise OSError
        return reply


async def vm_of(vms: KubeVirtVms) -> WorkerVm:
    reading = await vms.read()
    assert not isinstance(reading, VmsUnknown)
    return reading[KEY]


async def make(vms: KubeVirtVms, action: Action, vgpu_type: str = "") -> Answer:
    """Make a call with the proof of the VM as it is read now."""
    return await vms.call(Call(VmProof(KEY, (await vm_of(vms)).instance), action, vgpu_type))


async def until(vms: KubeVirtVms, kubevirt: ServedKubeVirt, power: Power, action: Action) -> list[Answer]:
    """Make a call whenever the VM is not changing, as rounds do, until the VM has a power."""
    answers = list[Answer]()
    for _ in range(60):
        vm = await vm_of(vms)
        if vm.power is power and not vm.is_changing:
            return answers
        if not vm.is_changing:
            answers.append(await make(vms, action))
        kubevirt.pass_time(kubevirt.now_s + 5.0)
    raise AssertionError(f"{power} was not reached: {answers}")


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_vm_is_shut_down_and_started_and_has_its_strategy_again(
    authority: Authority, server: Pair, strategy: str
) -> None:
    kubevirt = ServedKubeVirt()
    guest, other = kubevirt.add("worker", strategy), kubevirt.add("other", "Always")
    before, others = dict(guest.spec), dict(other.spec)
    async with connected(kubevirt.answer, server, authority.certificate) as vms:
        assert (await vm_of(vms)).power is Power.ON
        assert await until(vms, kubevirt, Power.OFF, Action.SHUT_DOWN) == [Accepted()]
        kubevirt.pass_time(kubevirt.now_s + 600.0)
        assert (guest.vmi, guest.power_cuts) == (None, 0)
        assert (SAVED in guest.annotations) is (strategy in {"Always", "Once", "running"})
        assert await until(vms, kubevirt, Power.ON, Action.START) == [Accepted()]
    assert (guest.spec, guest.annotations, guest.boots) == (before, {}, 2)
    assert (other.spec, other.boots) == (others, 1)


@given(
    st.sampled_from(STRATEGIES),
    st.lists(st.sampled_from([Event.NONE, Event.LOST_REQUEST, Event.LOST_ANSWER, Event.CONFLICT]), max_size=5),
    st.lists(st.sampled_from([Event.NONE, Event.LOST_REQUEST, Event.LOST_ANSWER, Event.CONFLICT]), max_size=5),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_any_lost_calls_and_conflicts_a_vm_is_off_and_on_again_once(
    authority: Authority, server: Pair, strategy: str, down: list[Event], up: list[Event]
) -> None:
    async def play() -> None:
        kubevirt = ServedKubeVirt()
        guest = kubevirt.add("worker", strategy)
        before, world = dict(guest.spec), World(kubevirt, [*down])
        async with connected(world.answer, server, authority.certificate) as vms:
            await until(vms, kubevirt, Power.OFF, Action.SHUT_DOWN)
            assert (guest.boots, guest.power_cuts) == (1, 0)
            world.events = [*up]
            await until(vms, kubevirt, Power.ON, Action.START)
        assert (guest.spec, guest.annotations, guest.boots) == (before, {}, 2)

    asyncio.run(play())


@given(st.sampled_from(STRATEGIES), st.sampled_from(Event), st.sampled_from(Action), st.sampled_from(POWERS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_refused_call_changes_nothing_and_a_lost_one_is_unknown(
    authority: Authority, server: Pair, strategy: str, event: Event, action: Action, power: Power
) -> None:
    async def play() -> None:
        kubevirt = ServedKubeVirt()
        guest = kubevirt.add("worker", strategy)
        world = World(kubevirt, [])
        async with connected(world.answer, server, authority.certificate) as vms:
            if power is Power.OFF:
                await until(vms, kubevirt, Power.OFF, Action.SHUT_DOWN)
            before, written = seen(guest), len(kubevirt.writes)
            world.events = [event]
            answer = await make(vms, action, "nvidia.com/A10-8Q")
        was_asked = not world.events
        if isinstance(answer, Refused):
            assert seen(guest) == before
        assert isinstance(answer, OutcomeUnknown) is (was_asked and event in {Event.LOST_REQUEST, Event.LOST_ANSWER})
        assert isinstance(answer, Accepted) is (was_asked and event is Event.NONE)
        if not was_asked:
            assert len(kubevirt.writes) == written

    asyncio.run(play())


def seen(guest: Guest) -> tuple[str, object, object]:
    return str(guest.spec), dict(guest.annotations), list(guest.requests)


async def test_a_guest_that_ignores_its_shutdown_loses_its_power_by_force_alone(
    authority: Authority, server: Pair
) -> None:
    kubevirt = ServedKubeVirt()
    guest = kubevirt.add("worker", "Always", grace_s=3600)
    guest.ignores_shutdown = True
    async with connected(kubevirt.answer, server, authority.certificate) as vms:
        early = await make(vms, Action.POWER_OFF)
        assert isinstance(early, Refused)
        assert await make(vms, Action.SHUT_DOWN) == Accepted()
        kubevirt.pass_time(kubevirt.now_s + 300.0)
        vm = await vm_of(vms)
        assert (vm.power, vm.is_changing, vm.is_shutting_down) == (Power.ON, True, True)
        written = len(kubevirt.writes)
        assert await make(vms, Action.SHUT_DOWN) == Accepted()
        assert len(kubevirt.writes) == written, "the guest was asked already"
        assert await make(vms, Action.POWER_OFF) == Accepted()
        kubevirt.pass_time(kubevirt.now_s + 5.0)
        assert (await vm_of(vms)).power is Power.OFF
    assert guest.power_cuts == 1
    assert guest.strategy == "Halted"


async def test_a_vm_that_an_admin_has_halted_is_not_started(authority: Authority, server: Pair) -> None:
    kubevirt = ServedKubeVirt()
    guest = kubevirt.add("worker", "Halted", runs=False)
    async with connected(kubevirt.answer, server, authority.certificate) as vms:
        answer = await make(vms, Action.START)
        assert isinstance(answer, Refused)
        assert (answer.code, "set Manual" in answer.text) == ("HypervisorRefused", True)
        found = await vms.check([KEY, VmKey("none")])
        assert not isinstance(found, VmsUnknown)
        assert list(found) == [KEY]
        assert (found[KEY].start.is_possible, found[KEY].shut_down.is_possible) == (False, True)
    assert (guest.boots, kubevirt.writes) == (0, [])


async def test_a_check_names_what_kubevirt_does_not_have(authority: Authority, server: Pair) -> None:
    kubevirt = ServedKubeVirt()
    kubevirt.add("worker", "Once", grace_s=0)
    async with connected(kubevirt.answer, server, authority.certificate) as vms:
        found = await vms.check([KEY])
        assert not isinstance(found, VmsUnknown)
        suspended = await make(vms, Action.SUSPEND)
    abilities = found[KEY]
    assert (abilities.suspend.is_possible, abilities.suspend.code) == (False, "SuspendNotSupported")
    assert isinstance(suspended, Refused)
    assert abilities.shut_down.is_possible is False, "without a grace period KubeVirt takes the power at once"
    assert (abilities.start.is_possible, abilities.set_vgpu_type.is_possible) == (True, True)
    assert "live migration: no (HostDeviceNotLiveMigratable)" in abilities.remarks
    assert kubevirt.writes == []


async def test_another_vgpu_type_is_set_while_the_vm_is_off_alone(authority: Authority, server: Pair) -> None:
    kubevirt = ServedKubeVirt()
    kubevirt.add("worker", "Manual")
    async with connected(kubevirt.answer, server, authority.certificate) as vms:
        assert isinstance(await make(vms, Action.SET_VGPU_TYPE, "nvidia.com/A10-8Q"), Refused)
        await until(vms, kubevirt, Power.OFF, Action.SHUT_DOWN)
        assert (await vm_of(vms)).vgpu_types == ("nvidia.com/A10-4Q",)
        assert await make(vms, Action.SET_VGPU_TYPE, "nvidia.com/A10-8Q") == Accepted()
        assert (await vm_of(vms)).vgpu_types == ("nvidia.com/A10-8Q",)


async def test_a_system_uuid_is_that_of_the_firmware_or_derived_from_the_name(
    authority: Authority, server: Pair
) -> None:
    kubevirt = ServedKubeVirt()
    guest = kubevirt.add("worker", "Manual")
    async with connected(kubevirt.answer, server, authority.certificate) as vms:
        assert (await vm_of(vms)).system_uuid == DERIVED
        template = guest.spec["template"]
        assert isinstance(template, dict)
        template["spec"]["domain"]["firmware"] = {"uuid": "5D307CA9-B3EF-428C-8861-06E72D69F223"}
        assert (await vm_of(vms)).system_uuid == "5d307ca9-b3ef-428c-8861-06e72d69f223"


async def test_a_namespace_without_rights_is_unknown_and_the_reason_names_the_value(
    authority: Authority, server: Pair
) -> None:
    forbidden: Reply = 403, {"kind": "Status", "message": "virtualmachines is forbidden", "code": 403}
    async with connected(lambda request: forbidden, server, authority.certificate) as vms:
        reading = await vms.read()
        answer = await vms.call(Call(VmProof(KEY), Action.START))
    assert isinstance(reading, VmsUnknown)
    assert reading.code == "HypervisorForbidden"
    assert "schedule.kubeVirtNamespaces" in reading.text
    assert isinstance(answer, Refused)


async def test_a_vm_of_the_same_name_in_another_namespace_is_not_the_worker_s(
    authority: Authority, server: Pair
) -> None:
    """KubeVirt derives the UUID from the name, and its provider ID has no namespace."""
    kubevirt = ServedKubeVirt()
    kubevirt.add("worker", "Manual")
    node = replace(CORDONED, system_uuid=DERIVED.upper(), provider_id="kubevirt://worker")
    async with connected(kubevirt.answer, server, authority.certificate) as vms:
        found = decided(observed(node, vms=await vms.read()), replace(SCHEDULE, leave=Leave.SHUT_DOWN))
    reason = worker(found).reason
    assert not calls(found)
    assert reason is not None
    assert (reason.code, "workers/worker" in reason.message) == (ReasonCode.VM_NOT_MATCHED, True)


@pytest.mark.parametrize("is_vm_new", [True, False])
async def test_a_power_off_is_refused_for_a_guest_that_was_not_read(
    authority: Authority, server: Pair, *, is_vm_new: bool
) -> None:
    """Another VM or VMI has the name since the last reading: its guest has just been asked to end."""
    kubevirt = ServedKubeVirt()
    old = kubevirt.add("worker", "Always", grace_s=3600)
    old.ignores_shutdown = True
    is_replaced = False

    def answer(request: Request) -> Reply:
        if is_replaced and request.path == VMIS:
            new = kubevirt.add("worker", "Always", grace_s=3600)
            new.uid = f"{KEY}-2" if is_vm_new else KEY
            new.deleted_s = kubevirt.now_s
        return kubevirt.answer(request)

    async with connected(answer, server, authority.certificate) as vms:
        assert await make(vms, Action.SHUT_DOWN) == Accepted()
        kubevirt.pass_time(kubevirt.now_s + 300.0)
        vm = await vm_of(vms)
        is_replaced, written = True, len(kubevirt.writes)
        answered = await vms.call(Call(VmProof(KEY, vm.instance), Action.POWER_OFF))
    assert vm.is_shutting_down
    assert isinstance(answered, Refused)
    assert (answered.code, len(kubevirt.writes)) == ("WrongPowerState", written)

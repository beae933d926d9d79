"""Guards of schedules that no other test reaches: each refuses, and says why."""

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import Namespace, NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import NotFoundError
from gpuvirt.kube.kinds.kubevirt import Vm
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import (
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
from gpuvirt.model.workers.observed import LastCall, NodeVm, ObservedVm, VmStep, WorkerNode
from gpuvirt.model.workers.spec import Drain, Phase, PhaseName, PhaseOverride, Schedule
from gpuvirt.model.workers.status import ConfiguredNode, ScheduleStatus, Worker, WorkerStep
from gpuvirt_schedules.controller.commandreading import read_schedule, read_schedules
from gpuvirt_schedules.controller.kubevirt.connection import KubeVirtVms
from gpuvirt_schedules.controller.kubevirt.virtualmachines import VmObjects, refusal, shutdown_refusal
from gpuvirt_schedules.decide.faults import faults
from gpuvirt_schedules.decide.matching import candidates, match, prove, prove_user
from gpuvirt_schedules.decide.times import CronLineError, switch_by_hand, verify_line
from tests.kube.scriptedapi import NOT_FOUND, Reply, scripted
from tests.kube.scriptedapi import Call as Request
from tests.schedules.servedkubevirt import KEY, NAMESPACE, VMIS, VMS, ServedKubeVirt, connected, convert_vm
from tests.schedules.workerround import EVENING, FIRST, NODES, SCHEDULE, calls, decided, observed, worker
from tests.schedules.workerround import VMS as SEEN
from tests.web.certificates import Authority, Pair

FAILS: Reply = 500, {"kind": "ScheduleStatus", "message": "etcdserver: request timed out", "code": 500}


def test_a_switch_by_hand_needs_an_end_if_no_phase_begins_later() -> None:
    """An override that holds from now on has no next switch."""
    only = replace(SCHEDULE, phases=(Phase(PhaseName("day"), "0 7 * * *"),))
    assert switch_by_hand(only, "day", "", EVENING) is None
    held = replace(
        SCHEDULE,
        phases=(Phase(PhaseName("day"), "0 7 * * *"), Phase(PhaseName("night"), "0 7 * * *")),
        overrides=(PhaseOverride(PhaseName("day"), datetime(2000, 1, 1), datetime(2999, 1, 1)),),  # noqa: DTZ001  local
    )
    with pytest.raises(ConfigError, match="is missing, and no phase begins within a year"):
        switch_by_hand(held, "night", "", EVENING)
    switch = switch_by_hand(held, "night", "2026-01-06T07:00", EVENING)
    assert switch is not None
    assert switch.end == datetime(2026, 1, 6, 7, tzinfo=UTC)
    with pytest.raises(ConfigError, match="which has passed"):
        switch_by_hand(SCHEDULE, "day", "2026-01-05T19:00", EVENING)
    with pytest.raises(ConfigError, match="which is not a date"):
        switch_by_hand(SCHEDULE, "day", "2026-02-30T19:00", EVENING)
    with pytest.raises(ConfigError, match="expected"):
        switch_by_hand(SCHEDULE, "day", "tomorrow", EVENING)
    with pytest.raises(ConfigError, match="expected one of day, night"):
        switch_by_hand(SCHEDULE, "noon", "", EVENING)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (replace(SCHEDULE, phases=(replace(SCHEDULE.phases[0], name=PhaseName("")),)), "a phase without a name"),
        (replace(SCHEDULE, drain=Drain(timeout_s=-1.0)), "can't be negative"),
        (replace(SCHEDULE, announce_s=-1.0), "can't be negative"),
        (replace(SCHEDULE, phases=(*SCHEDULE.phases, SCHEDULE.phases[0])), "2 phases with the name 'day'"),
    ],
)
def test_what_is_wrong_with_a_spec_is_said_in_words(schedule: Schedule, words: str) -> None:
    assert any(words in reason.text for reason in faults(schedule, EVENING))


def test_a_node_that_an_admin_uncordons_while_its_vm_is_off_is_cordoned_again() -> None:
    off = {**SEEN, VmKey("one"): replace(SEEN[VmKey("one")], power=Power.SUSPENDED)}
    found = decided(observed(NODES[FIRST], vms=off))
    assert worker(found).step is WorkerStep.CORDON
    assert [action for action in found.actions if action.node == FIRST]
    gone = replace(NODES[FIRST], is_ready=False)
    assert worker(decided(observed(gone, vms=off))).step is WorkerStep.AWAY


ONE = SEEN[VmKey("one")]
KNOWN = Worker(FIRST, "uid-1", vm=ONE.key, vm_name=ONE.name)
OF_KUBEVIRT = replace(ONE, where="workers/worker-1", addresses=("10.0.0.1",), instance="vmi")
NODE = replace(NODES[FIRST], addresses=("10.0.0.1",), provider_id="kubevirt://worker-1")


def test_a_vm_of_another_uuid_is_no_longer_the_worker_s() -> None:
    assert prove(KNOWN, NODES[FIRST], SEEN) == VmProof(ONE.key)
    other = replace(NODES[FIRST], system_uuid="421c5a83-0000-4000-8000-00000000000f")
    for known, node, vms, code in (
        (KNOWN, other, SEEN, ReasonCode.VM_NOT_MATCHED),
        (KNOWN, NODES[FIRST], {}, ReasonCode.VM_NOT_VISIBLE),
        (replace(KNOWN, vm=VmKey("")), NODES[FIRST], {}, ReasonCode.VM_NOT_MATCHED),
    ):
        found = prove(known, node, vms)
        assert isinstance(found, Reason)
        assert (found.code, "worker-1" in found.text) == (code, True)


@pytest.mark.parametrize(
    ("node", "vm", "is_proven"),
    [
        (NODE, OF_KUBEVIRT, True),
        (replace(NODE, addresses=("10.0.0.2",)), OF_KUBEVIRT, False),
        (replace(NODE, system_uuid=""), OF_KUBEVIRT, False),
        (NODE, replace(OF_KUBEVIRT, addresses=()), False),
        (replace(NODE, addresses=(), vm="workers/worker-1"), OF_KUBEVIRT, True),
        (replace(NODE, vm="others/worker-1"), OF_KUBEVIRT, False),
        (replace(NODE, addresses=(), vm="workers/worker-1", system_uuid="4217"), OF_KUBEVIRT, False),
        (replace(NODE, addresses=(), provider_id="harvester://One"), OF_KUBEVIRT, True),
        (replace(NODES[FIRST], system_uuid="", provider_id=f"vsphere://{ONE.system_uuid}"), ONE, True),
        (replace(NODES[FIRST], system_uuid="", vm="workers/worker-1"), ONE, False),
        (replace(NODES[FIRST], provider_id="aws:///"), replace(ONE, system_uuid="", key=VmKey("")), False),
    ],
)
def test_both_sides_prove_whose_vm_it_is(node: WorkerNode, vm: WorkerVm, *, is_proven: bool) -> None:
    assert candidates(node, {vm.key: vm}) == ((vm,) if is_proven else ())
    found = prove(replace(KNOWN, vm=vm.key), node, {vm.key: vm})
    assert (found == VmProof(vm.key, vm.instance)) is is_proven


def test_the_match_in_the_status_proves_whose_vm_it_is_only_while_it_is_off() -> None:
    no_uuid, off = replace(NODES[FIRST], system_uuid=""), Power.OFF
    off_again = replace(OF_KUBEVIRT, power=off, addresses=(), instance="")
    for node, vm, is_proven in (
        (None, ONE, False),
        (None, replace(ONE, power=Power.UNKNOWN), False),
        (None, replace(ONE, power=Power.SUSPENDED), True),
        (no_uuid, replace(ONE, power=off), False),
        (NODE, off_again, True),
        (replace(NODE, vm="others/worker-1"), off_again, False),
    ):
        assert isinstance(prove(KNOWN, node, {vm.key: vm}), VmProof if is_proven else Reason)


def test_a_node_that_names_another_vm_is_matched_again() -> None:
    other = replace(OF_KUBEVIRT, key=VmKey("two"), where="workers/worker-2", name="worker-2", system_uuid="")
    vms = {ONE.key: OF_KUBEVIRT, other.key: other}
    assert match(KNOWN, replace(NODES[FIRST], addresses=()), vms) == KNOWN
    assert match(KNOWN, replace(NODES[FIRST], vm=other.where), vms).vm == other.key


def test_a_vm_that_was_created_again_is_not_the_user_of_a_gpu() -> None:
    known = NodeVm(KEY, "vms", "a", NodeName("node"), PhaseName("night"), VmStep.STOP)
    seen = ObservedVm(KEY, "vms", "a", is_on=True, instance="vmi")
    assert prove_user(known, seen) == VmProof(KEY, "vmi")
    assert prove_user(known, replace(seen, vm=VmKey("new"))) is None


@pytest.mark.parametrize(
    ("answer", "code", "again"),
    [
        (Refused("NoGraphicsCapacity", "no GPU"), "NoGraphicsCapacity", False),
        (OutcomeUnknown("HypervisorUnknown", "the connection broke"), "HypervisorUnknown", True),
    ],
)
def test_a_call_without_success_is_the_reason_and_is_repeated_in_time(
    answer: Refused | OutcomeUnknown, code: str, *, again: bool
) -> None:
    last = {VmKey("one"): LastCall(Action.SUSPEND, answer, 1.0)}
    found = decided(observed(calls=last))
    reason = worker(found).reason
    assert reason is not None
    assert str(reason.code) == code
    assert (calls(found) == [Action.SUSPEND]) is again


def test_a_line_with_another_error_than_its_day_is_no_unreachable_phase() -> None:
    phases = (Phase(PhaseName("day"), "61 7 * * *"), SCHEDULE.phases[1])
    assert [reason.code for reason in faults(replace(SCHEDULE, phases=phases), EVENING)] == [
        ReasonCode.CRON_LINE_INVALID
    ]
    with pytest.raises(CronLineError, match="characters"):
        verify_line(f"{','.join(['0'] * 500)} 7 * * *")


def test_a_status_waits_for_what_its_workers_and_nodes_wait_for() -> None:
    why = reasons.node_not_registered("worker-1")
    other = reasons.vgpu_config_pending("bare01", "A10-4Q", "it has no status yet")
    day = PhaseName("day")
    nodes = (ConfiguredNode(FIRST, day, "A10-4Q", other), ConfiguredNode(FIRST, day, "A10-4Q"))
    assert ScheduleStatus(workers=(Worker(FIRST, reason=why), Worker(FIRST)), nodes=nodes).waiting == (why, other)


async def test_a_cluster_without_the_kind_is_named(authority: Authority, server: Pair) -> None:
    async with scripted(lambda request: NOT_FOUND, server, authority.certificate) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=authority.certificate, token=b"x"))
        with pytest.raises(NotFoundError, match="no kind VgpuSchedule; install the chart's CRDs"):
            await read_schedules(client, Namespace("gpuvirt"))
        with pytest.raises(NotFoundError, match="no kind VgpuSchedule"):
            await read_schedule(client, Namespace("gpuvirt"), "gpus")
        client.close()


async def test_a_cluster_without_kubevirt_is_unknown(authority: Authority, server: Pair) -> None:
    async with connected(lambda request: NOT_FOUND, server, authority.certificate) as vms:
        reading = await vms.read()
    assert isinstance(reading, VmsUnknown)
    assert reading.code == "BackEndMissing"


@pytest.mark.parametrize(
    ("reply", "kind", "code"),
    [(NOT_FOUND, Refused, "VmNotFound"), (FAILS, OutcomeUnknown, "HypervisorCallFailed")],
)
async def test_an_error_of_a_write_is_answered_by_what_is_certain(
    authority: Authority, server: Pair, reply: Reply, kind: type, code: str
) -> None:
    kubevirt = ServedKubeVirt()
    kubevirt.add("worker", "Manual")

    def answer(request: Request) -> Reply:
        return kubevirt.answer(request) if request.method == "GET" else reply

    async with connected(answer, server, authority.certificate) as vms:
        assert isinstance(vms, KubeVirtVms)
        found = await vms.call(Call(VmProof(KEY, "uid-worker-1"), Action.SHUT_DOWN))
        missing = await vms.call(Call(VmProof(VmKey("none")), Action.START))
    assert isinstance(found, kind)
    assert isinstance(found, Refused | OutcomeUnknown)
    assert found.code == code
    assert isinstance(missing, Refused)
    assert missing.code == "VmNotFound"


async def test_vms_without_their_vmis_are_unknown(authority: Authority, server: Pair) -> None:
    kubevirt = ServedKubeVirt()
    kubevirt.add("worker", "Manual")

    def answer(request: Request) -> Reply:
        return FAILS if request.path == VMIS else kubevirt.answer(request)

    async with connected(answer, server, authority.certificate) as vms:
        reading = await vms.read()
    assert VMS.endswith(f"{NAMESPACE}/virtualmachines")
    assert isinstance(reading, VmsUnknown)


async def test_a_vmi_that_another_object_controls_is_not_the_vm_s(authority: Authority, server: Pair) -> None:
    kubevirt = ServedKubeVirt()
    kubevirt.add("worker", "Manual").is_orphan = True
    async with connected(kubevirt.answer, server, authority.certificate) as vms:
        reading = await vms.read()
        found = await vms.call(Call(VmProof(KEY), Action.SHUT_DOWN))
    assert not isinstance(reading, VmsUnknown)
    assert (reading[KEY].instance, reading[KEY].addresses) == ("", ())
    assert isinstance(found, Refused)
    assert (found.code, kubevirt.writes) == ("WrongPowerState", [])


def off(strategy: str, **devices: object) -> VmObjects:
    """Return a VM that does not run."""
    return VmObjects(convert_vm(strategy, devices), None)


@pytest.mark.parametrize(
    ("action", "objects", "code", "words"),
    [
        (Action.START, off("WaitAsReceiver"), "WrongPowerState", "accepts no request to start"),
        (Action.START, off("Halted"), "HypervisorRefused", "not by a schedule"),
        (Action.SET_VGPU_TYPE, off("Manual"), "NotOneVgpu", "0 gpus and 0 hostDevices"),
        (Action.SET_VGPU_TYPE, off("Manual", gpus=[{"name": "a", "deviceName": "x/a"}] * 2), "NotOneVgpu", "2 gpus"),
        (Action.SUSPEND, off("Manual"), "SuspendNotSupported", "saves no VM"),
        (Action.SHUT_DOWN, off("Manual"), "WrongPowerState", "printableStatus"),
    ],
)
def test_kubevirt_refuses_before_a_write(action: Action, objects: VmObjects, code: str, words: str) -> None:
    assert isinstance(objects.vm, Vm)
    found = refusal("kv", Call(VmProof(KEY), action), objects)
    assert found is not None
    assert (str(found.code), words in found.text) == (code, True)
    assert refusal("kv", Call(VmProof(KEY), Action.START), off("Manual")) is None


def test_a_vm_of_an_unknown_strategy_is_not_shut_down() -> None:
    found = shutdown_refusal("kv", off("WaitAsReceiver"))
    assert found is not None
    assert "runStrategy is WaitAsReceiver, expected" in found.text
    assert shutdown_refusal("kv", off("Manual")) is None

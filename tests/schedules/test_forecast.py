"""A forecast has the order of a transition, and is what the rounds then do: for any workers, pods and volumes."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.workers.hypervisor import VmsUnknown
from gpuvirt.model.workers.observed import NodePod, ScheduleObservation, WorkerNode
from gpuvirt.model.workers.spec import Drain, Leave, Phase, PhaseName, Schedule, WorkerProfile
from gpuvirt.model.workers.status import ScheduleStatus, WorkerStep
from gpuvirt_schedules.decide.forecast import Forecast, PlannedAction, assumed_vms, forecast
from gpuvirt_schedules.decide.workers import blockers, pods_left

DAY, NIGHT = PhaseName("day"), PhaseName("night")
EVENING = datetime(2026, 1, 5, 20, tzinfo=UTC)
TYPES = {DAY: "grid-4q", NIGHT: "grid-8q"}
PROFILES = {phase: (WorkerProfile(TYPES[phase], (("vgpu.type", TYPES[phase]),)),) for phase in (DAY, NIGHT)}
PLAIN = Schedule(
    "gpus",
    "UTC",
    (Phase(DAY, "0 7 * * *", PROFILES[DAY]), Phase(NIGHT, "0 20 * * *", PROFILES[NIGHT])),
    generation=1,
)
LEAVING = {PlannedAction.SUSPEND, PlannedAction.SHUT_DOWN}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Schedule, ScheduleObservation]:
    """Workers of day and night as they are in the evening: in any state in which an admin may have left them."""
    drain = Drain(deletes_bare_pods=draw(st.booleans()), deletes_empty_dir_data=draw(st.booleans()))
    schedule = replace(PLAIN, drain=drain, leave=draw(st.sampled_from(Leave)))
    nodes, pods, attached = dict[NodeName, WorkerNode](), dict[NodeName, tuple[NodePod, ...]](), {}
    for number in range(draw(st.integers(1, 4))):
        name = NodeName(f"worker-{number}")
        phases = draw(st.sets(st.sampled_from([DAY, NIGHT]), min_size=1))
        types = {phase: TYPES[phase] for phase in sorted(phases)} if draw(st.booleans()) else {}
        cordoned_by = draw(st.sampled_from(["", "gpus"]))
        nodes[name] = WorkerNode(
            name,
            f"uid-{number}",
            "1",
            frozenset(phases),
            system_uuid=f"421c5a83-0000-4000-8000-{number:012}",
            is_unschedulable=bool(cordoned_by) or draw(st.booleans()),
            cordoned_by=cordoned_by,
            is_announced=draw(st.booleans()),
            is_ready=draw(st.booleans()),
            renewal="2026-01-05T19:59:58Z",
            types=types,
        )
        flags = st.booleans()
        pods[name] = tuple(
            NodePod(PodUid(f"{number}-{at}"), "default", f"pod-{number}-{at}", *draw(st.tuples(*[flags] * 6)))
            for at in range(draw(st.integers(0, 3)))
        )
        attached[name] = tuple(f"volume-{number}-{at}" for at in range(draw(st.integers(0, 2))))
    observed = ScheduleObservation(nodes, pods, attached, VmsUnknown("HypervisorUnknown", "not asked"))
    return schedule, replace(observed, vms=assumed_vms(ScheduleStatus(), nodes, schedule.leave))


def foreseen(schedule: Schedule, observed: ScheduleObservation) -> Forecast:
    return forecast(schedule, ScheduleStatus(phase=DAY, generation=1), observed, {}, EVENING)


@given(worlds())
def test_no_vm_starts_before_all_others_have_left(world: tuple[Schedule, ScheduleObservation]) -> None:
    actions = [step.action for step in foreseen(*world).steps]
    if PlannedAction.START in actions:
        assert not LEAVING & set(actions[actions.index(PlannedAction.START) :])


@given(worlds())
def test_a_vm_leaves_after_its_pods_and_volumes(world: tuple[Schedule, ScheduleObservation]) -> None:
    schedule, observed = world
    steps = foreseen(schedule, observed).steps
    for at, step in enumerate(steps):
        if step.action in LEAVING:
            before = {(other.action, other.target) for other in steps[:at] if other.node == step.node}
            left = [pod for pod in pods_left(observed.pods[step.node]) if not pod.is_ending]
            assert {(PlannedAction.EVICT, pod.where) for pod in left} <= before
            assert not blockers(left, schedule.drain)
            volumes = observed.attachments[step.node]
            assert not volumes or (PlannedAction.DETACH, ", ".join(volumes)) in before


@given(worlds())
def test_each_worker_gets_to_its_end_or_waits_with_a_reason(world: tuple[Schedule, ScheduleObservation]) -> None:
    schedule, observed = world
    found = foreseen(schedule, observed)
    waiting = {worker.node for worker in found.waiting}
    assert all(worker.step not in {WorkerStep.AWAY, WorkerStep.SERVING} for worker in found.waiting)
    if not waiting:
        started = {step.node for step in found.steps if step.action is PlannedAction.START}
        asleep = {name for name, node in observed.nodes.items() if NIGHT in node.phases and not node.is_ready}
        assert asleep <= started
    blocked = {
        name
        for name, node in observed.nodes.items()
        if NIGHT not in node.phases and node.is_ready and blockers(pods_left(observed.pods[name]), schedule.drain)
    }
    assert blocked <= waiting


@given(worlds())
def test_what_a_forecast_leaves_needs_no_step(world: tuple[Schedule, ScheduleObservation]) -> None:
    schedule, observed = world
    first = foreseen(schedule, observed)
    assert foreseen(schedule, observed) == first, "a forecast changes nothing"
    assert len(first.steps) == len({(step.node, step.action, step.target) for step in first.steps}), (
        "no step comes twice"
    )


@given(worlds())
def test_a_type_is_set_before_its_vm_starts_and_its_labels_after(world: tuple[Schedule, ScheduleObservation]) -> None:
    schedule, observed = world
    found = foreseen(schedule, observed)
    waiting = {worker.node for worker in found.waiting}
    for name, node in observed.nodes.items():
        actions = [step.action for step in found.steps if step.node == name]
        assert PlannedAction.SUSPEND not in actions or len(node.types) < 2
        if name in waiting or NIGHT not in node.phases or not node.types:
            assert PlannedAction.LABEL not in actions
            continue
        assert PlannedAction.LABEL in actions
        if len(node.types) > 1:
            order = [PlannedAction.SET_VGPU_TYPE, PlannedAction.START, PlannedAction.LABEL]
            assert [action for action in actions if action in order] == order

"""VgpuSchedules as the model's records: specs with what is wrong in their texts, and statuses in both directions.

The condition ConfigsKnown of a status says whether each phase names a vGPU config that exists, before it begins.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds import vgpuschedule as kind
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.kinds.vgpuschedule import CONFIGS_KNOWN, VgpuSchedule
from gpuvirt.model.reasons import Reason, ReasonCode, joined
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import VmKey
from gpuvirt.model.workers.observed import NodeVm
from gpuvirt.model.workers.spec import Drain, Leave, Phase, PhaseName, PhaseOverride, Schedule, VmPolicy, WorkerProfile
from gpuvirt.model.workers.status import (
    ConfiguredNode,
    PastSwitch,
    ScheduleStatus,
    Transition,
    Worker,
    not_before_switch,
)
from gpuvirt_schedules.decide.transition import Advance


def texts_of(reason: Reason | None) -> tuple[str, str, str, str]:
    """Return the code, the subject, the message and the fix that a status has; empty ones without a reason."""
    return (str(reason.code), reason.subject, reason.message, reason.fix or "") if reason is not None else ("",) * 4


def time_of(text: str) -> datetime | None:
    """Return a time in UTC; None if it is none, which begins the step again."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return None


def text_of(at: datetime) -> str:
    """Return a time as a status has it."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


State = tuple[str, str, str]
"""Status, reason and message of a condition."""


def configs_state(stored: VgpuSchedule, unknown: tuple[Reason, ...] | None) -> State | None:
    """Return the condition's state; None for a schedule that has no vGPU configs, or while nothing is observed.

    `unknown` has the phases whose vGPU config is missing or not known; None keeps what the status says.
    """
    if not stored.config_phases:
        return None
    if unknown is None:
        return stored_state(stored)
    if not unknown:
        return "True", "ConfigsKnown", ""
    missing = tuple(reason for reason in unknown if reason.code is ReasonCode.CONFIG_INVALID)
    return ("False", *joined(missing)) if missing else ("Unknown", *joined(unknown))


def stored_state(stored: VgpuSchedule) -> State | None:
    """Return what the status says; None if it has no such condition."""
    found = (condition for condition in stored.status.conditions if condition.type == CONFIGS_KNOWN)
    return next(((condition.status, condition.reason, condition.message) for condition in found), None)


def is_outdated(stored: VgpuSchedule, unknown: tuple[Reason, ...] | None) -> bool:
    """Return whether the status says something else than what is observed."""
    return configs_state(stored, unknown) != stored_state(stored)


_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[hms])+", re.ASCII)
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([hms])", re.ASCII)
_CONFIG = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
"""A name that the value of a label can be."""
LONGEST_DURATION = 20
DEFAULT_ANNOUNCE_S = 900.0
_HYPERVISORS = "vsphere.secretRef, libvirt.secretRef, kubeVirt.namespace"


def duration_s(text: str) -> float | None:
    """Return a duration as Go writes it (`1h30m`) in seconds; None if it is none."""
    if len(text) > LONGEST_DURATION or not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))


def schedule_of(stored: kind.VgpuSchedule) -> tuple[Schedule, tuple[Reason, ...]]:
    """Return the spec, and what is wrong in its texts; values that can't be used have their defaults."""
    spec, faults = stored.spec, list[Reason]()
    announce_s, timeout_s = duration_s(spec.announce), duration_s(spec.drain.timeout)
    if announce_s is None:
        faults.append(reasons.spec_invalid("spec.announce", f"is {spec.announce!r}, expected a duration such as 15m"))
    if timeout_s is None:
        text = f"is {spec.drain.timeout!r}, expected a duration such as 10m"
        faults.append(reasons.spec_invalid("spec.drain.timeout", text))
    has_workers = any(phase.workers is not None for phase in spec.phases) or bool(stored.status.workers)
    if has_workers or not stored.config_phases:
        faults += _hypervisor_faults(spec)
    for position, phase in enumerate(spec.phases):
        faults += _phase_faults(phase, f"spec.phases[{position}]")
    overrides = list[PhaseOverride]()
    for position, override in enumerate(spec.overrides):
        begin, end = _local(override.begin), _local(override.until)
        if begin is None or end is None:
            text = "has a time that is not a local time such as 2026-12-24T12:00"
            faults.append(reasons.spec_invalid(f"spec.overrides[{position}]", text))
        else:
            overrides.append(PhaseOverride(PhaseName(override.phase), begin, end, override.by))
    drain = Drain(
        Drain().timeout_s if timeout_s is None else timeout_s,
        spec.drain.on_timeout,
        spec.drain.delete_empty_dir_data,
        spec.drain.delete_bare_pods,
    )
    schedule = Schedule(
        stored.metadata.name,
        spec.time_zone,
        tuple(map(_phase, spec.phases)),
        tuple(overrides),
        DEFAULT_ANNOUNCE_S if announce_s is None else announce_s,
        drain,
        spec.leave,
        spec.suspend,
        stored.metadata.generation,
        has_workers,
        spec.begin,
    )
    return schedule, tuple(faults)


def _phase_faults(phase: kind.PhaseSpec, field: str) -> Iterator[Reason]:
    """Yield what is wrong with what a phase selects."""
    for name, selector in (("workers", phase.workers), ("nodes", phase.nodes)):
        if selector is not None and not selector.match_labels and not selector.match_expressions:
            yield reasons.spec_invalid(f"{field}.{name}", "selects every node of the cluster")
    if phase.workers is None and phase.nodes is None:
        yield reasons.spec_invalid(field, "has neither workers nor nodes")
    if phase.workers is None and phase.profiles:
        yield reasons.spec_invalid(f"{field}.profiles", "apply to workers, but the phase has none")
    if (phase.nodes is None) is not (phase.vgpu_config is None):
        text = "is needed beside vgpuConfig" if phase.nodes is None else "needs a vgpuConfig beside it"
        yield reasons.spec_invalid(f"{field}.nodes", text)
    if phase.nodes is None and phase.vms is not VmPolicy.WAIT:
        yield reasons.spec_invalid(f"{field}.vms", "applies to VMs of nodes, but the phase has none")
    if phase.vgpu_config is not None and not _CONFIG.fullmatch(phase.vgpu_config):
        expected = "expected a name as the label nvidia.com/vgpu.config has it, such as A10-4Q"
        yield reasons.spec_invalid(f"{field}.vgpuConfig", f"is {phase.vgpu_config!r}; {expected}")


def _hypervisor_faults(spec: kind.Spec) -> Iterator[Reason]:
    place = spec.hypervisor
    named = sum(found is not None for found in (place.vsphere, place.libvirt, place.kube_virt))
    if named != 1:
        text = f"names {'several hypervisors' if named else 'no hypervisor'}; expected one of {_HYPERVISORS}"
        yield reasons.spec_invalid("spec.hypervisor", text)
    if place.kube_virt is not None and spec.leave is Leave.SUSPEND:
        yield reasons.spec_invalid("spec.leave", "is Suspend, which KubeVirt does not support; expected ShutDown")


def _phase(phase: kind.PhaseSpec) -> Phase:
    profiles = tuple(
        WorkerProfile(profile.vgpu_type, tuple(sorted(profile.labels.items()))) for profile in phase.profiles
    )
    selectors = (phase.workers, phase.nodes, *(profile.workers for profile in phase.profiles))
    keys = {
        key
        for selector in selectors
        if selector is not None
        for key in (*selector.match_labels, *(requirement.key for requirement in selector.match_expressions))
    }
    return Phase(PhaseName(phase.name), phase.start, profiles, tuple(sorted(keys)), phase.vgpu_config, phase.vms)


def status_of(stored: kind.VgpuSchedule) -> ScheduleStatus:
    """Return the status as the model has it."""
    status = stored.status
    return ScheduleStatus(
        PhaseName(status.phase) if status.phase is not None else None,
        _transition(status.transition),
        PhaseName(status.announced) if status.announced is not None else None,
        tuple(map(_worker, status.workers)),
        status.observed_generation,
        tuple(map(_node, status.nodes)),
        tuple(map(_vm, status.vms)),
        time_of(status.last_switch or ""),
        _transition(status.given_up),
        tuple(_switches(status.history)),
    )


def schedule_time(stored: kind.VgpuSchedule, now: datetime) -> datetime:
    """Return the time by which a schedule is followed: `now`, but not before its last switch."""
    return not_before_switch(now, time_of(stored.status.last_switch or ""))


def written(
    before: kind.VgpuSchedule,
    status: ScheduleStatus,
    problems: tuple[Reason, ...],
    advance: Advance,
    now: datetime,
    unknown: tuple[Reason, ...] | None = None,
) -> kind.Status:
    """Return the status to write; `unknown` has the phases whose vGPU config is missing, None if nothing is known."""
    following = advance.next_switch
    return kind.Status(
        phase=status.phase,
        last_switch=text_of(status.last_switch) if status.last_switch is not None else None,
        next_phase=following.phase if following is not None else None,
        next_switch=text_of(following.at) if following is not None else None,
        announced=status.announced,
        transition=_written_transition(status.transition),
        given_up=_written_transition(status.given_up),
        workers=tuple(_written_worker(worker) for worker in status.workers),
        nodes=tuple(_written_node(node) for node in status.nodes),
        vms=tuple(map(_written_vm, status.vms)),
        history=tuple(_written_switch(switch) for switch in status.history),
        observed_generation=status.generation,
        conditions=tuple(conditions_of(before, status, problems, now, unknown, advance.hypervisor)),
    )


def conditions_of(
    before: kind.VgpuSchedule,
    status: ScheduleStatus,
    problems: tuple[Reason, ...],
    now: datetime,
    unknown: tuple[Reason, ...] | None = None,
    hypervisor: Reason | None = None,
) -> Iterator[Condition]:
    """Yield Ready, Valid, Held and ConfigsKnown; each keeps the time of its last change."""
    held = [worker.reason for worker in status.held if worker.reason is not None]
    held += [vm.reason for vm in status.held_vms if vm.reason is not None]
    waiting = status.waiting
    valid = ("True", "Valid", "") if not problems else ("False", *joined(problems))
    holds = ("True", *joined(tuple(held))) if held else ("False", "NotHeld", "")
    ready = ("True", "PhaseReached", f"phase {status.phase}")
    if problems:
        ready = valid
    elif status.unreached is not None:
        ready = ("False", *joined((status.unreached,)))
    elif status.transition is not None:
        ready = ("False", *(joined(tuple(held or waiting)) if waiting else ("Switching", "")))
    elif pending := status.waiting_nodes:
        ready = ("False", *joined(pending))
    elif hypervisor is not None:
        ready = ("False", *joined((hypervisor,)))
    states = {kind.READY: ready, kind.VALID: valid, kind.HELD: holds}
    if (configs := configs_state(before, unknown)) is not None:
        states[kind.CONFIGS_KNOWN] = configs
    for name, (state, code, message) in states.items():
        last = next((condition for condition in before.status.conditions if condition.type == name), None)
        is_same = last is not None and last.status == state
        yield Condition(
            type=name,
            status=state,
            reason=code,
            message=message,
            last_transition_time=last.last_transition_time if last is not None and is_same else text_of(now),
            observed_generation=before.metadata.generation,
        )


def _transition(stored: kind.TransitionStatus | None) -> Transition | None:
    began = time_of(stored.began) if stored is not None else None
    return Transition(PhaseName(stored.phase), began, stored.generation) if stored is not None and began else None


def _written_transition(transition: Transition | None) -> kind.TransitionStatus | None:
    if transition is None:
        return None
    began = text_of(transition.began)
    return kind.TransitionStatus(phase=transition.phase, began=began, generation=transition.generation)


def _worker(worker: kind.WorkerStatus) -> Worker:
    reason = reasons.stored(worker.code, worker.subject, worker.message, worker.fix)
    return Worker(
        NodeName(worker.node),
        worker.node_uid,
        tuple(PhaseName(phase) for phase in worker.phases),
        VmKey(worker.vm),
        worker.vm_name,
        worker.step,
        time_of(worker.since),
        worker.renewal,
        worker.held,
        worker.forced,
        reason,
        tuple((PhaseName(phase), vgpu_type) for phase, vgpu_type in sorted(worker.types.items())),
    )


def _written_worker(worker: Worker) -> kind.WorkerStatus:
    code, subject, message, fix = texts_of(worker.reason)
    return kind.WorkerStatus(
        node=worker.node,
        node_uid=worker.node_uid,
        phases=worker.phases,
        types={str(phase): vgpu_type for phase, vgpu_type in worker.types},
        vm=worker.vm,
        vm_name=worker.vm_name,
        step=worker.step,
        since=text_of(worker.since) if worker.since is not None else "",
        renewal=worker.renewal,
        held=worker.is_held,
        forced=worker.forced,
        code=code,
        subject=subject,
        message=message,
        fix=fix,
    )


def _node(node: kind.NodeStatus) -> ConfiguredNode:
    reason = reasons.stored(node.code, node.subject, node.message, node.fix)
    if reason is None and not node.applied:
        reason = reasons.vgpu_config_pending(node.node, node.vgpu_config, "the status does not say why")
    return ConfiguredNode(NodeName(node.node), PhaseName(node.phase), node.vgpu_config, reason)


def _written_node(node: ConfiguredNode) -> kind.NodeStatus:
    code, subject, message, fix = texts_of(node.reason)
    return kind.NodeStatus(
        node=node.node,
        phase=node.phase,
        vgpu_config=node.vgpu_config,
        applied=node.is_applied,
        code=code,
        subject=subject,
        message=message,
        fix=fix,
    )


def _vm(vm: kind.VmStatus) -> NodeVm:
    reason = reasons.stored(vm.code, vm.subject, vm.message, vm.fix)
    key, node, phase = VmKey(vm.uid), NodeName(vm.node), PhaseName(vm.phase)
    since = time_of(vm.since)
    return NodeVm(key, vm.namespace, vm.name, node, phase, vm.step, since, vm.held, vm.forced, reason)


def _written_vm(vm: NodeVm) -> kind.VmStatus:
    code, subject, message, fix = texts_of(vm.reason)
    return kind.VmStatus(
        namespace=vm.namespace,
        name=vm.name,
        uid=vm.vm,
        node=vm.node,
        phase=vm.phase,
        step=vm.step,
        since=text_of(vm.since) if vm.since is not None else "",
        held=vm.is_held,
        forced=vm.is_forced,
        code=code,
        subject=subject,
        message=message,
        fix=fix,
    )


def _switches(stored: Iterable[kind.PastSwitchStatus]) -> Iterator[PastSwitch]:
    """Yield the last switches, without one whose beginning is no time."""
    for switch in stored:
        if (began := time_of(switch.began)) is not None:
            before = PhaseName(switch.before) if switch.before else None
            yield PastSwitch(
                PhaseName(switch.phase),
                before,
                began,
                switch.cause,
                switch.by,
                time_of(switch.ended),
                switch.outcome,
                switch.evicted,
                switch.deleted,
            )


def _written_switch(switch: PastSwitch) -> kind.PastSwitchStatus:
    return kind.PastSwitchStatus(
        phase=switch.phase,
        before=switch.before or "",
        began=text_of(switch.began),
        ended=text_of(switch.ended) if switch.ended is not None else "",
        outcome=switch.outcome,
        cause=switch.cause,
        by=switch.by,
        evicted=switch.evicted,
        deleted=switch.deleted,
    )


def _local(text: str) -> datetime | None:
    """Return a time without a zone; None if it is none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is None else None

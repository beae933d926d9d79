"""The VMs of a VgpuSchedule's status as the model's records, and the texts and times of all parts of a status."""

from datetime import UTC, datetime

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds.vgpuschedule import VmStatus
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import VmKey
from gpuvirt.model.workers.nodevms import NodeVm
from gpuvirt.model.workers.spec import PhaseName


def vm_of(vm: VmStatus) -> NodeVm:
    """Return a VM as the model has it."""
    reason = reasons.stored(vm.code, vm.subject, vm.message, vm.fix)
    key, node, phase = VmKey(vm.uid), NodeName(vm.node), PhaseName(vm.phase)
    since = time_of(vm.since)
    return NodeVm(key, vm.namespace, vm.name, node, phase, vm.step, since, vm.held, vm.forced, reason)


def written_vm(vm: NodeVm) -> VmStatus:
    """Return a VM as the status has it."""
    code, subject, message, fix = texts_of(vm.reason)
    return VmStatus(
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

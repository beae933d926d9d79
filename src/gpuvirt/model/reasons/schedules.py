"""Why nothing is done for a VgpuSchedule, or what a worker of it, its VM or its hypervisor waits for."""

from collections.abc import Mapping, Sequence

from gpuvirt.model.reasons.reason import Reason, Seen, without_code
from gpuvirt.model.reasons.reasoncodes import ReasonCode

HYPERVISOR_WORDS: Mapping[ReasonCode, tuple[str, str]] = {
    ReasonCode.HYPERVISOR_UNREACHABLE: (
        "can't be reached",
        "check that the hypervisor runs, `server` in the Secret, and the network policies of the controller",
    ),
    ReasonCode.HYPERVISOR_NOT_TRUSTED: (
        "presents no certificate that `ca` verifies",
        "put the PEM certificate that signs the hypervisor's into `ca` of the Secret, and its name into `server`",
    ),
    ReasonCode.WRONG_CREDENTIALS: (
        "refuses the credentials",
        "correct `user` and `password`, or `certificate` and `key`, of the Secret",
    ),
    ReasonCode.HYPERVISOR_SESSION_LOST: (
        "ends each session at once",
        "check the hypervisor's session limit for this user; gpuvirt does nothing until the hypervisor answers",
    ),
    ReasonCode.HYPERVISOR_FORBIDDEN: (
        "denies the request to this user",
        "give the user the privileges that docs/hypervisors.md lists, on the worker VMs",
    ),
    ReasonCode.HYPERVISOR_ANSWER_INCOMPLETE: (
        "gave an incomplete answer",
        "check whether the user may read the VM; if so, pack a support archive: gpuvirt support",
    ),
    ReasonCode.HYPERVISOR_SILENT: (
        "did not answer in time",
        "check the hypervisor's load; gpuvirt reads the VMs again before it repeats a call",
    ),
    ReasonCode.HYPERVISOR_CONNECTION_ENDED: (
        "lost its connection, because the connected process of gpuvirt has ended",
        (
            "no action needed if it happens once: gpuvirt reads the VMs again before it repeats a call; otherwise check"
            " the memory limit"
        ),
    ),
    ReasonCode.HYPERVISOR_REFUSED: (
        "refused the call",
        "see the VM's events in the hypervisor",
    ),
    ReasonCode.HYPERVISOR_CALL_FAILED: (
        "failed during the call",
        "see the VM's events in the hypervisor; gpuvirt reads the VMs again before it repeats a call",
    ),
    ReasonCode.NO_GRAPHICS_CAPACITY: (
        "has no GPU with room for the VM's vGPU",
        "find the VM that uses the GPU: it is not a worker of this schedule, or has not been suspended",
    ),
    ReasonCode.WRONG_POWER_STATE: (
        "reports that the VM is in another state",
        "no action needed if it happens once: gpuvirt reads the VM again",
    ),
    ReasonCode.VM_NOT_FOUND: (
        "shows no such VM",
        "check that the VM exists, and that the user may read it",
    ),
    ReasonCode.GUEST_TOOLS_MISSING: (
        "can't ask the guest to shut down",
        "install open-vm-tools or qemu-guest-agent in the worker, or set `leave: Suspend`",
    ),
    ReasonCode.SUSPEND_NOT_SUPPORTED: (
        "can't suspend the VM",
        "set `leave: ShutDown`, or install a hypervisor and a vGPU manager that can suspend such VMs",
    ),
    ReasonCode.VGPU_TYPE_NOT_OFFERED: (
        "does not list the VM's vGPU type",
        "see the host's GPUs and its vGPU manager; the host may be in maintenance",
    ),
    ReasonCode.NOT_ONE_VGPU: (
        "can't change the vGPU's type",
        "give the VM exactly one vGPU",
    ),
    ReasonCode.BACK_END_MISSING: (
        "can't be reached: its library is not installed",
        "pip install 'gpuvirt-schedules[vsphere]' or 'gpuvirt-schedules[libvirt]'",
    ),
    ReasonCode.LEASE_LOST: (
        "got no request, because this controller does not lead",
        "see the controller's log for its lease; another controller may lead",
    ),
}
"""The message, and the fix, of each code."""


def hypervisor_problem(code: ReasonCode, server: str, words: str) -> Reason:
    """Return the reason of one of these codes. `words` are the hypervisor's own, without credentials."""
    message, fix = HYPERVISOR_WORDS[code]
    return Reason(code, f"the hypervisor {server}", message, (Seen("", words),) if words else (), fix)


_FIX = "shut down the VM, or wait until it ends; then the node gets the vGPU config"


def vm_not_stopped(vm: str, why: str, fix: str = _FIX) -> Reason:
    """The vGPU config of the phase waits for the VM."""
    return Reason(ReasonCode.VM_NOT_STOPPED, f"VM {vm}", f"is not stopped for the phase's vGPU config: {why}", fix=fix)


def vm_budget(vm: str, budget: str) -> Reason:
    """A PodDisruptionBudget counts the VM's pod."""
    why = f"PodDisruptionBudget {budget} allows no further disruption"
    return vm_not_stopped(vm, why, "change the budget, or set drain.onTimeout: Force")


def vm_pending(vm: str, step: str) -> Reason:
    """A step takes some time."""
    message = f"waits for the step {step} to take effect"
    return Reason(ReasonCode.STEP_PENDING, f"VM {vm}", message, fix="see the events of the VM and its VMI")


SHOWN = 5
"""How many names a message lists."""
SCHEDULE = "the VgpuSchedule"


def spec_invalid(field: str, problem: str) -> Reason:
    """A field of the spec can't be used."""
    return Reason(ReasonCode.SCHEDULE_INVALID, field, problem, fix="correct the field; nothing is done until then")


def time_zone_unknown(field: str, zone: str) -> Reason:
    """The zone is not in the database."""
    fix = "write a name of the IANA database: Europe/Berlin, UTC"
    return Reason(ReasonCode.TIME_ZONE_UNKNOWN, field, "is not a known time zone", (Seen(field, zone),), fix)


def vgpu_config_pending(node: str, config: str, problem: str, code: str = "") -> Reason:
    """The agent applies it once no VM uses a vGPU that has to go. `code` is the agent's, if the catalogue has it."""
    known = ReasonCode.named(code) or ReasonCode.VGPU_CONFIG_PENDING
    message = f"does not have the vGPU config {config} yet: {problem}"
    fix = "stop or migrate the VMs that use its vGPUs, or wait until they end; then the node gets the vGPU config"
    return Reason(known, f"node {node}", message, fix=fix)


def no_gpu_node(node: str, config: str) -> Reason:
    """A node's agent makes its GpuNode."""
    message = (
        f"does not have the vGPU config {config} yet: it has no GpuNode, so it has no GPUs that gpuvirt manages, or no"
        " agent has started there"
    )
    fix = "check with gpuvirt status whether an agent runs on the node; such nodes have the label gpuvirt.io/node=true"
    return Reason(ReasonCode.VGPU_CONFIG_PENDING, f"node {node}", message, fix=fix)


def hypervisor_unknown(code: str, text: str) -> Reason:
    """Nothing is known about any VM. `code` is the connection's, if the catalogue has it; its text has a fix then."""
    known = ReasonCode.named(code) or ReasonCode.HYPERVISOR_UNKNOWN
    message = f"gave no complete answer, so no VM counts as off: {without_code(code, text)}"
    fix = "see server, CA and user in the schedule's Secret" if known is ReasonCode.HYPERVISOR_UNKNOWN else None
    return Reason(known, "the hypervisor", message, fix=fix)


def node_not_registered(node: str) -> Reason:
    """Pods of the worker can't be seen."""
    fix = "restart its kubelet, which registers it; give it the labels of its phase"
    return Reason(ReasonCode.NODE_NOT_REGISTERED, f"node {node}", "has no Node object", fix=fix)


def pods_left(node: str, pods: Sequence[str]) -> Reason:
    """Pods end by themselves, or a budget is in the way."""
    fix = "see the pods and their PodDisruptionBudgets: kubectl get pdb -A"
    return Reason(ReasonCode.PODS_LEFT, f"node {node}", f"still has pods: {listed(pods)}", fix=fix)


def step_pending(node: str, step: str) -> Reason:
    """A step takes some time."""
    fix = "see the events of the schedule, and the tasks of the hypervisor"
    return Reason(ReasonCode.STEP_PENDING, f"node {node}", f"waits for the step {step} to take effect", fix=fix)


def call_refused(node: str, code: str, text: str) -> Reason:
    """The hypervisor's own words. `code` is the connection's, if the catalogue has it."""
    known = ReasonCode.named(code) or ReasonCode.CALL_REFUSED
    return Reason(known, f"node {node}", f"stays as it is, since the hypervisor refuses: {without_code(code, text)}")


def right_missing(subject: str, problem: str) -> Reason:
    """A rule of a role is missing. `problem` has the API server's words, and the rule."""
    message = f"waits for a right of the controller: {problem}"
    fix = "add the rule to the controller's role; the chart's value schedule.enabled=true has all rules"
    return Reason(ReasonCode.RIGHT_MISSING, subject, message, fix=fix)


def stored(code: str, subject: str, message: str, fix: str) -> Reason | None:
    """Return the reason that a status has in parts; None if it has none, or one of another version."""
    known = ReasonCode.named(code)
    return Reason(known, subject, message, fix=fix or None) if known is not None else None


def listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

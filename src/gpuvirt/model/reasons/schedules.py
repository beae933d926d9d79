"""Why nothing is done for a VgpuSchedule, or what a worker of it waits for."""

from collections.abc import Sequence

from gpuvirt.model.reasons.reason import Reason, Seen, without_code
from gpuvirt.model.reasons.reasoncodes import ReasonCode

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
